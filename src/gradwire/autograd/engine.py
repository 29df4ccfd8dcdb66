r"""Drives backward passes: sends what the pure state decides, and handles what arrives.

    root                              participant                      participant
     backward()
       join, run locally
       PropagateGradients  --------->  join, run  ---------------->     join, run
                           <---------  ...        <----------------     ...
                           <- ReportDone (with peers) ---------------- ReportDone
       everybody reported
       CommitPass          --------->  gradients join the context
                           ------------------------------------------>

How a pass ends is in `endings`. A message of a pass that is over is ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradwire.autograd._backward_state import Action, Report, RunComponent, Tell
from gradwire.autograd.answers import pack_answer, unpack_answers
from gradwire.autograd.container import DistAutogradContainer
from gradwire.autograd.context import DistAutogradContext, RecordedRecv
from gradwire.autograd.endings import Endings
from gradwire.autograd.functions import Gradients
from gradwire.autograd.gradients import GradientTable
from gradwire.autograd.messages import (
    NO_ID,
    AbortPass,
    CommitPass,
    GradientItem,
    PassOptions,
    PropagateGradients,
    ReportDone,
)
from gradwire.autograd.passes import BackwardPass, PassDropped, PassPhase
from gradwire.autograd.probing import Prober
from gradwire.autograd.reach import Reach
from gradwire.autograd.roots import Roots
from gradwire.autograd.runs import EngineRun
from gradwire.autograd.watching import Watch
from gradwire.errors import LimitExceeded, UnknownContext, WorkerLost
from gradwire.rpc._ids import creator_of
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.wire import failures
from gradwire.wire.messages import read_note

if TYPE_CHECKING:
    from gradwire.rpc.agent import Agent


class DistEngine:
    """The backward passes of one worker.

    Args:
        agent: The worker.
        container: Its contexts.

    Attributes:
        lost: Ranks of workers whose end was noticed and that were not heard of since.
        num_refused: Messages about contexts or passes that their senders have no part in.
    """

    def __init__(self, agent: Agent, container: DistAutogradContainer) -> None:
        self._agent = agent
        self._container = container
        self._own = container.worker
        self.lost: set[int] = set()
        self.num_passes = 0
        self.num_refused = 0
        self._reach = Reach(agent, self.lost)
        self.prober = Prober(agent, container, self.lost)
        self.endings = Endings(agent, container, self.prober.name_of)
        notices = agent.notices
        notices.register("autograd.propagate", self._on_propagate, PropagateGradients)
        notices.register("autograd.report", self._on_report, ReportDone)
        notices.register("autograd.abort", self._on_abort, AbortPass)
        notices.register("autograd.commit", self._on_commit, CommitPass)
        notices.on_cut(self._on_cut)
        agent.on_worker_lost(self._on_worker_lost)

    def heard_of(self, worker: WorkerInfo) -> None:
        """A worker is connected, maybe again."""
        if worker.id in self.lost and not self._agent.has_ended(worker.name):
            self.lost.discard(worker.id)

    # -- the root --------------------------------------------------------------------------------------------------

    def backward(self, context: DistAutogradContext, roots: Roots, options: PassOptions) -> GradientTable:
        """Runs a pass from here and waits until it is over everywhere.

        Args:
            context: Whose pass.
            roots: Where it begins.
            options: How.

        Raises:
            BackwardFailed: It failed somewhere, and is dropped everywhere.
        """
        current: BackwardPass | None = None
        try:
            with context.lock:
                context.check_alive()
                current = self._make_pass(self._container.new_message_id(), context, options, roots)
            with current.lock:
                actions = current.join((), self.lost)
            self._perform(current, actions)
            current.wait_over()
            self._follow(current)
        except BaseException as problem:  # Ctrl-C, or what follows has failed
            if current is not None:
                self.endings.fail(current, problem, "backward")
                self.endings.finish_commit(current)
            raise
        with current.lock:
            failure, current.error = current.error, None
            gradients, current.gradients = current.gradients, {}
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback holds this frame, and with it all that the pass recorded
        return gradients

    def _follow(self, current: BackwardPass) -> None:
        """Does what is to follow the pass, if it was committed."""
        follow_up = current.follow_up
        if follow_up is None or current.phase is not PassPhase.COMMITTED or current.termination is None:
            return
        commit = CommitPass(current.context.context_id, current.pass_id)
        follow_up.run(commit, (current.termination.participants & follow_up.ranks) - {self._own})

    def _make_pass(
        self, pass_id: int, context: DistAutogradContext, options: PassOptions, roots: Roots | None = None
    ) -> BackwardPass:
        """Begins a pass here; under the context's lock."""
        current = BackwardPass(
            self._own, pass_id, context, options, self._fire, self._perform_soon, self._make_watch, roots
        )
        context.passes[pass_id] = current
        self.num_passes += 1
        return current

    def _make_watch(self, current: BackwardPass) -> Watch:
        return Watch(self._agent, self.prober, self.endings.fail, current)

    # -- what the state decides ----------------------------------------------------------------------------------------

    def _perform(self, current: BackwardPass, actions: Iterable[Action]) -> None:
        runs = self._tell(current, actions)
        while runs:  # what follows from a run is not done inside it: chains of runs may be long
            for run in runs[1:]:  # components run side by side
                self._perform_soon(current, [run])
            runs = self._run(current, runs[0])

    def _perform_soon(self, current: BackwardPass, actions: Sequence[Action]) -> None:
        self._agent.reactor.run_soon(functools.partial(self._perform, current, actions))

    def _tell(self, current: BackwardPass, actions: Iterable[Action]) -> list[RunComponent]:
        """Writes what is to be written to others; returns what is to be run."""
        runs: list[RunComponent] = []
        for action in actions:
            if isinstance(action, Tell):
                items = tuple(GradientItem(message_id, via=action.via) for message_id in action.message_ids)
                self._attempt(current, "telling others", self._post, action.peer, items)
            elif isinstance(action, RunComponent):
                runs.append(action)
            else:
                self._attempt(current, "reporting to the root", self._report, action)
        return runs

    def _run(self, current: BackwardPass, action: RunComponent) -> list[RunComponent]:
        """Runs a component; returns what is to be run next."""
        following: list[RunComponent] = []
        self._attempt(current, "running the local backward", self._run_component, action, following)
        return following

    def _run_component(self, current: BackwardPass, action: RunComponent, following: list[RunComponent]) -> None:
        run = EngineRun(current, action)
        run.run()
        with current.lock:
            if current.is_over:
                return
            actions = run.following + current.state.component_finished(action.index)
            current.wake_gates()  # a message to oneself that has no gradient is settled without one
        following += self._tell(current, actions)
        answer = current.take_last_answer()
        if answer is not None:  # something else runs here still
            self._post(current, creator_of(current.pass_id), *answer)

    def _attempt(self, current: BackwardPass, operation: str, step: Callable[..., None], *args: Any) -> None:
        """Does something for a pass; what goes wrong ends the pass."""
        try:
            step(current, *args)
        except PassDropped:
            pass
        except BaseException as error:  # SystemExit, too, must not leave anybody waiting
            self.endings.fail(current, error, operation)
            if isinstance(error, KeyboardInterrupt):
                raise

    def _fire(
        self,
        current: BackwardPass,
        recv: RecordedRecv,
        gradients: Gradients,
        is_last: bool,
        via: int | None,
    ) -> None:
        """A recv was reached by the local engine; or one elsewhere, via which its tensors came here."""
        has_lost = current.state.has_lost(recv.peer)
        recorded_id = self._container.new_message_id() if current.options.create_graph else NO_ID
        item, tensors = pack_answer(current.context, recv, gradients, recorded_id, via)
        if not tensors:
            if not has_lost and recv.peer not in self.lost:
                self._post(current, recv.peer, (item,))
            return
        if has_lost:  # even if it lives after all: what it would send back was settled without it
            peer = self._agent.peers.peer(self.prober.name_of(recv.peer))
            raise peer.lost("its end was noticed before there was a gradient for it")
        if is_last and recv.peer == creator_of(current.pass_id):  # the report is about to follow: one message for both
            current.last_answer = (item,), tensors
        else:
            self._post(current, recv.peer, (item,), tensors)

    def _post(
        self,
        current: BackwardPass,
        peer: int,
        items: tuple[GradientItem, ...],
        tensors: Sequence[torch.Tensor] = (),
        report: Report | None = None,
    ) -> None:
        with current.lock:
            if current.is_over:
                raise PassDropped
            introduction = None
            if peer not in current.introduced:
                current.introduced.add(peer)
                introduction = current.state.introduction_to(peer)
            current.num_sent += 1
            if peer != self._own:
                current.last_peer = peer
        note = PropagateGradients(
            current.context.context_id, current.pass_id, current.options, items, introduction, report
        )
        if peer == self._own:
            # As on the way to others, they are captured: two leaves, or a leaf and the caller's gradient, share no memory.
            values = [tensor.clone() for tensor in tensors]
            self._agent.reactor.run_soon(lambda: self._on_propagate(self._agent.info, note, values))
        else:
            self._agent.notices.send(self.prober.name_of(peer), "autograd.propagate", note, tensors, current.deadline)

    def _report(self, current: BackwardPass, report: Report) -> None:
        current.run_hooks()
        with current.lock:
            if current.is_over:
                return
            current.phase = PassPhase.DONE
        root = creator_of(current.pass_id)
        if root == self._own:
            self._take_report(current, self._own, report)
            return
        answer = current.take_last_answer()
        if answer is not None:
            self._post(current, root, *answer, report)
        else:
            note = ReportDone(current.context.context_id, current.pass_id, report)
            self._agent.notices.send(self.prober.name_of(root), "autograd.report", note, (), current.deadline)

    # -- what arrives ----------------------------------------------------------------------------------------------------

    def _on_propagate(self, sender: WorkerInfo, note: Any, tensors: list[torch.Tensor]) -> None:
        message = read_note(note, PropagateGradients)
        if self._agent.has_ended(sender.name):  # a late message: what it says was settled when its sender was lost
            return
        self.heard_of(sender)
        current = self._find_or_join(message, sender)
        if current is not None:
            self._attempt(current, f"taking gradients from {sender.name}", self._take, sender, message, tensors)
        if message.report is not None:  # nobody waits for it but who has taken the gradients by now
            self._handle_report(sender, message.context_id, message.pass_id, message.report)

    def _take(
        self, current: BackwardPass, sender: WorkerInfo, message: PropagateGradients, tensors: list[torch.Tensor]
    ) -> None:
        answers = unpack_answers(current.context, sender, message.items, tensors)
        introduction = self._reach.trim(message.introduction)
        with current.lock:
            if current.is_over:
                return
            actions = [] if current.is_joined else current.join((sender.id,), self.lost)
            current.num_received += 1
            settled = {}
            for item in message.items:
                gradients = answers[item.message_id]
                if current.accept(item.message_id, sender.id if item.via is None else item.via, gradients):
                    settled[item.message_id] = gradients is not None
            actions += current.state.message_received(sender.id, introduction, settled)
            current.wake_gates()
        self._perform(current, actions)

    def _find_or_join(self, message: PropagateGradients, sender: WorkerInfo) -> BackwardPass | None:
        """The pass a message belongs to, begun here if need be; None if it is over, or cannot be begun here.

        Any worker of the context may be the first to tell of a pass. It is made known to this one by forward messages alone.
        """
        try:
            context = self._container.get_or_create(message.context_id, sender.id)
            if context is None:
                where = self._container.where_released(message.context_id)
                raise UnknownContext(f"context {message.context_id} was released {where or 'long ago'}")
            with context.lock:
                if message.pass_id in context.ended_passes or context.released:
                    return None
                current = context.passes.get(message.pass_id)
                if (
                    current is None and creator_of(message.pass_id) != self._own
                ):  # a root knows its passes until they end
                    on_over = self._container.quotas.charge_pass(sender.id, context)
                    current = self._make_pass(message.pass_id, context, message.options)
                    current.on_over = on_over
                return current
        except (UnknownContext, LimitExceeded) as error:
            self.endings.refuse(message.context_id, message.pass_id, sender.id, error)
            return None

    def _on_report(self, sender: WorkerInfo, note: Any, _: list[torch.Tensor]) -> None:
        message = read_note(note, ReportDone)
        self._handle_report(sender, message.context_id, message.pass_id, message.report)

    def _handle_report(self, sender: WorkerInfo, context_id: int, pass_id: int, report: Report) -> None:
        current = self._find_pass(context_id, pass_id)
        if current is not None:
            self._take_report(current, sender.id, report)
        if creator_of(pass_id) != self._own:
            self.num_refused += 1
            return
        is_committed = self._was_committed(context_id, pass_id)
        if is_committed is False or (current is None and is_committed is None):  # or it was never begun here
            # It has joined too late to be told with the others, by a message of one who died: it waits for a word from here.
            self.endings.tell_failed(sender.id, context_id, pass_id)

    def _was_committed(self, context_id: int, pass_id: int) -> bool | None:
        """How a pass has ended; None if it has not. The passes of a context that is over count as failed."""
        context = self._container.find(context_id)
        return context.ended_passes.get(pass_id) if context is not None else False

    def _take_report(self, current: BackwardPass, worker: int, report: Report) -> None:
        with current.lock:
            if not current.is_open or current.termination is None:
                return
            is_complete = current.termination.reported(worker, report.peers, report.absent)
            mistaken = current.termination.mistaken
            named = [rank for rank in current.early if current.termination.is_named(rank)]
            failed = current.early[named[0]] if named else None
            if is_complete and failed is None:
                current.phase = PassPhase.COMMITTING  # from here on it cannot fail: some may have heard already
            others = current.followers()
        if failed is not None:
            self._drop(current, failed, set())
        elif mistaken:
            name = self.prober.name_of(min(mistaken))
            self.endings.fail(current, WorkerLost(f"worker {name} is lost", name), "taking reports")
        elif is_complete:
            self.endings.commit(current, others)

    def _on_commit(self, sender: WorkerInfo, note: Any, _: list[torch.Tensor]) -> None:
        self.take_commit(sender, read_note(note, CommitPass))

    def take_commit(self, sender: WorkerInfo, message: CommitPass) -> None:
        """The root of a pass says that it is committed, by a notice or with what follows."""
        current = self._find_pass(message.context_id, message.pass_id)
        if current is not None and creator_of(message.pass_id) == sender.id:
            self.endings.end(current, PassPhase.COMMITTED)

    def _on_abort(self, sender: WorkerInfo, note: Any, _: list[torch.Tensor]) -> None:
        message = read_note(note, AbortPass)
        failures.check_error(message.error, self._agent.config.limits)
        context = self._container.find(message.context_id)
        if context is not None and not self.endings.may_abort(context, message, sender.id):
            self.num_refused += 1
        elif context is not None:
            current = context.passes.get(message.pass_id)
            is_from_root = creator_of(message.pass_id) == sender.id
            if current is not None and (current.is_root or is_from_root or not current.is_undecided):
                self._drop(current, message, set() if current.is_root else {sender.id})
            # Else it has reported: it waits for the root's word, and minds nobody else.
        if creator_of(message.pass_id) == self._own:
            self._answer(sender, message)

    def _drop(self, current: BackwardPass, message: AbortPass, told: set[int]) -> None:
        self.endings.drop(current, failures.rebuild_exception(message.error, self._agent.trust), message, told)

    def _answer(self, sender: WorkerInfo, message: AbortPass) -> None:
        """Who asks the root to end a pass may be done, with a report that never came here: only the root can tell it."""
        is_committed = self._was_committed(message.context_id, message.pass_id)
        if is_committed:
            self.endings.tell(sender.id, "autograd.commit", CommitPass(message.context_id, message.pass_id))
        elif is_committed is False:
            self.endings.tell_failed(sender.id, message.context_id, message.pass_id)

    def _find_pass(self, context_id: int, pass_id: int) -> BackwardPass | None:
        context = self._container.find(context_id)
        return context.passes.get(pass_id) if context is not None else None

    def _on_worker_lost(self, address: WorkerAddress, reason: str) -> None:
        rank, name = address.info.id, address.info.name
        self.lost.add(rank)
        self._reach.forget(rank)
        for context in self._container:
            for current in list(context.passes.values()):
                # Elsewhere: this thread may hold a connection, and telling the others may take a while.
                self._agent.reactor.run_soon(functools.partial(self._without_worker, current, rank, name, reason))

    def _on_cut(self, name: str) -> None:
        """A connection ended, though not the worker: gradients may be lost, and nobody would ever miss them."""
        rank = self._agent.directory.find(name).info.id
        error = WorkerLost(f"the connection to worker {name} was cut off", name)
        for context in self._container:
            for current in list(context.passes.values()):
                if current.is_joined and rank in current.state.peers:
                    self._agent.reactor.run_soon(functools.partial(self.endings.fail, current, error, "waiting"))

    def _without_worker(self, current: BackwardPass, rank: int, name: str, reason: str) -> None:
        with current.lock:
            if current.is_over or not current.is_joined:
                return
            actions = None if creator_of(current.pass_id) == rank else current.state.worker_lost(rank)
            if current.termination is not None and rank in current.termination.participants:
                actions = None
            current.wake_gates()
        if actions is None:
            self.endings.fail(current, WorkerLost(f"worker {name} is lost: {reason}", name), "waiting")
        else:
            self._perform(current, actions)
