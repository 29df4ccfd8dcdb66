"""The other workers: connections to them, which incarnations are alive, and their addresses.

A peer has two lanes: ``calls`` for user functions, ``control`` for everything that must never wait behind them. Both are
opened together, on first use. A worker's death is detected by the end of its control lane; `Liveness` ensures that it has
one.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from gradwire import _interrupts
from gradwire.errors import (
    AuthenticationFailed,
    ConnectFailed,
    ConnectionClosed,
    ConnectionLost,
    IdentityTaken,
    NotInitialized,
    ResourceExhausted,
    RpcTimeout,
    TransportError,
    UnknownWorker,
    WorkerLost,
)
from gradwire.observe import events
from gradwire.rpc.connection import Connection
from gradwire.rpc.pending_calls import PendingCall
from gradwire.rpc.reader import Until
from gradwire.transports import registry
from gradwire.transports.handshake import CALLER_ACCEPTS, CallerHandshake
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.wire.messages import Challenge, Goodbye, Lane, Message

if TYPE_CHECKING:
    from gradwire.rpc.agent import Agent


_LOOK_S = 0.002
_SLICE_S = 0.05  # a thread that waits for the one that connects looks so often for Ctrl-C
_GOODBYE_S = 0.2
_MOST_ROUNDS = 5  # two are enough, unless more connections end meanwhile
_GIVEN_UP = "the connection attempt was abandoned"
_LANES: tuple[Lane, ...] = ("calls", "control")


class _EndsDiffer(Exception):
    """One of two workers has not noticed yet that their earlier connections have ended: it would end the new one, too."""

    def __init__(self, address: WorkerAddress, num_ends: int) -> None:
        super().__init__(address, num_ends)
        self.address, self.num_ends = address, num_ends  # as the other worker has counted them


class Peer:
    """Another worker, as seen from here.

    Attributes:
        lanes: The connections that this worker has opened to it, by lane.
        last_seen: Time of its last reply, as of `time.time`.
    """

    def __init__(self, agent: Agent, name: str) -> None:
        self.agent = agent
        self.name = name
        self.lanes: dict[str, Connection] = {}
        self.last_seen: float | None = None
        self._lock = threading.Lock()  # held by the one thread that connects

    def __repr__(self) -> str:
        return f"<Peer {self.name} {'connected' if self.lanes else self.lost_reason or 'not connected'}>"

    @property
    def lost_reason(self) -> str | None:
        """How it ended according to its supervisor; None while it counts as a member."""
        return self.agent.lost_reason(self.name)

    def lane(self, kind: Lane, deadline: float) -> Connection:
        """Return the open lane, connecting first if need be."""
        connection = self.lanes.get(kind)
        if connection is not None:
            return connection
        limit = min(deadline, time.monotonic() + self.agent.config.limits.handshake_timeout_s)
        for _ in range(_MOST_ROUNDS):
            try:
                return self._lane(kind, deadline, limit)
            except _EndsDiffer as differ:  # this one catches up here, or else the other one in the next handshake
                self.agent.catch_up(differ.address, differ.num_ends)
        raise self.lost("its connections end while new ones are opened")

    def _lane(self, kind: Lane, deadline: float, limit: float) -> Connection:
        while not self._lock.acquire(timeout=max(0.0, min(_SLICE_S, deadline - time.monotonic()))):
            _interrupts.deliver()
            if time.monotonic() >= deadline:
                text = f"RPC ran for more than set timeout: no connection to worker {self.name} yet (phase: connect)"
                raise RpcTimeout(text, self.name, "connect")
        try:
            return self.lanes.get(kind) or self._open(limit)[kind]
        finally:
            self._lock.release()

    def _open(self, deadline: float) -> dict[str, Connection]:
        """Open the lanes that are missing; either all of them are watched and known afterwards, or none is left."""
        self._check_open()
        began_ns = time.monotonic_ns() if events.sink is not None else 0
        address = self.agent.directory.find(self.name)
        lanes: dict[str, Connection] = {}
        is_complete = False
        try:
            try:
                self._connect(lanes, address, deadline)
            except (ConnectFailed, AuthenticationFailed):
                newer = self.agent.directory.refresh(self.name)
                if newer is None or newer == address:
                    raise
                self._connect(lanes, newer, deadline)
            for connection in lanes.values():
                connection.reader.start()
            self.lanes.update(lanes)
            self.agent.reactor.expect(time.monotonic() + _VANISHED_LOOK_S)  # for `Liveness`
            for connection in lanes.values():
                if connection.reader.has_ended:  # before it was listed, so that it was not struck off
                    self.forget_lane(connection)
            # Checked again: `close` or `Agent.dismiss` may have looked for lanes before these were listed.
            self._check_open()
            is_complete = True
            if began_ns:
                events.tell("connection", "connect", self.agent.info.name, began_ns, peer=self.name)
            return lanes
        except TimeoutError as error:
            most_s = self.agent.config.limits.handshake_timeout_s
            raise RpcTimeout(
                f"RPC ran for more than set timeout: worker {self.name} accepted the connection but did not complete the "
                f"handshake in time (at most {most_s:g} s, Limits.handshake_timeout_s; phase: connect); it may be "
                f"stopped or overloaded",
                self.name,
                "connect",
            ) from error
        except AuthenticationFailed as error:
            if self.lost_reason is not None:  # in the meantime
                raise self.lost(self.lost_reason) from error
            raise
        except ResourceExhausted:  # of this process, which says nothing about the other one
            raise
        except TransportError as error:
            raise self.lost(f"it cannot be reached: {error}") from error
        finally:
            if not is_complete:
                for connection in lanes.values():
                    connection.say_goodbye(_GIVEN_UP)
                    connection.end(ConnectionClosed(_GIVEN_UP))

    def _check_open(self) -> None:
        if self.agent.is_closed:
            raise NotInitialized(f"worker {self.agent.info.name} has shut down and cannot open new connections")
        if self.lost_reason is not None:
            raise self.lost(self.lost_reason)

    def _connect(self, lanes: dict[str, Connection], address: WorkerAddress, deadline: float) -> None:
        try:
            # Looked up each time: a new incarnation that responds closes the remaining lanes of the old one.
            while missing := [kind for kind in _LANES if kind not in self.lanes and kind not in lanes]:
                lanes[missing[0]], num_ends = self._connect_lane(address, missing[0], deadline)
                if any(connection.num_ends != num_ends for connection in lanes.values()):  # one has ended meanwhile
                    raise _EndsDiffer(lanes[missing[0]].address, num_ends)
        except Exception:
            for connection in lanes.values():
                connection.say_goodbye(_GIVEN_UP)
                connection.stream.close()
                self.agent.traffic.on_ended(connection)  # its reader was not started
            lanes.clear()
            raise

    def _connect_lane(self, address: WorkerAddress, kind: Lane, deadline: float) -> tuple[Connection, int]:
        """Return the connection, and how many ends of earlier ones the other worker has noticed."""
        agent = self.agent
        uri = registry.choose_uri(address, agent.address.host, agent.transports)
        stream = agent.transports[uri.partition(":")[0]].connect(uri, deadline)
        made: Connection | None = None
        try:
            stream.decoder.accept = CALLER_ACCEPTS
            handshake = CallerHandshake(agent.identity, address, kind, agent.admit, agent.num_ends)
            answer: Message | None = handshake.begin()
            while answer is not None:
                stream.send(answer, deadline=deadline)
                frame = stream.receive(deadline)
                # Checked here because the connection may already be closed behind a refusal.
                is_challenge = isinstance(frame.message, Challenge)
                answer = handshake.on_message(frame.message, stream.channel.certified_names() if is_challenge else None)
            assert handshake.peer is not None
            if handshake.num_ends != agent.num_ends(handshake.peer):
                raise _EndsDiffer(handshake.peer, handshake.num_ends)
            made = Connection.opened_here(self, stream, kind, handshake.peer)
            made.is_on_this_machine = not uri.startswith("tcp:")
            return made, handshake.num_ends
        finally:
            if made is None:  # the peer may consider it open, and its end the end of this worker
                with contextlib.suppress(TransportError, TimeoutError, OSError):
                    stream.send(Goodbye(_GIVEN_UP), deadline=time.monotonic())
                stream.close()

    def forget_lane(self, ended: Connection) -> None:
        if self.lanes.get(ended.lane) is ended:
            self.lanes.pop(ended.lane, None)  # another thread may be here as well

    def end_lanes(self, incarnation: int, reason: str) -> None:
        """Close the lanes to a lost worker, up to that incarnation."""
        for connection in self._lanes_to(incarnation):
            connection.fail_calls(reason)
            connection.end(ConnectionClosed(reason))

    def read_last_answers(self, incarnation: int, deadline: float) -> None:
        """Read the replies that a worker (up to that incarnation) sent before it left; it closes its connections itself.

        Its goodbye may have been read on a different connection from its replies.
        """
        for connection in self._lanes_to(incarnation):
            reader, calls = connection.reader, connection.calls
            while calls and not reader.has_ended and time.monotonic() < deadline:
                if not reader.read_until(Until(partial(operator.not_, calls)), deadline):  # another thread reads
                    _interrupts.sleep(_LOOK_S)

    def _lanes_to(self, incarnation: int) -> list[Connection]:
        return [item for item in list(self.lanes.values()) if item.address.incarnation <= incarnation]

    def lost(self, reason: str, call: PendingCall | None = None) -> WorkerLost:
        """Return the error to raise for a call to this worker, or because it cannot be reached."""
        what = f"{call.what} failed" if call else f"worker {self.name} is lost"
        outcome = "; it is unknown whether the function ran there" if call and not call.is_control else ""
        seen = f", last heard from {time.time() - self.last_seen:.1f} s ago" if self.last_seen else ""
        return WorkerLost(f"{what}: {self.lost_reason or reason}{seen}{outcome}", self.name, self.last_seen)

    def close(self) -> None:
        for connection in list(self.lanes.values()):
            connection.say_goodbye("shutdown", _GOODBYE_S)
            connection.end(ConnectionClosed("shutdown"))


To = str | int | WorkerInfo


class PeerTable:
    """One worker's peers."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.by_name: dict[str, Peer] = {}  # those that anything was ever to be sent to
        self._lock = threading.Lock()  # guards additions to by_name

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self.by_name.values()))

    def name_of(self, to: To) -> str:
        if isinstance(to, str):
            return to
        if isinstance(to, WorkerInfo):
            return to.name
        if isinstance(to, int):
            return self._agent.directory.find(to).info.name
        name = getattr(to, "name", None)
        if isinstance(name, str):
            return name
        raise UnknownWorker(f"a worker must be given by its name, rank or WorkerInfo, not {to!r}")

    def peer(self, name: str) -> Peer:
        peer = self.by_name.get(name)
        if peer is None:
            self._agent.directory.find(name)
            with self._lock:
                peer = self.by_name.setdefault(name, Peer(self._agent, name))
        return peer

    def lanes(self) -> list[Connection]:
        return [lane for peer in self for lane in list(peer.lanes.values())]

    def address_of(self, name: str, timeout_s: float = 10.0) -> WorkerAddress:
        """Return the address of the connected incarnation, connecting first if necessary."""
        if name == self._agent.info.name:
            return self._agent.address
        peer = self.by_name.get(name) or self.peer(name)
        lane = peer.lanes.get("calls") or peer.lane("calls", time.monotonic() + timeout_s)
        return lane.address

    def is_connected(self, worker: int, incarnation: int) -> bool:
        """Return whether that worker may still send anything."""
        lanes = [*self.lanes(), *(item for item in list(self._agent.server.incoming) if item.lane)]
        return any((lane.info.id, lane.address.incarnation) == (worker, incarnation) for lane in lanes)


class Membership:
    """Which incarnations of the other workers are alive.

    Incarnations only increase, here and in the supervisor's messages, so those may arrive late, twice or in any order.
    """

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._ended: dict[str, int] = {}  # the newest incarnation whose end was reported, by name
        # By name: an incarnation, and how many ends of it were reported.
        self._num_ends: dict[str, tuple[int, int]] = {}
        # The newest incarnation that the supervisor declared lost, and why: it cannot come back, even if it is alive.
        self._dismissed: dict[str, tuple[int, str]] = {}

    def is_current(self, address: WorkerAddress) -> bool:
        return address.incarnation >= self.newest(address.info.name) and not self.is_dismissed(address)

    def is_dismissed(self, address: WorkerAddress) -> bool:
        return 0 < address.incarnation <= self._dismissed.get(address.info.name, (0, ""))[0]

    def lost_reason(self, name: str) -> str | None:
        """Return why the newest incarnation of a worker was declared lost; None if it was not."""
        incarnation, reason = self._dismissed.get(name, (0, ""))
        return reason if incarnation and incarnation >= self.newest(name) else None

    def on_dismissed(self, name: str, incarnation: int, reason: str) -> bool:
        """Record that an incarnation no longer belongs to the cluster; return False if a later one is known."""
        if incarnation >= self._dismissed.get(name, (0, ""))[0]:
            self._dismissed[name] = incarnation, reason
        return incarnation >= self.newest(name)

    def newest(self, name: str) -> int:
        return self._newest.get(name, 0)

    def has_ended(self, name: str) -> bool:
        return self._ended.get(name, -1) >= self.newest(name)

    def num_ends(self, address: WorkerAddress) -> int:
        """Return how often this incarnation was found to have ended, or its connections to have.

        A connection that was made before the last of them is part of it. The other worker counts the same ends, but may
        notice one later. Both compare their numbers when they connect again: see `catch_up`.
        """
        incarnation, number = self._num_ends.get(address.info.name, (0, 0))
        return number if incarnation == address.incarnation else 0

    def on_seen(self, address: WorkerAddress) -> WorkerAddress | None:
        """Record that a worker is connected, so that earlier reports of its end no longer count.

        Returns:
            Its earlier incarnation, if that must have ended and this has not been reported: the caller reports it.
        """
        name, known = address.info.name, self.newest(address.info.name)
        if self._ended.get(name, -1) >= address.incarnation:  # it is back
            self._ended[name] = address.incarnation - 1
        self._newest[name] = max(known, address.incarnation)
        earlier = known and known < address.incarnation
        if earlier and self.on_ended(msgspec.structs.replace(address, incarnation=known)):
            return msgspec.structs.replace(address, incarnation=known)
        return None

    def on_ended(self, address: WorkerAddress, num_ends: int | None = None) -> bool:
        """Record a worker's end; return True the first time.

        `num_ends` is the count at the time when the connection was made whose end is the evidence; None without such a
        connection. The worker may have been declared dead and be back before the last of its old connections ends.
        """
        name = address.info.name
        if self._ended.get(name, -1) >= address.incarnation or num_ends not in (None, self.num_ends(address)):
            return False
        self._ended[name] = address.incarnation
        if address.incarnation >= self.newest(name):
            self._num_ends[name] = address.incarnation, self.num_ends(address) + 1
        return True

    def catch_up(self, address: WorkerAddress, num_ends: int) -> bool:
        """Record ends that the other worker has noticed first; return True if the caller has to report one here."""
        name = address.info.name
        if num_ends <= self.num_ends(address) or address.incarnation < self.newest(name):
            return False
        is_news = self.newest(name) == address.incarnation and self.on_ended(address)
        self._num_ends[name] = address.incarnation, num_ends
        return is_news


_VANISHED_LOOK_S = 1.0  # between two looks at a connection
_RETURN_S = 1.0  # between the end of a worker's connection and the check whether it has a control lane
_NEVER = float("inf")


class Liveness:
    """Looks after the connections of one worker, with both halves: those that it opened and those of others."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        # Workers that may have no control lane, by name, and when to look; single operations only.
        self._doubtful: dict[str, tuple[float, WorkerAddress]] = {}

    def connection_ended(self, address: WorkerAddress) -> None:
        """Ensure that the worker has a control lane; call this when the connection is no longer listed."""
        if self._agent.is_closed:
            return
        # Not postponed by the next connection that ends: a worker could repeat that for ever.
        known = self._doubtful.get(address.info.name)
        when = known[0] if known is not None else time.monotonic() + _RETURN_S
        self._doubtful[address.info.name] = when, address
        self._agent.reactor.expect(when)

    def sweep(self, now: float) -> float:
        """Close connections to dead machines and connect to workers without a control lane; return when to check again."""
        wanted, agent = _NEVER, self._agent
        for reader in [item.reader for item in agent.connections()]:
            if reader.stream.channel.can_vanish:
                wanted = now + _VANISHED_LOOK_S
                if reader.stream.channel.is_vanished():
                    vanished = ConnectionLost("the other machine is not acknowledging any data")
                    agent.reactor.run_soon(partial(reader.end, vanished))
        for name, (when, address) in list(self._doubtful.items()):
            if when > now:
                wanted = min(wanted, when)
                continue
            self._doubtful.pop(name, None)  # before the check: connections that end later are listed again
            if not self._is_settled(name):
                agent.reactor.run_soon(partial(self._reach, address))
        return wanted

    def _is_settled(self, name: str) -> bool:
        """Return whether a worker is dead, or its death will be detected."""
        peer = self._agent.peers.by_name.get(name)
        if self._agent.has_ended(name) or (peer is not None and "control" in peer.lanes):
            return True
        return any(lane.info.name == name for lane in self._agent.server.control_lanes())

    def _reach(self, address: WorkerAddress) -> None:
        """Open a control lane to a worker that has lost its control lane but is not known to be dead."""
        agent, name = self._agent, address.info.name
        try:
            agent.peers.peer(name).lane("control", time.monotonic() + agent.config.limits.handshake_timeout_s)
        except NotInitialized:  # this worker has shut down
            return
        except (WorkerLost, AuthenticationFailed, UnknownWorker) as error:
            if isinstance(error.__cause__, ResourceExhausted):
                self.connection_ended(address)  # check again
            elif not self._is_settled(name):
                agent.on_worker_ended(
                    address, f"its control connection closed, and reconnecting failed: {error}", was_orderly=False
                )
        except (RpcTimeout, OSError):  # it may be stopped, or this process out of descriptors
            self.connection_ended(address)


class StaticDirectory:
    """Finds workers by name or rank: those known at the start, and those that have authenticated.

    Attributes:
        is_complete: Whether all workers are known, so that no other one is admitted.
    """

    is_fixed = True  # whether all workers are known; otherwise they may join and leave

    def __init__(self, addresses: Iterable[WorkerAddress] = ()) -> None:
        self.is_complete = False
        self._binding = threading.Lock()  # guards changes of the tables below
        self._by_name: dict[str, WorkerAddress] = {}
        self._names: dict[int, str] = {}  # by rank
        self._former: dict[str, WorkerAddress] = {}  # those that were removed
        for address in addresses:
            self.update(address)

    def complete(self) -> None:
        """Admit no other workers from now on: all are known."""
        self.is_complete = True

    def find(self, worker: str | int) -> WorkerAddress:
        name = worker if isinstance(worker, str) else self._names.get(worker)
        found = self._by_name.get(name) if name is not None else None
        if found is None:
            found = next(
                (item for item in list(self._former.values()) if worker in (item.info.name, item.info.id)), None
            )
        if found is None:
            known = ", ".join(info.name for info in self.infos())
            raise UnknownWorker(f"could not find destination: no worker {worker!r} in this cluster; it has: {known}")
        return found

    def refresh(self, name: str) -> WorkerAddress | None:
        """Look up the worker again because it did not respond; return None if nothing new is known."""
        return None

    def update(self, address: WorkerAddress) -> None:
        """Bind name and rank, and remember the address unless a newer incarnation is known."""
        name, rank = address.info.name, address.info.id
        with self._binding:
            self.check(address.info)
            known = self._by_name.get(name)
            if known is None and self.is_complete:
                raise AuthenticationFailed(
                    f"{name} with rank {rank} does not belong to this cluster of {len(self._by_name)} workers"
                )
            if known is None or known.incarnation <= address.incarnation:
                self._by_name[name] = address
            self._names[rank] = name

    def add(self, address: WorkerAddress) -> None:
        """Admit another worker, or a restarted one, although all were known."""
        name = address.info.name
        with self._binding:
            self.check(address.info)
            known = self._by_name.get(name)
            if known is None or known.incarnation <= address.incarnation:
                self._by_name[name] = address
            self._names[address.info.id] = name
            self._former.pop(name, None)

    def remove(self, name: str) -> None:
        """Remove a worker; holders of its references can still look it up until its name is reused."""
        with self._binding:
            address = self._by_name.pop(name, None)
            if address is not None:
                self._names.pop(address.info.id, None)
                self._former[name] = address

    def check(self, info: WorkerInfo) -> None:
        known, holder = self._by_name.get(info.name), self._names.get(info.id, info.name)
        if holder != info.name or (known is not None and known.info.id != info.id):
            other = self._by_name[holder].info if holder != info.name else known.info if known is not None else info
            raise IdentityTaken(not_unique_text(other, info))

    def infos(self) -> list[WorkerInfo]:
        return sorted((address.info for address in list(self._by_name.values())), key=lambda info: info.id)


def not_unique_text(one: WorkerInfo, other: WorkerInfo) -> str:
    return (
        f"worker name or rank is not unique: {one.name} with rank {one.id} and {other.name} with rank {other.id}; "
        f"give every worker its own name and its own rank"
    )
