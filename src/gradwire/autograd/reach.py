"""Whom a worker may send gradients that it would otherwise send to somebody else: those that it is connected with.

A shortcut leads to a worker that this one may never have called. It is connected with that worker at leisure, and takes
shortcuts there in later passes. If there is no way from here to there, gradients go on taking the long way.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec

from gradwire.autograd._backward_state import Introduction
from gradwire.errors import RpcError, TransportError

if TYPE_CHECKING:
    from gradwire.rpc.agent import Agent

_CONNECT_S = 10.0


class Reach:
    """What one worker knows about its ways to others.

    Args:
        agent: The worker.
        lost: Ranks of workers that it takes for dead.
    """

    def __init__(self, agent: Agent, lost: Collection[int]) -> None:
        self._agent = agent
        self._lost = lost
        self._tried: set[int] = set()  # ranks; changed by single operations only

    def trim(self, introduction: Introduction | None) -> Introduction | None:
        """The same without shortcuts to workers that are out of reach, now."""
        if introduction is None or not introduction.shortcuts:
            return introduction
        kept = [item for item in introduction.shortcuts if all(self._is_near(route[0]) for route in item[1])]
        return msgspec.structs.replace(introduction, shortcuts=tuple(kept))

    def _is_near(self, rank: int) -> bool:
        if rank == self._agent.info.id:
            return True
        if rank in self._lost:
            return False
        if any(lane.address.info.id == rank for lane in self._agent.peers.lanes()):
            return True
        if rank not in self._tried and any(info.id == rank for info in self._agent.directory.infos()):
            self._tried.add(rank)
            self._agent.reactor.run_soon(functools.partial(self._connect, rank))
        return False

    def forget(self, rank: int) -> None:
        """A worker is gone; if it comes back, there may be a way."""
        self._tried.discard(rank)

    def _connect(self, rank: int) -> None:
        peers = self._agent.peers
        with contextlib.suppress(RpcError, TransportError):
            peers.peer(peers.name_of(rank)).lane("control", time.monotonic() + _CONNECT_S)
