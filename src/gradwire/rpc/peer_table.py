"""The other workers that this one has to do with, by name."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gradwire.errors import UnknownWorker
from gradwire.rpc.peers import OpenLane, Peer
from gradwire.types import WorkerAddress, WorkerInfo

if TYPE_CHECKING:
    from gradwire.rpc.agent import Agent

To = str | int | WorkerInfo


class PeerTable:
    """One worker's peers."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._peers: dict[str, Peer] = {}
        self._lock = threading.Lock()  # guards _peers

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def name_of(self, to: To) -> str:
        """The name of a worker that is given by name, rank or `WorkerInfo`.

        Raises:
            UnknownWorker: There is no worker of that rank, or it is none of the three.
        """
        if isinstance(to, str):
            return to
        if isinstance(to, WorkerInfo):
            return to.name
        if isinstance(to, int):
            return self._agent.directory.find(to).info.name
        name = getattr(to, "name", None)
        if isinstance(name, str):
            return name
        raise UnknownWorker(f"a worker is named by its name, rank or WorkerInfo, not by {to!r}")

    def peer(self, name: str) -> Peer:
        """The other worker of that name.

        Raises:
            UnknownWorker: There is none.
        """
        peer = self._peers.get(name)
        if peer is None:
            self._agent.directory.find(name)
            with self._lock:
                peer = self._peers.setdefault(name, Peer(self._agent, name))
        return peer

    def known(self, name: str) -> Peer | None:
        """The other worker of that name, if anything was ever to be sent to it."""
        return self._peers.get(name)

    def lanes(self) -> list[OpenLane]:
        """All open connections for calls and control."""
        return [lane for peer in self for lane in list(peer.lanes.values())]

    def address_of(self, name: str, timeout_s: float = 10.0) -> WorkerAddress:
        """The address of the incarnation that is connected, or becomes so now.

        Raises:
            UnknownWorker: There is none of that name.
            WorkerLost, RpcTimeout: It cannot be reached.
        """
        if name == self._agent.info.name:
            return self._agent.address
        peer = self._peers.get(name) or self.peer(name)
        lane = peer.lanes.get("calls") or peer.lane("calls", time.monotonic() + timeout_s)
        return lane.address

    def is_connected(self, worker: int, incarnation: int) -> bool:
        """Whether anything may still come from that worker."""
        addresses = [lane.address for lane in self.lanes()] + self._agent.server.visitors()
        return any(item.info.id == worker and item.incarnation == incarnation for item in addresses)
