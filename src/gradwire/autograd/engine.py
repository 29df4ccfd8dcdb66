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

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from gradwire.autograd._backward_state import Action, Introduction, Report, RunComponent, Tell
from gradwire.autograd.backward_pass import BackwardPass, PassPhase, Roots
from gradwire.autograd.context import ENDED_PASS_BYTES, DistAutogradContainer, DistAutogradContext, RecordedRecv
from gradwire.autograd.explanation import Prober
from gradwire.autograd.functions import Gradients
from gradwire.autograd.local_engine import (
    EngineRun,
    GradientTable,
    PassDropped,
    add_gradient,
    pack_answer,
    unpack_answers,
)
from gradwire.autograd.messages import (
    NO_ID,
    AbortPass,
    CommitPass,
    GradientItem,
    PassOptions,
    PropagateGradients,
    ReportDone,
)
from gradwire.autograd.stall_detector import Watch
from gradwire.errors import (
    BackwardFailed,
    LimitExceeded,
    RpcError,
    RpcTimeout,
    TransportError,
    UnknownContext,
    WorkerLost,
)
from gradwire.types import WorkerAddress, WorkerInfo, creator_of
from gradwire.wire import exceptions as failures
from gradwire.wire.messages import read_note

if TYPE_CHECKING:
    from gradwire.autograd.context import DistAutogradContainer, DistAutogradContext
    from gradwire.rpc.agent import Agent


_MOST_EARLY = 64  # workers whose word is kept until another one names them
_TELL_S = 0.2  # how long whoever ends a pass or a context waits for a worker that does not read


class Endings:
    """Ends the passes of one worker, and tells others.

    Args:
        agent: The worker.
        container: Its contexts.
        name_of: Names of workers by rank.
    """

    def __init__(self, agent: Agent, container: DistAutogradContainer, name_of: Callable[[int], str]) -> None:
        self._agent = agent
        self._quotas = container.quotas
        self._own = container.worker
        self._name_of = name_of

    def commit(self, current: BackwardPass, others: Iterable[int], *, follows: bool = True) -> None:
        """Whoever called backward goes on at once: others that are asked for gradients wait for what is sent here.

        Args:
            current: The pass.
            others: Ranks of its other participants.
            follows: Whether those whom a follow-up tells need not be told here.
        """
        try:
            self.end(current, PassPhase.COMMITTED)
        except Exception as error:  # out of memory, say; nobody has heard yet
            with current.lock:
                if current.is_over:  # another thread could make them
                    return
                current.phase = PassPhase.DONE
            self.fail(current, error, "adding up gradients")
            return
        if follows and current.follow_up is not None:
            others = set(others) - current.follow_up.ranks
        if current.context.released is None:  # else they are told of that anyway
            self.tell_all(others, "autograd.commit", CommitPass(current.context.context_id, current.pass_id))

    def fail(self, current: BackwardPass, error: BaseException, operation: str) -> None:
        """Something went wrong here: the pass ends, and everybody is told.

        Who has reported leaves that to the root, which may have committed meanwhile: then the gradients here count.
        """
        if not current.is_open:
            return
        failure = self.failure(error, operation)
        abort = AbortPass(current.context.context_id, current.pass_id, self.describe(failure))
        if self.drop(current, failure, abort, set(), has_last_word=current.is_root) or not current.is_undecided:
            return
        if not self.tell(creator_of(current.pass_id), "autograd.abort", abort):  # nobody is left to say how it ends
            self.drop(current, failure, abort, set())

    def finish_commit(self, current: BackwardPass) -> None:
        """The thread that committed was interrupted, or what follows failed: some may have heard of it, so all must."""
        if current.phase in (PassPhase.COMMITTING, PassPhase.COMMITTED):
            with current.lock:
                others = current.followers()
            self.commit(current, others, follows=False)

    def release(self, current: BackwardPass, where: str) -> None:
        """The context of a pass was released: nobody can ask for its gradients any more, however it ends."""
        failure = self.failure(UnknownContext(f"the context was released {where}"), "waiting")
        abort = AbortPass(current.context.context_id, current.pass_id, self.describe(failure))
        self.drop(current, failure, abort, set())

    def may_abort(self, context: DistAutogradContext, message: AbortPass, sender: int) -> bool:
        """Whether a worker may end a pass; one that is not here cannot be begun then: messages may overtake each other.

        The root may not know yet that the worker takes part: then its word is kept until another participant names it. One
        that has not reported passes the word on to those who can tell the root.
        """
        with context.lock:
            current = context.passes.get(message.pass_id)
            is_known = context.knows(sender) or sender == creator_of(message.pass_id)
            if current is None:
                return is_known and self._bar(context, message.pass_id, sender)
        if is_known:
            return True
        with current.lock:
            if current.is_joined and sender in current.state.peers:
                return True
            if current.termination is None or current.termination.is_named(sender):
                return current.termination is not None
            if len(current.early) < _MOST_EARLY:
                current.early[sender] = message
            return False

    def _bar(self, context: DistAutogradContext, pass_id: int, sender: int) -> bool:
        """Remembers that a pass is over; under the context's lock. False if the sender has ended too many."""
        if pass_id not in context.ended_passes:
            try:
                self._quotas.charge(sender, context, ENDED_PASS_BYTES)
            except LimitExceeded:
                return False
            context.ended_passes[pass_id] = False
        return True

    def refuse(self, context_id: int, pass_id: int, sender: int, error: Exception) -> None:
        """Gradients came that cannot be taken here: the root must know."""
        failure = self.failure(error, "taking gradients")
        abort = AbortPass(context_id, pass_id, self.describe(failure))
        self.tell_all({creator_of(pass_id), sender}, "autograd.abort", abort)

    def tell_failed(self, rank: int, context_id: int, pass_id: int) -> None:
        """Tells a worker that waits for the end of a pass that it has failed."""
        failure = BackwardFailed("the backward pass has failed already", self._agent.info.name, "waiting")
        self.tell(rank, "autograd.abort", AbortPass(context_id, pass_id, self.describe(failure)))

    def failure(self, error: BaseException, operation: str) -> BackwardFailed:
        if isinstance(error, BackwardFailed):
            return error
        name = self._agent.info.name
        if isinstance(error, WorkerLost) and error.worker:  # whoever noticed it, and by whatever means: name the dead
            name, operation = error.worker, "taking part in the pass"
        node = "" if (rank := self._rank_of(name)) is None else f" on Node {rank}"
        kind = type(error).__name__
        text = f"Error{node}: {error} ({kind}; the backward pass failed on worker {name} while {operation})"
        failure = BackwardFailed(text, name, operation)
        failure.__cause__ = error
        return failure

    def _rank_of(self, name: str) -> int | None:
        return next((info.id for info in self._agent.directory.infos() if info.name == name), None)

    def describe(self, failure: BaseException) -> Any:
        return failures.describe_exception(failure, self._agent.info.name, self._agent.config.limits)

    def drop(
        self,
        current: BackwardPass,
        error: BaseException,
        abort: AbortPass,
        told: set[int],
        *,
        has_last_word: bool = True,
    ) -> bool:
        """Ends a pass without gradients, and passes that on to whoever has to do with it here.

        Args:
            current: The pass.
            error: Why.
            abort: The same, for others.
            told: Ranks of those who know.
            has_last_word: Whether that ends it here even after this worker has reported.

        Returns:
            False if it had ended, or is the root's to end.
        """
        had_reported = current.is_undecided and not current.is_root
        if not self.end(current, PassPhase.ABORTED, error, has_last_word=has_last_word):
            return False
        if had_reported:
            return True  # the others wait for the root's word, as this one did
        with current.lock:  # after the end, so that nobody is forgotten who reports at this moment
            others = {creator_of(current.pass_id)}
            if current.is_joined:
                others |= set(current.state.peers)
            others |= current.followers()
        self.tell_all(others - told - {self._own}, "autograd.abort", abort)
        return True

    def end(
        self, current: BackwardPass, phase: PassPhase, error: BaseException | None = None, *, has_last_word: bool = True
    ) -> bool:
        """The pass is decided; False if it was already. The root's gradients stay for whoever called backward."""
        context = current.context
        with context.lock, current.lock:
            if not current.is_open and (current.is_over or phase is PassPhase.ABORTED):
                return False
            if current.is_undecided and not has_last_word:
                return False
            is_committed = phase is PassPhase.COMMITTED
            gradients = self._joined(current) if is_committed else context.gradients
            # Assignments only: no Ctrl-C comes between them. Before them all may be done again, after them nothing need be.
            context.ended_passes[current.pass_id] = is_committed
            context.gradients = gradients
            current.phase, current.error, current.is_over = phase, error, True
            if not current.is_root:
                current.forget()
            context.passes.pop(current.pass_id, None)
            context.wake()
            current.wake()
        current.on_over()
        return True

    def _joined(self, current: BackwardPass) -> GradientTable:
        """The gradients of a context and of its pass; nothing has changed yet."""
        context = current.context
        if not current.joins_context or context.released:
            return context.gradients
        found = {leaf: gradient for leaf, gradient in context.gradients.items() if leaf not in current.totals}
        for leaf, gradient in current.gradients.items():
            add_gradient(found, leaf, gradient, current.options.create_graph)
        return found

    def tell_all(self, ranks: Iterable[int], name: str, note: Any) -> None:
        """Sends a notice to several workers; those that are gone need not be told."""
        for rank in ranks:
            if rank != self._own:
                self.tell(rank, name, note)

    def tell(self, rank: int, name: str, note: Any) -> bool:
        """Sends a notice; False if the worker is gone. For one that does not read, another thread goes on trying."""
        try:
            return self._send(rank, name, note, time.monotonic() + _TELL_S)
        except RpcTimeout:
            self._agent.reactor.run_soon(functools.partial(self._tell_late, rank, name, note))
            return True

    def _tell_late(self, rank: int, name: str, note: Any) -> None:
        # If its connection was cut off meanwhile, it takes this worker for dead, and needs to be told nothing more.
        self.send(rank, name, note)

    def send(self, rank: int, name: str, note: Any) -> bool:
        """Sends a notice, in as much time as a call has; False if the worker cannot be reached."""
        try:
            return self._send(rank, name, note, None)
        except RpcTimeout:
            return False

    def _send(self, rank: int, name: str, note: Any, deadline: float | None) -> bool:
        """Sends a notice; False if the worker is gone."""
        try:
            to = self._name_of(rank)
            if self._agent.notices.is_out_of_reach(to):
                return False
            self._agent.notices.send(to, name, note, (), deadline)
        except RpcTimeout:
            raise
        except (RpcError, TransportError):
            return False
        return True


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
