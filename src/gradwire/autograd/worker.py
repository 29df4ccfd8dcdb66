"""Distributed autograd of one worker: its contexts, its engine, and what joins them to the calls."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradwire.autograd.context import DistAutogradContainer, DistAutogradContext, find_call_site
from gradwire.autograd.local_engine import GradientTable
from gradwire.autograd.messages import HoldsContext, ReleaseContext, where_text
from gradwire.errors import RpcTimeout
from gradwire.rpc.agent import Agent
from gradwire.rpc.api import current_agent
from gradwire.rpc.connection import current_request, while_waiting
from gradwire.types import WorkerAddress, WorkerInfo, creator_of
from gradwire.wire.messages import read_note

if TYPE_CHECKING:
    from gradwire.autograd.engine import DistEngine

_EXTENSION = "autograd"
_SLICE_S = 0.2
_made: weakref.WeakSet[DistAutograd] = weakref.WeakSet()
_lock = threading.Lock()  # guards _made


@dataclass(frozen=True, slots=True)
class AutogradStatistics:
    """A snapshot of one worker's distributed autograd."""

    num_contexts: int
    num_passes_under_way: int
    num_passes: int
    num_sends: int
    num_recvs: int
    num_refused: int


class DistAutograd:
    """What distributed autograd keeps for one worker.

    Args:
        agent: The worker.
    """

    def __init__(self, agent: Agent) -> None:
        # Half of the package, and needed by workers alone: not by a launcher or a data loader that imports gradwire.
        from gradwire.autograd.engine import DistEngine
        from gradwire.autograd.interceptor import AutogradInterceptor

        self._agent = agent
        self.container = DistAutogradContainer(agent.info.id, agent.address.incarnation, agent.config.limits)
        self.engine: DistEngine = DistEngine(agent, self.container)
        agent.interceptors.append(AutogradInterceptor(self.container, self.engine, self._ask_soon))
        agent.notices.register("autograd.release", self._on_release, ReleaseContext)
        agent.notices.register("autograd.holds", self._on_holds, HoldsContext)
        agent.notices.on_cut(self._on_cut)
        agent.on_worker_lost(self._on_worker_lost)

    @property
    def worker(self) -> str:
        """The worker's name."""
        return self._agent.info.name

    @property
    def is_closed(self) -> bool:
        """Whether the worker has shut down."""
        return self._agent.is_closed

    def release(self, context_id: int) -> bool:
        """Ends a context, here and on every worker it has touched; False if it was not here."""
        return self._release(context_id, where_text(f"on worker {self.worker} at {find_call_site()}"), set())

    def _release(
        self, context_id: int, where: str, told: set[int], worker: int | None = None, *, is_suspected: bool = False
    ) -> bool:
        context = self.container.release(context_id, where, worker)
        if context is None:
            return False
        for current in list(context.passes.values()):
            self.engine.endings.release(current, where)
        others = context.known_workers - told
        if others:
            note = ReleaseContext(context.context_id, where, is_suspected)
            self.engine.endings.tell_all(others, "autograd.release", note)
        return True

    def _on_release(self, sender: WorkerInfo, note: Any, _: list[torch.Tensor]) -> None:
        message = read_note(note, ReleaseContext)
        context = self.container.find(message.context_id)
        if context is not None and not context.knows(sender.id):
            self.engine.num_refused += 1
            return
        if context is not None and message.is_suspected:  # the maker may live, and be in reach from here
            self._ask_soon(message.context_id)
            return
        self._release(message.context_id, where_text(message.where), {sender.id}, sender.id)

    def gradients_of(self, context: DistAutogradContext, timeout_s: float) -> GradientTable:
        """What committed passes have gathered here. A pass that is done here but not yet decided is waited for.

        Raises:
            RpcTimeout: It was not decided in time.
            UnknownContext: The context was released meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        if context.has_undecided_pass:
            with while_waiting(), context.lock:
                while context.has_undecided_pass:
                    if time.monotonic() > deadline:
                        raise RpcTimeout("a backward pass is done here, but its root does not say that it is over")
                    context.wait_changed(_SLICE_S)
        with context.lock:
            context.check_alive()
            return dict(context.gradients)

    # -- workers that are gone ---------------------------------------------------------------------------------------

    def _on_worker_lost(self, address: WorkerAddress, reason: str) -> None:
        """Contexts end with the worker that made them; those it only brought here need somebody else to end them."""
        rank, name = address.info.id, address.info.name
        where = where_text(f"because worker {name}, which made it, is lost: {reason}")
        orphans, brought = [], []
        for context in self.container:
            creator = creator_of(context.context_id)
            if creator == rank:
                orphans.append(context.context_id)
            elif creator != self.container.worker and rank in context.known_workers:
                brought.append(context.context_id)

        def act() -> None:
            for context_id in orphans:
                self._release(context_id, where, {rank}, is_suspected=True)
            for context_id in brought:
                self._ask_to_be_told(context_id)

        if orphans or brought:
            self._agent.reactor.run_soon(act)

    def _on_cut(self, name: str) -> None:
        """The end of a context may have been on a connection that is gone: only who made it knows."""
        rank = self._agent.directory.find(name).info.id
        for context in self.container:
            if rank in context.known_workers:
                self._ask_soon(context.context_id)

    def _ask_soon(self, context_id: int) -> None:
        """Elsewhere: this thread may hold a connection, and telling others may take a while."""
        if creator_of(context_id) != self.container.worker:
            self._agent.reactor.run_soon(functools.partial(self._ask_to_be_told, context_id))

    def _ask_to_be_told(self, context_id: int) -> None:
        creator = creator_of(context_id)
        if not self.engine.endings.send(creator, "autograd.holds", HoldsContext(context_id)):
            where = f"because worker {creator}, which made it, cannot be reached, nor who brought it to {self.worker}"
            self._release(context_id, where, {creator}, is_suspected=True)

    def _on_holds(self, sender: WorkerInfo, note: Any, _: list[torch.Tensor]) -> None:
        context_id = read_note(note, HoldsContext).context_id
        if creator_of(context_id) != self.container.worker:
            self.engine.num_refused += 1
            return
        context = self.container.find(context_id)
        if context is None or not context.touch(sender.id):
            where = self.container.where_released(context_id) or f"on worker {self.worker} long ago"
            self.engine.endings.tell(sender.id, "autograd.release", ReleaseContext(context_id, where))

    def statistics(self) -> AutogradStatistics:
        """What it does right now."""
        contexts = list(self.container)
        return AutogradStatistics(
            len(contexts),
            sum(len(item.passes) for item in contexts),
            self.engine.num_passes,
            sum(len(item.sends) for item in contexts),
            sum(len(item.recvs) for item in contexts),
            self.engine.num_refused,
        )


def attach(agent: Agent) -> None:
    """Gives a new worker distributed autograd."""
    made = agent.extensions[_EXTENSION] = DistAutograd(agent)
    with _lock:
        _made.add(made)


def all_open() -> list[DistAutograd]:
    """Those of all workers of this process that are not closed."""
    with _lock:
        return [item for item in _made if not item.is_closed]


def of(agent: Agent) -> DistAutograd:
    """The distributed autograd of a worker."""
    found: DistAutograd = agent.extensions[_EXTENSION]
    return found


def here() -> DistAutograd:
    """That of the worker whose call the current thread serves, or of this process.

    Raises:
        NotInitialized: This process is no worker.
    """
    request = current_request()
    return of(request.source.server.agent if request is not None else current_agent())
