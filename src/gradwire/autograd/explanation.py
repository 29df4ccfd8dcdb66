"""Queries to the workers of a context: the stall probe of a pass, `explain` and `graph`."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from gradwire.autograd._backward_state import PassSnapshot
from gradwire.autograd._graph_text import count
from gradwire.autograd._segments import find_segments
from gradwire.autograd.context import RESULT, DistAutogradContainer, RecordedSend
from gradwire.autograd.distributed_graph import DistributedGraph, assemble
from gradwire.autograd.worker_views import (
    MOST_PASSES,
    MessageView,
    PassView,
    Shortcut,
    WaitingView,
    WorkerView,
    find_settlers,
    first,
)
from gradwire.errors import AutogradError, UnknownWorker
from gradwire.types import Id, WorkerInfo, creator_of, short
from gradwire.wire.exceptions import clean
from gradwire.wire.messages import prepare

if TYPE_CHECKING:
    from gradwire.autograd.backward_pass import BackwardPass
    from gradwire.autograd.context import DistAutogradContext
    from gradwire.rpc.agent import Agent


_ANSWER_S = 2.0
_QUICK_S = 0.1  # for the workers that are asked last


class Explanation(msgspec.Struct, frozen=True):
    """A report of which worker waits for which in a context. ``str()`` returns text for people, `as_json` data for programs.

    Attributes:
        context_id: The context.
        workers: The answer of each worker that takes part in it.
    """

    context_id: int
    workers: tuple[WorkerView, ...]

    def as_json(self) -> str:
        """Return all attributes as JSON."""
        return json.dumps(msgspec.to_builtins(self), indent=2)

    def __str__(self) -> str:
        settlers = find_settlers(self.workers)
        lines = [f"context {self.context_id}:"]
        for view in self.workers:
            if not view.answered:
                lines.append(f"  {view.worker} does not answer")
                continue
            lines.append(
                f"  {view.worker}: {count(view.num_sends, 'send')}, {count(view.num_recvs, 'recv')}, "
                f"gradients of {count(view.num_gradients, 'leaf', 'leaves')}, "
                f"{count(len(view.passes), 'pass', 'passes')} in progress"
            )
            for current in view.passes:
                lines += _describe_pass(view.worker, current, settlers)
        return clean("\n".join(lines))


def _describe_pass(worker: str, current: PassView, settlers: Mapping[int, str]) -> list[str]:
    lines = [f"    pass {current.pass_id:#x} ({current.mode}, begun by {current.root}): {current.phase}"]
    if current.num_running:
        lines.append(f"      {worker} computes ({count(current.num_running, 'run')} of the local engine)")
    for send in current.waiting:
        settler = settlers[send.message_id]
        way = f", which forwarded it unchanged to {settler}" if settler != send.peer else ""
        stands = "; a run of the local engine is blocked on it" if send.is_gate else ""
        what = f"send {send.message_id:#x} of {send.function} ({send.site}) on worker {worker} to {send.peer}"
        lines.append(f"      {worker} waits for {settler}: {what}{way}{stands}")
    for item in current.offered:
        if settlers.get(item.message_id) == worker:  # the shortcut was not taken
            way = f"send {item.message_id:#x} unchanged to {item.peer} and waits for its reply"
            lines.append(f"      {worker} forwarded {way}")
    return lines


class Prober:
    """Asks other workers about contexts and passes, and answers their questions."""

    def __init__(
        self, agent: Agent, container: DistAutogradContainer, lost: Collection[int], name_of: Callable[[int], str]
    ) -> None:
        self._agent = agent
        self._container = container
        self._lost = lost  # need not be asked
        self._name_of = name_of  # raises `UnknownWorker`
        agent.server.register_control("autograd.probe", self._on_probe, Id, Id)
        agent.server.register_control("autograd.explain", self._on_explain, Id)

    def _label_of(self, rank: int) -> str:
        """Return a name for a worker in texts; a peer may have invented its rank."""
        try:
            return self._name_of(rank)
        except UnknownWorker:
            return f"rank {rank}"

    def probe(self, current: BackwardPass, limit_s: float = _ANSWER_S) -> dict[int, PassSnapshot]:
        """Ask every worker known to take part in a pass what it waits for, within `limit_s` in total."""
        until = time.monotonic() + min(limit_s, _ANSWER_S)
        known = current.participants()
        found = {self._container.worker: current.snapshot(self._agent.info.name, self._name_of)}
        ids = (current.context.context_id, current.pass_id)
        self._explore(found, known, "autograd.probe", ids, PassSnapshot, lambda item: item.peers, until)
        return found

    def _on_probe(self, sender: WorkerInfo, context_id: int, pass_id: int) -> Any:
        if creator_of(pass_id) != sender.id:
            raise AutogradError(f"{sender.name} asked about a backward pass that it did not start")
        context = self._container.find(context_id)
        current = context.passes.get(pass_id) if context is not None else None
        name = self._agent.info.name
        return msgspec.to_builtins(current.snapshot(name, self._name_of) if current is not None else PassSnapshot(name))

    def explain(self, context: DistAutogradContext) -> Explanation:
        found = self._views_of_all(context.context_id, (), _ANSWER_S)
        return Explanation(context.context_id, tuple(found[rank] for rank in sorted(found)))

    def graph(self, context: DistAutogradContext, roots: Sequence[torch.Tensor], timeout_s: float) -> DistributedGraph:
        views = self.views(context.context_id, timeout_s, roots)
        return assemble(context.context_id, views, self.clocks(view.worker for view in views))

    def views(self, context_id: int, timeout_s: float, roots: Sequence[torch.Tensor] = ()) -> list[WorkerView]:
        """Return the views of all workers of a context, in which this one need not take part; the nearest first."""
        found = self._views_of_all(context_id, roots, timeout_s)
        own = self._container.worker
        return [found[rank] for rank in sorted(found, key=lambda rank: (rank != own, rank))]

    def clocks(self, workers: Iterable[str]) -> dict[str, int]:
        """Return the workers that have the same clock as this one: all processes of a machine do."""
        found = {}
        for name in workers:
            with contextlib.suppress(UnknownWorker):
                if self._agent.directory.find(name).host == self._agent.address.host:
                    found[name] = 0
        return found

    def _views_of_all(self, context_id: int, roots: Sequence[torch.Tensor], timeout_s: float) -> dict[int, WorkerView]:
        context = self._container.find(context_id)
        found = {} if context is None else {self._container.worker: self._view(context, roots)}
        known = {creator_of(context_id)} - {self._container.worker} if context is None else ()
        until = time.monotonic() + timeout_s
        self._explore(found, known, "autograd.explain", (context_id,), WorkerView, lambda i: i.known_workers, until)
        # The name that this worker knows counts, whatever the answer says.
        return {rank: msgspec.structs.replace(view, worker=self._label_of(rank)) for rank, view in found.items()}

    def _on_explain(self, sender: WorkerInfo, context_id: int) -> Any:
        context = self._container.find(context_id)
        if context is not None and self._agent.trust == "data" and not context.knows(sender.id):
            raise AutogradError(f"{sender.name} asked about a context that it does not take part in")
        view = self._view(context) if context is not None else WorkerView(self._agent.info.name)
        return msgspec.to_builtins(view)

    def _view(self, context: DistAutogradContext, roots: Sequence[torch.Tensor] = ()) -> WorkerView:
        # Copies first: more may be recorded meanwhile.
        sends, recvs, passes = dict(context.sends), dict(context.recvs), list(context.passes.values())
        listed = dict(first(sends.items()))
        roots = roots or [tensor for item in passes for tensor in item.roots.tensors]
        # With trust="data", workers do not show each other their operators.
        segments = find_segments(listed, recvs, roots, has_contents=self._agent.trust == "code")
        return WorkerView(
            self._agent.info.name,
            tuple(sorted(context.known_workers)),
            len(context.gradients),
            len(sends),
            len(recvs),
            tuple(self._send_view(item) for item in listed.values()),
            tuple(
                MessageView(
                    item.message_id,
                    self._label_of(item.peer),
                    short(item.function),
                    "",
                    item.num_tensors,
                    at_ns=item.at_ns,
                )
                for item in first(recvs.values())
            ),
            segments,
            tuple(self.view_pass(item) for item in passes[:MOST_PASSES]),
        )

    def _send_view(self, send: RecordedSend) -> MessageView:
        peer, is_result = self._label_of(send.peer), send.site is RESULT
        where = short(send.site)
        return MessageView(
            send.message_id, peer, short(send.function), where, send.num_tensors, send.num_bytes, is_result, send.at_ns
        )

    def view_pass(self, current: BackwardPass) -> PassView:
        snapshot = current.snapshot(self._agent.info.name, self._label_of)
        waiting, state = first(snapshot.waiting), current.state
        return PassView(
            current.pass_id,
            self._label_of(current.root),
            "fast" if current.options.is_fast else "smart",
            current.phase.value,
            snapshot.num_running,
            tuple(phase.value for phase in first(state.phases)),
            tuple(WaitingView(i.message_id, i.peer, short(i.function), short(i.site), i.is_gate) for i in waiting),
            tuple(Shortcut(recv, send, self._label_of(peer)) for recv, send, peer in first(state.shortcuts)),
            first(state.taken),
        )

    def _explore(
        self,
        found: dict[int, Any],
        known: Iterable[int],
        operation: str,
        ids: tuple[int, ...],
        kind: type[PassSnapshot | WorkerView],
        peers_of: Callable[[Any], Iterable[int]],
        until: float,
    ) -> None:
        """Ask the known workers and those that they name, until no new one is named."""
        todo = set(known)
        there: set[int] | None = None
        while True:
            for item in found.values():
                todo.update(peers_of(item))
            todo -= found.keys()
            if todo and there is None:
                there = {info.id for info in self._agent.directory.infos()}
            todo &= there or set()  # others may name ranks that no worker has
            if not todo:
                return
            limit_s = max(_QUICK_S, until - time.monotonic())
            found.update(self._ask(todo, operation, ids, kind, limit_s))

    def _ask(
        self, ranks: Iterable[int], operation: str, args: tuple[Any, ...], kind: Any, limit_s: float
    ) -> dict[int, Any]:
        """Ask workers in parallel; a lost worker, or one without a valid answer in time, counts as an empty answer."""
        names = {rank: self._name_of(rank) for rank in ranks}
        asked = [name for rank, name in names.items() if rank not in self._lost]
        answers = self._agent.ask_all(asked, operation, args, limit_s, kind)
        empty = partial(WorkerView, answered=False) if kind is WorkerView else kind
        return {rank: answers[name] if name in answers else empty(name) for rank, name in names.items()}


def waiting_text(snapshots: Mapping[int, PassSnapshot]) -> str:
    """Return one sentence on what the participants of a pass wait for."""
    lines = [str(send) for item in snapshots.values() for send in item.waiting]
    busy = [item.worker for item in snapshots.values() if item.num_running]
    text = "no gradient has arrived for " + "; ".join(lines) if lines else ""
    if busy:
        text += f"{'; ' if text else ''}still computing: {', '.join(busy)}"
    return text or "no worker reports what it is waiting for"


prepare(PassSnapshot)
