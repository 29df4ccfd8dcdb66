"""A simulated worker: the real `BackwardState`, driven the way `DistEngine` drives them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from gradwire.autograd._backward_state import (
    Abort as AbortAction,
)
from gradwire.autograd._backward_state import (
    Action,
    BackwardState,
    Component,
    ComponentPhase,
    Introduction,
    Mode,
    PassPhase,
    PassSnapshot,
    Report,
    Route,
    RunComponent,
    Tell,
    WaitingSend,
)
from gradwire.autograd._backward_state import (
    Commit as CommitAction,
)
from simulation.local_engine import AbstractGraph, Gradients, LocalRun, NodeFailed
from simulation.messages import Abort, Commit, Done, Lost, Message, Propagate
from simulation.recording import Node, Recording


class Violation(AssertionError):
    """The simulated workers did something that must never happen."""


class World(Protocol):
    """What a worker sees of the simulation."""

    rng: random.Random
    mode: Mode
    program: Recording

    def send(self, sender: int, to: int, message: Message) -> None:
        """Puts a message on its way."""

    def note_failure(self) -> None:
        """A node failed."""


class Worker:
    """Does for one worker what `DistEngine` and `BackwardPass` do for a real one."""

    def __init__(self, world: World, rank: int) -> None:
        self._world = world
        self._program = world.program
        self.rank = rank
        self.is_alive = True
        self.lost: set[int] = set()
        self.runs: dict[int, LocalRun] = {}
        self.gradients: dict[Node, list[int]] = {}  # what the runs found, one entry each
        self.num_sent = 0
        self.num_shortcuts = 0  # that a gradient took
        self.num_withdrawn = 0  # answers that came nevertheless
        self.num_early = 0  # reports that went with the last answer
        self._received: set[tuple[int, int]] = set()  # a message that comes twice counts once
        self._state: BackwardState | None = None
        self._is_barred = False  # whether its end was heard of before its beginning
        self._sends: dict[int, Node] = {}
        self._arrived: dict[int, Gradients] = {}
        self._introduced: set[int] = set()
        others = [other for other in range(len(self._program.records)) if other != rank]
        self._far = set(world.rng.sample(others, world.rng.choice((0, 0, len(others) // 2))))

    @property
    def is_root(self) -> bool:
        """Whether it called backward."""
        return self.rank == self._program.root

    @property
    def phase(self) -> PassPhase | None:
        """Where the pass is here; None before it was heard of."""
        if self._is_barred:
            return PassPhase.ABORTED
        return self._state.phase if self._state is not None else None

    @property
    def is_running(self) -> bool:
        """Whether it has joined the pass, and that is not over here."""
        return self._state is not None and not self._state.is_over

    @property
    def state(self) -> BackwardState:
        """The pass here."""
        assert self._state is not None
        return self._state

    # -- joining and running -----------------------------------------------------------------------------------------

    def join(self, heard: Iterable[int] = ()) -> None:
        """Takes what was recorded so far, and begins."""
        record = self._program.records[self.rank]
        roots = [value.node for value, _ in self._program.roots] if self.is_root else []
        self._sends = dict(record.sends)
        self._graph = AbstractGraph(roots, self._sends)
        self._state = BackwardState(
            self.rank,
            self._world.mode,
            list(record.exchanges),
            self._graph.components,
            self._graph.reached_by,
            set(self.lost),
            self._graph.untouched,
            self._program.root,
        )
        self._perform(self._state.begin(set(heard)))

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Tell):
                self._post(action.peer, dict.fromkeys(action.message_ids), action.via)
            elif isinstance(action, RunComponent):
                self._start_run(action)
            elif isinstance(action, Report):
                self._report(action)
            elif isinstance(action, CommitAction):
                self._commit(action)
            else:
                self._fail()

    def _start_run(self, action: RunComponent) -> None:
        if action.index in self.runs:
            raise Violation(f"component {action.index} of worker {self.rank} is run twice")
        state, has_roots = self.state, self._graph.components[action.index].has_roots
        self.runs[action.index] = LocalRun(
            self._world.rng,
            self._program.roots if has_roots else [],
            [self._sends[send] for send in action.sends if state.is_settled(send)],
            [self._sends[send] for send in action.sends if not state.is_settled(send)],
            state.is_settled,
            self._arrived.get,
            self._fire,
        )

    def steps(self) -> list[Callable[[], None]]:
        """What its engine could do next."""
        if not self.is_running:
            return []
        return [functools.partial(self._step, index, run) for index, run in self._movable()]

    def _movable(self) -> list[tuple[int, LocalRun]]:
        phases = self.state.phases
        return [
            (index, run)
            for index, run in self.runs.items()
            if phases[index] is ComponentPhase.RUNNING and not run.is_blocked
        ]

    def _step(self, index: int, run: LocalRun) -> None:
        try:
            if not run.is_finished:
                run.step()
                return
        except NodeFailed:
            self._world.note_failure()
            self._fail()
            return
        for leaf, gradient in run.found:
            self.gradients.setdefault(leaf, []).append(gradient)
        self._perform(self.state.component_finished(index))

    def _fire(self, recv: int, gradients: Gradients) -> None:
        """The engine reached a recv."""
        has_gradient = any(gradient is not None for gradient in gradients)
        firing = self.state.recv_fired(recv)
        if firing is None:
            if has_gradient:
                raise Violation(f"recv {recv} on worker {self.rank} was answered with nothing, but has a gradient")
            return
        peer = next(item.peer for item in self._program.records[self.rank].exchanges if item.message_id == recv)
        if firing.routes is not None:
            self._fire_shortly(peer, firing.routes, gradients)
            return
        self._answer(peer, recv, gradients if has_gradient else None)
        if has_gradient and firing.is_last and peer == self._program.root and not self._graph.has_leaves:
            report = self.state.report_early()
            if report is not None:
                self.num_early += 1
                self._report(report)

    def _fire_shortly(self, via: int, routes: Sequence[Route], gradients: Gradients) -> None:
        """What another worker only passed on goes to where it came from."""
        found: dict[tuple[int, int], list[int | None]] = {route[:2]: [None] * route[3] for route in routes}
        for (to, send, number, _), gradient in zip(routes, gradients, strict=True):
            if gradient is not None:
                answer = found[to, send]
                answer[number] = gradient + (answer[number] or 0)
        self.num_shortcuts += any(gradient is not None for gradient in gradients)
        settled: dict[int, bool] = {}
        for (peer, send), answer in found.items():
            has_gradient = any(gradient is not None for gradient in answer)
            if peer != self.rank:
                self._answer(peer, send, tuple(answer) if has_gradient else None, via)
            elif not self.state.is_settled(send):
                settled[send] = has_gradient
                if has_gradient:
                    self._arrived[send] = tuple(answer)
        self._perform(self.state.came_back(settled))

    def _answer(self, peer: int, send: int, gradients: Gradients | None, via: int | None = None) -> None:
        if peer not in self.lost:
            self._post(peer, {send: gradients}, via)
        elif gradients is not None:
            raise NodeFailed(f"worker {peer}, which has a part in the loss, is gone")

    def _post(self, peer: int, answers: dict[int, Gradients | None], via: int | None = None) -> None:
        introduction = None
        if peer not in self._introduced:
            self._introduced.add(peer)
            introduction = self.state.introduction_to(peer)
        self.num_sent += 1
        self._world.send(self.rank, peer, Propagate(self.num_sent, introduction, answers, via))

    # -- what arrives --------------------------------------------------------------------------------------------------

    def handle(self, sender: int, message: Message) -> None:
        """Something arrived."""
        if isinstance(message, Lost):
            self._on_lost(sender)
        elif sender in self.lost:
            return  # what the dead still had to say does not count, else nobody would end what it begins
        elif isinstance(message, Propagate):
            self._on_propagate(sender, message)
        elif isinstance(message, Done):
            self._on_done(sender, message)
        elif isinstance(message, Commit):
            self._on_commit()
        else:
            self._on_abort(sender)

    def _on_propagate(self, sender: int, message: Propagate) -> None:
        if self._program.root in self.lost or self._is_barred or (self._state is not None and self._state.is_over):
            return
        if self._state is None:
            self.join({sender})
        self._received.add((sender, message.number))
        settled: dict[int, bool] = {}
        via = sender if message.via is None else message.via
        for send, gradients in message.answers.items():
            is_awaited = self.state.awaits(send, via)
            if gradients is not None and is_awaited is None:
                raise Violation(f"worker {self.rank} got a gradient for send {send}, which it does not know")
            if is_awaited:
                self.num_withdrawn += send not in self.state.unsettled
                settled[send] = gradients is not None
                if gradients is not None:
                    self._arrived[send] = gradients
        self._perform(self.state.message_received(sender, self._trim(message.introduction), settled))

    def _trim(self, introduction: Introduction | None) -> Introduction | None:
        """Shortcuts to workers that are out of reach are not taken."""
        if introduction is None:
            return None
        kept = [item for item in introduction.shortcuts if all(route[0] not in self._far for route in item[1])]
        return msgspec.structs.replace(introduction, shortcuts=tuple(kept))

    def _on_lost(self, worker: int) -> None:
        self.lost.add(worker)
        if not self.is_running:
            return
        if worker == self._program.root:
            self._end(self.state.abort(is_final=True))
            return
        actions = self.state.worker_lost(worker)
        termination = self.state.termination
        if actions is None or (termination is not None and worker in termination.participants):
            self._fail()
        else:
            self._perform(actions)

    # -- the end ---------------------------------------------------------------------------------------------------------

    def _report(self, report: Report) -> None:
        self.state.done_here()
        if self.is_root:
            self._perform(self.state.report_received(self.rank, report))
        else:
            self._world.send(self.rank, self._program.root, Done(report))

    def _on_done(self, sender: int, message: Done) -> None:
        if self.state.phase is PassPhase.ABORTED:
            self._world.send(self.rank, sender, Abort())  # it may have joined only after the others were told
        elif not self.state.is_over:
            self._perform(self.state.report_received(sender, message.report))

    def _commit(self, action: CommitAction) -> None:
        self.state.commit()
        for worker in sorted(action.peers):
            self._world.send(self.rank, worker, Commit())

    def _on_commit(self) -> None:
        if self.is_running:
            self.state.commit()

    def _fail(self) -> None:
        """Something went wrong here."""
        self._end(self.state.abort())

    def _on_abort(self, sender: int) -> None:
        """A pass that is not here cannot be begun any more."""
        if self._state is None:
            self._is_barred = True
            return
        self._end(self._state.abort(sender))
        if self.is_root and self._state.is_over:  # one that has reported waits for this word
            is_committed = self._state.phase is PassPhase.COMMITTED
            self._world.send(self.rank, sender, Commit() if is_committed else Abort())

    def _end(self, action: AbortAction | None) -> None:
        if action is not None:
            if action.ends:
                self.runs = {}
            for worker in action.peers:
                self._world.send(self.rank, worker, Abort())

    # -- questions -------------------------------------------------------------------------------------------------------

    @property
    def components(self) -> list[Component]:
        """What its graph falls into; nothing before it has joined."""
        return self._graph.components if self._state is not None else []

    @property
    def visible(self) -> dict[Node, int]:
        """The gradients that a user could read here."""
        if self.phase is not PassPhase.COMMITTED:
            return {}
        return {leaf: sum(found) for leaf, found in self.gradients.items()}

    def has_handled(self, sender: int, message: Propagate) -> bool:
        """Whether that message, or the one that it repeats, has arrived."""
        return (sender, message.number) in self._received

    def snapshot(self) -> PassSnapshot:
        """The answer to the stall probe."""
        if not self.is_running:
            return PassSnapshot(str(self.rank))
        waiting = tuple(WaitingSend(send, str(self.rank), "", "", "") for send in self.state.unsettled)
        return PassSnapshot(
            str(self.rank),
            True,
            self.state.has_reported,
            len(self._movable()),
            self.num_sent,
            len(self._received),
            waiting,
            self.state.peers,
        )
