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
        self._tried: set[str] = set()  # names of workers

    def trim(self, introduction: Introduction | None) -> Introduction | None:
        """The same without shortcuts to workers that are out of reach, now."""
        if introduction is None or not introduction.shortcuts:
            return introduction
        kept = [item for item in introduction.shortcuts if all(self._is_near(route[0]) for route in item[1])]
        return msgspec.structs.replace(introduction, shortcuts=tuple(kept))

    def _is_near(self, rank: int) -> bool:
        if rank == self._agent.info.id or rank in self._lost:
            return rank not in self._lost
        name = self._agent.directory.find(rank).info.name
        if self._agent.peers.peer(name).lanes:
            return True
        if name not in self._tried:
            self._tried.add(name)
            self._agent.reactor.run_soon(functools.partial(self._connect, name))
        return False

    def _connect(self, name: str) -> None:
        with contextlib.suppress(RpcError, TransportError):
            self._agent.peers.peer(name).lane("control", time.monotonic() + _CONNECT_S)
