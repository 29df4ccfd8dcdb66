r"""Drives backward passes: sends what the pure state decides, handles what arrives, ends every pass everywhere.

    root                              participant                      participant
     backward()
       join, run locally
       PropagateGradients  --------->  join, run  ---------------->     join, run
                           <---------  ...        <----------------     ...
                           <- ReportDone (with peers) ---------------- ReportDone
       everybody reported
       CommitPass          --------->  gradients join the context
                           ------------------------------------------>

Anything that fails sends AbortPass to the root, which tells everybody; each passes it on to those it has written to. A
message of a pass that is over is ignored.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradwire.autograd._backward_state import Action, Introduction, Report, RunComponent, Tell
from gradwire.autograd.answers import pack_answer, unpack_answers
from gradwire.autograd.container import DistAutogradContainer, creator_of
from gradwire.autograd.context import DistAutogradContext, RecordedRecv
from gradwire.autograd.functions import Gradients
from gradwire.autograd.gradients import GradientTable, add_gradient
from gradwire.autograd.messages import (
    NO_ID,
    AbortPass,
    CommitPass,
    GradientItem,
    PassOptions,
    PropagateGradients,
    ReportDone,
    parse,
)
from gradwire.autograd.passes import BackwardPass, PassDropped, PassPhase, Roots
from gradwire.autograd.probing import Prober
from gradwire.autograd.watching import Watch
from gradwire.errors import BackwardFailed, RpcError, RpcTimeout, TransportError, UnknownContext, WorkerLost
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.wire import failures

if TYPE_CHECKING:
    from gradwire.rpc.agent import Agent

_TELL_S = 0.2  # how long whoever ends a pass or a context waits for a worker that does not read


class DistEngine:
    """The backward passes of one worker.

    Args:
        agent: The worker.
        container: Its contexts.

    Attributes:
        lost: Ranks of workers whose end was noticed and that were not heard of since.
    """

    def __init__(self, agent: Agent, container: DistAutogradContainer) -> None:
        self._agent = agent
        self._container = container
        self.lost: set[int] = set()
        self.num_passes = 0
        self.prober = Prober(agent, container, self.lost)
        notices = agent.notices
        notices.register("autograd.propagate", self._on_propagate)
        notices.register("autograd.report", self._on_report)
        notices.register("autograd.abort", self._on_abort)
        notices.register("autograd.commit", self._on_commit)
        agent.on_worker_lost(self._on_worker_lost)

    @property
    def _own(self) -> int:
        return self._container.worker

    # -- the root --------------------------------------------------------------------------------------------------

    def backward(
        self, context: DistAutogradContext, roots: Roots, options: PassOptions, *, joins_context: bool = True
    ) -> GradientTable:
        """Runs a pass from here and waits until it is over everywhere.

        Args:
            context: Whose pass.
            roots: Where it begins.
            options: How.
            joins_context: Whether the gradients join the context; they are returned in any case.

        Raises:
            BackwardFailed: It failed somewhere, and is dropped everywhere.
        """
        with context.lock:
            context.check_alive()
            pass_id = self._container.new_message_id()
            current = self._make_pass(pass_id, context, options, roots)
        try:
            with current.lock:
                actions = current.join((), self.lost)
            self._perform(current, actions)
            current.wait_over()
        except BaseException as problem:  # Ctrl-C
            self.fail(current, problem, "backward")
            raise
        with current.lock:
            failure, current.error = current.error, None
            gradients, current.gradients = current.gradients, {}
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback holds this frame, and with it all that the pass recorded
        if joins_context:
            with context.lock:
                for leaf, gradient in gradients.items():
                    add_gradient(context.gradients, leaf, gradient)
        return gradients

    def _make_pass(
        self, pass_id: int, context: DistAutogradContext, options: PassOptions, roots: Roots | None = None
    ) -> BackwardPass:
        """Begins a pass here; under the context's lock."""
        current = BackwardPass(self._own, pass_id, context, options, self._fire, self._make_watch, roots)
        context.passes[pass_id] = current
        self.num_passes += 1
        return current

    def _make_watch(self, current: BackwardPass) -> Watch:
        return Watch(self._agent, self.prober, self.fail, current)

    # -- what the state decides ----------------------------------------------------------------------------------------

    def _perform(self, current: BackwardPass, actions: Iterable[Action]) -> None:
        runs: list[RunComponent] = []
        for action in actions:
            if isinstance(action, Tell):
                items = tuple(GradientItem(message_id) for message_id in action.message_ids)
                self._attempt(current, "telling others", functools.partial(self._post, current, action.peer, items))
            elif isinstance(action, RunComponent):
                runs.append(action)
            else:
                self._report(current, action)
        for run in runs[1:]:  # components run side by side
            self._agent.reactor.run_soon(functools.partial(self._run, current, run))
        if runs:
            self._run(current, runs[0])

    def _run(self, current: BackwardPass, action: RunComponent) -> None:
        def run() -> None:
            current.run(action)
            with current.lock:
                if current.is_over:
                    return
                actions = current.state.component_finished(action.index)
                current.wake_gates()  # a message to oneself that has no gradient is settled without one
            self._perform(current, actions)

        self._attempt(current, "running the local backward", run)

    def _attempt(self, current: BackwardPass, operation: str, step: Callable[[], None]) -> None:
        """Does something for a pass; what goes wrong ends the pass."""
        try:
            step()
        except PassDropped:
            pass
        except Exception as error:
            self.fail(current, error, operation)

    def _fire(self, current: BackwardPass, recv: RecordedRecv, gradients: Gradients) -> None:
        """A recv was reached by the local engine."""
        if all(gradient is None for gradient in gradients):
            if recv.peer not in self.lost:
                self._post(current, recv.peer, (GradientItem(recv.message_id),), is_from_run=True)
            return
        recorded_id = self._container.new_message_id() if current.options.create_graph else NO_ID
        item, tensors = pack_answer(current.context, recv, gradients, recorded_id)
        self._post(current, recv.peer, (item,), tensors, is_from_run=True)

    def _post(
        self,
        current: BackwardPass,
        peer: int,
        items: tuple[GradientItem, ...],
        tensors: Sequence[torch.Tensor] = (),
        *,
        is_from_run: bool = False,
    ) -> None:
        with current.lock:
            if current.is_over:
                raise PassDropped
            introduction = None
            if peer not in current.introduced:
                current.introduced.add(peer)
                introduction = current.state.introduction_to(peer)
            current.counters.num_sent += 1
            # The report follows: one system call and one wake-up there for both. Only the run that is left knows that it
            # will be this thread that sends it, and not another one that is about to, with nothing behind it.
            hold_back = is_from_run and current.state.is_finishing and peer == creator_of(current.pass_id)
        note = PropagateGradients(
            current.context.context_id,
            current.pass_id,
            current.options,
            items,
            (introduction.has, introduction.expects) if introduction is not None else None,
        )
        if peer == self._own:
            # As on the way to others, they are captured: two leaves, or a leaf and the caller's gradient, share no memory.
            values = [tensor.clone() for tensor in tensors]
            self._agent.reactor.run_soon(lambda: self._on_propagate(self._agent.info, note, values))
        else:
            name = self.prober.name_of(peer)
            self._agent.notices.send(name, "autograd.propagate", note, tensors, current.deadline, hold_back=hold_back)

    def _report(self, current: BackwardPass, report: Report) -> None:
        def step() -> None:
            current.run_hooks()
            with current.lock:
                if current.is_over:
                    return
                current.phase = PassPhase.DONE
            root = creator_of(current.pass_id)
            if root == self._own:
                self._take_report(current, self._own, report)
            else:
                note = ReportDone(current.context.context_id, current.pass_id, report.peers, report.absent)
                self._agent.notices.send(self.prober.name_of(root), "autograd.report", note, (), current.deadline)

        self._attempt(current, "reporting to the root", step)

    # -- what arrives ----------------------------------------------------------------------------------------------------

    def _on_propagate(self, sender: WorkerInfo, note: Any, tensors: list[torch.Tensor]) -> None:
        message = parse(note, PropagateGradients)
        self.lost.discard(sender.id)
        current = self._find_or_join(message, sender)
        if current is None:
            return

        def step() -> None:
            answers = unpack_answers(current.context, sender, message.items, tensors)
            with current.lock:
                if current.is_over:
                    return
                actions = [] if current.is_joined else current.join((sender.id,), self.lost)
                current.counters.num_received += 1
                settled = {
                    message_id: gradients is not None
                    for message_id, gradients in answers.items()
                    if current.accept(message_id, sender.id, gradients)
                }
                introduction = Introduction(*message.introduction) if message.introduction is not None else None
                actions += current.state.message_received(sender.id, introduction, settled)
                current.wake_gates()
            self._perform(current, actions)

        self._attempt(current, f"taking gradients from {sender.name}", step)

    def _find_or_join(self, message: PropagateGradients, sender: WorkerInfo) -> BackwardPass | None:
        """The pass a message belongs to, begun here if need be; None if it is over."""
        context = self._container.get_or_create(message.context_id)
        if context is None:
            where = self._container.where_released(message.context_id)
            error = UnknownContext(f"context {message.context_id} was released {where or 'long ago'}")
            self._refuse(message, sender, error)
            return None
        context.touch(sender.id)
        with context.lock:
            if message.pass_id in context.ended_passes or context.released:
                return None
            current = context.passes.get(message.pass_id)
            if current is None:
                current = self._make_pass(message.pass_id, context, message.options)
            return current

    def _refuse(self, message: PropagateGradients, sender: WorkerInfo, error: Exception) -> None:
        """Gradients for a context that is over here: the root must know."""
        failure = self._failure(error, "taking gradients")
        abort = AbortPass(message.context_id, message.pass_id, self._describe(failure))
        self.tell_all({creator_of(message.pass_id), sender.id}, "autograd.abort", abort)

    def _on_report(self, sender: WorkerInfo, note: Any, _: list[torch.Tensor]) -> None:
        message = parse(note, ReportDone)
        current = self._find_pass(message.context_id, message.pass_id)
        if current is not None:
            self._take_report(current, sender.id, Report(message.peers, message.absent))
        if self._has_failed(message.context_id, message.pass_id):
            # It has joined too late to be told with the others, by a message of one who died: it waits for a word from here.
            failure = BackwardFailed("the backward pass has failed already", self._agent.info.name, "taking a report")
            abort = AbortPass(message.context_id, message.pass_id, self._describe(failure))
            self.tell(sender.id, "autograd.abort", abort)

    def _has_failed(self, context_id: int, pass_id: int) -> bool:
        context = self._container.find(context_id)
        return context is None or context.ended_passes.get(pass_id) is False

    def _take_report(self, current: BackwardPass, worker: int, report: Report) -> None:
        with current.lock:
            if not current.is_open or current.termination is None:
                return
            is_complete = current.termination.reported(worker, report.peers, report.absent)
            mistaken = current.termination.mistaken
            if is_complete:
                current.phase = PassPhase.COMMITTING  # from here on it cannot fail: some may have heard already
            others = current.termination.participants - {self._own}
        if mistaken:
            name = self.prober.name_of(min(mistaken))
            self.fail(current, WorkerLost(f"worker {name} is lost", name), "taking reports")
        elif is_complete:
            self._commit(current, others)

    def _commit(self, current: BackwardPass, others: Iterable[int]) -> None:
        """Whoever called backward goes on at once: others that are asked for gradients wait for what is sent here."""
        self._end(current, PassPhase.COMMITTED)
        if current.context.released is None:  # else they are told of that anyway
            self.tell_all(others, "autograd.commit", CommitPass(current.context.context_id, current.pass_id))

    def _on_commit(self, sender: WorkerInfo, note: Any, _: list[torch.Tensor]) -> None:
        message = parse(note, CommitPass)
        current = self._find_pass(message.context_id, message.pass_id)
        if current is not None and creator_of(message.pass_id) == sender.id:
            self._end(current, PassPhase.COMMITTED)

    def _on_abort(self, sender: WorkerInfo, note: Any, _: list[torch.Tensor]) -> None:
        message = parse(note, AbortPass)
        current = self._find_pass(message.context_id, message.pass_id)
        if current is not None:
            # Whoever has reported asks the root to give up, and waits for its word.
            told = set() if current.is_root else {sender.id}
            self._drop(current, failures.rebuild_exception(message.error, self._agent.trust), message, told)
            return
        context = self._container.find(message.context_id)
        if context is not None:
            with context.lock:
                context.ended_passes.setdefault(message.pass_id, False)

    def _find_pass(self, context_id: int, pass_id: int) -> BackwardPass | None:
        context = self._container.find(context_id)
        return context.passes.get(pass_id) if context is not None else None

    def _on_worker_lost(self, address: WorkerAddress, reason: str) -> None:
        rank, name = address.info.id, address.info.name
        self.lost.add(rank)
        for context in self._container:
            for current in list(context.passes.values()):
                # Elsewhere: this thread may hold a connection, and telling the others may take a while.
                self._agent.reactor.run_soon(functools.partial(self._without_worker, current, rank, name, reason))

    def _without_worker(self, current: BackwardPass, rank: int, name: str, reason: str) -> None:
        with current.lock:
            if current.is_over or not current.is_joined:
                return
            actions = None if creator_of(current.pass_id) == rank else current.state.worker_lost(rank)
            if current.termination is not None and rank in current.termination.participants:
                actions = None
            current.wake_gates()
        if actions is None:
            self.fail(current, WorkerLost(f"worker {name} is lost: {reason}", name), "waiting")
        else:
            self._perform(current, actions)

    # -- the end of a pass -----------------------------------------------------------------------------------------------

    def fail(self, current: BackwardPass, error: BaseException, operation: str) -> None:
        """Something went wrong here: the pass ends, and everybody is told.

        Who has reported leaves that to the root, which may have committed meanwhile: then the gradients here count.
        """
        if not current.is_open:
            return
        failure = self._failure(error, operation)
        abort = AbortPass(current.context.context_id, current.pass_id, self._describe(failure))
        has_reported = current.phase is PassPhase.DONE and not current.is_root
        if not (has_reported and self.tell(creator_of(current.pass_id), "autograd.abort", abort)):
            self._drop(current, failure, abort, set())

    def release(self, current: BackwardPass, where: str) -> None:
        """The context of a pass was released: nobody can ask for its gradients any more, however it ends."""
        failure = self._failure(UnknownContext(f"the context was released {where}"), "waiting")
        abort = AbortPass(current.context.context_id, current.pass_id, self._describe(failure))
        self._drop(current, failure, abort, set())

    def _failure(self, error: BaseException, operation: str) -> BackwardFailed:
        if isinstance(error, BackwardFailed):
            return error
        name = self._agent.info.name
        if isinstance(error, WorkerLost) and error.worker:  # whoever noticed it, and by whatever means: name the dead
            name, operation = error.worker, "taking part in the pass"
        text = f"the backward pass failed on worker {name} while {operation}: {type(error).__name__}: {error}"
        failure = BackwardFailed(text, name, operation)
        failure.__cause__ = error
        return failure

    def _describe(self, failure: BaseException) -> Any:
        return failures.describe_exception(failure, self._agent.info.name, self._agent.config.limits)

    def _drop(self, current: BackwardPass, error: BaseException, abort: AbortPass, told: set[int]) -> None:
        """Ends a pass without gradients, and passes that on to whoever has to do with it here."""
        if not self._end(current, PassPhase.ABORTED, error):
            return
        with current.lock:  # after the end, so that nobody is forgotten who reports at this moment
            others = {creator_of(current.pass_id)}
            if current.is_joined:
                others |= set(current.state.peers)
            if current.termination is not None:
                others |= current.termination.participants
        self.tell_all(others - told - {self._own}, "autograd.abort", abort)

    def _end(self, current: BackwardPass, phase: PassPhase, error: BaseException | None = None) -> bool:
        """The pass is decided; False if it was already. The root's gradients stay for whoever called backward."""
        context = current.context
        with context.lock, current.lock:
            if not current.is_open and (current.is_over or phase is PassPhase.ABORTED):
                return False
            current.phase, current.error = phase, error
            if not current.is_root:
                if phase is PassPhase.COMMITTED and not context.released:
                    for leaf, gradient in current.gradients.items():
                        add_gradient(context.gradients, leaf, gradient)
                current.forget()
            context.passes.pop(current.pass_id, None)
            context.ended_passes[current.pass_id] = phase is PassPhase.COMMITTED
            context.changed.notify_all()
            current.settled.notify_all()
            current.ended.notify_all()
        return True

    def tell_all(self, ranks: Iterable[int], name: str, note: Any) -> None:
        """Sends a notice to several workers; those that are gone need not be told."""
        for rank in ranks:
            if rank != self._own:
                self.tell(rank, name, note)

    def tell(self, rank: int, name: str, note: Any) -> bool:
        """Sends a notice; False if the worker is gone. For one that does not read, another thread goes on trying."""
        if rank in self.lost:
            return False
        try:
            to = self.prober.name_of(rank)
            self._agent.notices.send(to, name, note, (), time.monotonic() + _TELL_S)
        except RpcTimeout:
            self._agent.reactor.run_soon(functools.partial(self._tell_late, to, name, note))
        except (RpcError, TransportError):
            return False
        return True

    def _tell_late(self, to: str, name: str, note: Any) -> None:
        # If its connection was cut off meanwhile, it takes this worker for dead, and needs to be told nothing more.
        with contextlib.suppress(RpcError, TransportError):
            self._agent.notices.send(to, name, note)
