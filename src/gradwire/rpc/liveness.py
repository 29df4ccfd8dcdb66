"""How a worker notices that another one is gone, where no event of the kernel says so.

Every connection is watched for its end (`reactor`). Two things remain:

- A machine that vanishes ends nothing. The kernel probes idle connections; those on which something is under way are looked
  at here, once a second.
- The end of a control lane is what tells of a worker's end, unless it was only this connection's fault: one side could not
  read a message, say. A worker that is left without a control lane, in either direction, gets another one. If it cannot be
  reached for that, it has ended.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from gradwire.errors import (
    AuthenticationFailed,
    ConnectionLost,
    NotInitialized,
    ResourceExhausted,
    RpcTimeout,
    UnknownWorker,
    WorkerLost,
)
from gradwire.types import WorkerAddress

if TYPE_CHECKING:
    from gradwire.rpc.agent import Agent

_LOOK_S = 1.0  # between two looks at a connection
_RETURN_S = 1.0  # between the end of a worker's connection and the look whether it has a control lane
_NEVER = float("inf")


class Liveness:
    """Looks after the connections of one worker, with both halves: those that it opened and those of others."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        # Workers that may have no control lane, by name, and when to look; single operations only.
        self._doubtful: dict[str, tuple[float, WorkerAddress]] = {}

    def connections_opened(self) -> None:
        """Look at new connections soon; call it when they are listed."""
        self._agent.reactor.expect(time.monotonic() + _LOOK_S)

    def connection_ended(self, address: WorkerAddress) -> None:
        """See to it that the worker has a control lane; call it when the connection is not listed any more."""
        if self._agent.is_closed:
            return
        # Not put off by the next one that ends: a worker could go on with that.
        known = self._doubtful.get(address.info.name)
        when = known[0] if known is not None else time.monotonic() + _RETURN_S
        self._doubtful[address.info.name] = when, address
        self._agent.reactor.expect(when)

    def sweep(self, now: float) -> float:
        """End connections whose machine is gone, and reach for workers without a control lane.

        Returns:
            When to look again.
        """
        wanted, agent = _NEVER, self._agent
        for reader in [*(lane.reader for lane in agent.peers.lanes()), *agent.server.readers()]:
            if reader.connection.can_vanish:
                wanted = now + _LOOK_S
                if reader.connection.is_vanished():
                    vanished = ConnectionLost("the other machine does not acknowledge anything")
                    agent.reactor.run_soon(partial(reader.end, vanished))
        for name, (when, address) in list(self._doubtful.items()):
            if when > now:
                wanted = min(wanted, when)
                continue
            self._doubtful.pop(name, None)  # before looking: what ends later is listed again
            if not self._is_settled(name):
                agent.reactor.run_soon(partial(self._reach, address))
        return wanted

    def _is_settled(self, name: str) -> bool:
        """Whether a worker has ended, or its end will be noticed."""
        peer = self._agent.peers.known(name)
        has_lane = peer is not None and "control" in peer.lanes
        return has_lane or self._agent.has_ended(name) or self._agent.server.has_control_lane_of(name)

    def _reach(self, address: WorkerAddress) -> None:
        """Open a control lane to a worker; the one that it had has ended, and it has not, as far as is known."""
        agent, name = self._agent, address.info.name
        try:
            agent.peers.peer(name).lane("control", time.monotonic() + agent.config.limits.handshake_timeout_s)
        except NotInitialized:  # this worker has shut down
            return
        except (WorkerLost, AuthenticationFailed, UnknownWorker) as error:
            if isinstance(error.__cause__, ResourceExhausted):
                self.connection_ended(address)  # look again
            elif not self._is_settled(name):
                agent.on_worker_ended(address, f"its control lane ended, and then: {error}", was_orderly=False)
        except (RpcTimeout, OSError):  # it may be stopped, or this process out of descriptors
            self.connection_ended(address)
