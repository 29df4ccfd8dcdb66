r"""Drives the backward passes of one worker, and ends its contexts.

    root                              participant                      participant
     backward()
       join, run locally
       PropagateGradients  --------->  join, run  ---------------->     join, run
                           <---------  ...        <----------------     ...
                           <- ReportDone (with peers) ---------------- ReportDone
       every participant has reported
       CommitPass          --------->  gradients join the context
                           ------------------------------------------>

`BackwardState` decides, `BackwardPass` holds the data of one pass, and the engine sends, runs and waits. A message of a
pass that is over is ignored. A context ends on every worker that took part: each tells those that it exchanged messages
with (`ReleaseContext`). A worker that loses the one that would have told it asks the creator of the context
(`HoldsContext`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from gradwire._torch import is_any_autocast_enabled
from gradwire.autograd._backward_state import Action, Fail, Introduction, PassPhase, Report, RunComponent, Tell
from gradwire.autograd.backward_pass import (
    NO_ROOTS,
    BackwardPass,
    PassDropped,
    check_roots,
    follow_routes,
    pack_answer,
    sum_by_origin,
)
from gradwire.autograd.context import (
    ENDED_PASS_BYTES,
    EXTENSION,
    PASS_BYTES,
    PASS_BYTES_PER_MESSAGE,
    AutogradStatistics,
    ContextObserver,
    DistAutogradContainer,
    DistAutogradContext,
    RecordedRecv,
    find_call_site,
)
from gradwire.autograd.current_context import carry_into_threads
from gradwire.autograd.explanation import Prober
from gradwire.autograd.functions import Gradients
from gradwire.autograd.interceptor import AutocastInterceptor, AutogradInterceptor
from gradwire.autograd.local_engine import Found, Sources, run_component
from gradwire.autograd.messages import (
    NO_ID,
    WHERE_CHARS,
    AbortPass,
    CommitPass,
    GradientItem,
    HoldsContext,
    PassOptions,
    PropagateGradients,
    ReleaseContext,
    ReportDone,
)
from gradwire.autograd.pass_events import PassTrace
from gradwire.autograd.stall_detector import StallDetector
from gradwire.errors import (
    AutogradError,
    BackwardFailed,
    LimitExceeded,
    RpcError,
    RpcTimeout,
    TransportError,
    UnknownContext,
    WorkerLost,
)
from gradwire.observe import events
from gradwire.params.grads import GradientTable
from gradwire.rpc.connection import while_waiting
from gradwire.types import WorkerAddress, WorkerInfo, creator_of
from gradwire.wire import exceptions
from gradwire.wire.exceptions import clean

if TYPE_CHECKING:
    from gradwire.rpc.agent import Agent

_TELL_S = 0.2  # how long to wait for a worker that does not read, when it is told of an end
_CONNECT_S = 10.0
_OWE_S = 0.02  # how long a commit may wait to travel with another message; the timer runs as often anyway
_NOTHING_DUE: tuple[int, frozenset[int], float] = (NO_ID, frozenset(), 0.0)
_READ_S = (
    0.001  # how long a thread reads before it sleeps; meanwhile it does not notice what other threads do for the pass
)


def is_about_pass(pass_id: int, note: Any) -> bool:
    return bool(getattr(note, "pass_id", None) == pass_id)


_made: weakref.WeakSet[DistEngine] = weakref.WeakSet()
_lock = threading.Lock()  # guards _made


def attach(agent: Agent) -> None:
    """Attach distributed autograd to a new worker."""
    carry_into_threads()
    made = agent.extensions[EXTENSION] = DistEngine(agent)
    with _lock:
        _made.add(made)


def all_open() -> list[DistEngine]:
    """Return the engines of all workers of this process that are not closed."""
    with _lock:
        return [item for item in _made if not item._agent.is_closed]


class DistEngine:
    """The contexts and backward passes of one worker."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.container = DistAutogradContainer(agent.info.id, agent.address.incarnation, agent.config.limits)
        self._own = agent.info.id
        self.worker = agent.info.name
        self._names: dict[int, str] = {}  # of workers, by rank; forgotten with a worker
        self.lost: set[int] = set()  # ranks of workers that were lost and have not been connected since
        self._tried: set[int] = set()  # ranks to which a connection was tried; changed by single operations only
        self._last_participants: set[int] = set()  # ranks in the last pass from here: the next one often has the same
        # Committed passes, by context: the pass, the ranks that have to be told, and the deadline for that. Entries are
        # taken out by single operations only.
        self.due: dict[int, tuple[int, frozenset[int], float]] = {}
        self._owing = threading.Lock()  # guards replacing an entry: passes of one context may end at once
        self._has_owed = False  # a commit since the timer last ran
        self.num_passes = 0
        self.num_refused = 0  # messages about contexts or passes that their senders do not take part in
        self.prober = Prober(agent, self.container, self.lost, self.name_of)
        self.observer: ContextObserver | None = None  # of the contexts of this worker; most programs have none
        notices = agent.notices
        notices.register("autograd.propagate", self._on_propagate, PropagateGradients)
        notices.register("autograd.report", self._on_report, ReportDone)
        notices.register("autograd.abort", self._on_abort, AbortPass)
        notices.register("autograd.commit", self.on_commit, CommitPass)
        notices.register("autograd.release", self._on_release, ReleaseContext)
        notices.register("autograd.holds", self._on_holds, HoldsContext)
        notices.on_cut(self._on_cut)
        agent.on_worker_lost(self._on_worker_lost)
        agent.sweeps.append(self._sweep)
        agent.before_close.append(self.tell_due)
        agent.interceptors += [AutogradInterceptor(self), AutocastInterceptor()]

    def name_of(self, rank: int) -> str:
        name = self._names[rank] = self._agent.directory.find(rank).info.name
        return name

    def heard_of(self, worker: WorkerInfo) -> None:
        """Note that a worker that counted as lost is connected."""
        if not self._agent.has_ended(worker.name):
            self.lost.discard(worker.id)

    def statistics(self) -> AutogradStatistics:
        contexts = list(self.container)
        return AutogradStatistics(
            len(contexts),
            sum(len(item.passes) for item in contexts),
            self.num_passes,
            sum(len(item.sends) for item in contexts),
            sum(len(item.recvs) for item in contexts),
            self.num_refused,
        )

    # -- the root --------------------------------------------------------------------------------------------------

    def backward(
        self,
        context_id: int,
        options: PassOptions,
        roots: Any,
        gradients: Any,
        inputs: Any,
        *,
        joins_context: bool = True,
    ) -> GradientTable:
        """Run a pass from here and wait until it has ended everywhere; return the gradients computed here."""
        start = check_roots(roots, gradients, inputs, joins_context)
        context = self.container.find(context_id) or self.container.retrieve(context_id)
        if self.observer is not None:
            self.observer.before_backward(context_id, start.tensors)
        pass_id = self.container.new_message_id()
        make = functools.partial(BackwardPass, self._own, pass_id, context, options, start, self.lost)
        if self.due:
            self.tell_due()
        began_ns = time.monotonic_ns() if events.sink is not None else 0
        current = context.begin_pass(pass_id, make)
        if current is None:
            raise UnknownContext(f"context {context_id} was released while backward was starting")
        if began_ns:
            current.trace = PassTrace(self.worker, current, began_ns)
        self.num_passes += 1
        has_returned = False
        try:
            actions, current.begun = current.begun, []
            self._perform(current, actions)
            if not current.state.is_over:
                self._wait_over(current)
            if current.followers:
                self._last_participants = set(current.followers)
                self.owe_commit(context.context_id, pass_id, current.followers)
            has_returned = True
        finally:
            if not has_returned:
                self._leave(current)
            if current.trace is not None:
                current.trace.tell_ended(current, current.error if has_returned else KeyboardInterrupt())
        failure, current.error = current.error, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback holds this frame, and with it all that the pass recorded
        return current.gradients

    def _leave(self, current: BackwardPass) -> None:
        """End a pass after Ctrl-C: the others must not wait for this worker."""
        if not current.state.is_over:
            self.fail(current, AutogradError("backward was interrupted"), "running backward")
        self._tell_all(current.followers, "autograd.commit", CommitPass(current.context.context_id, current.pass_id))

    def _wait_over(self, current: BackwardPass) -> None:
        began_ns = time.monotonic_ns() if current.trace is not None else 0
        with while_waiting():
            # This thread helps if torch is configured in it as in the threads that usually run passes.
            is_plain = torch.is_grad_enabled() and not (torch.is_inference_mode_enabled() or is_any_autocast_enabled())
            if is_plain:
                self._read_along(current)
            if not current.state.is_over:
                self._wait(current, None)
        if current.trace is not None:
            current.trace.tell("wait", "other workers", began_ns)

    def _read_along(self, current: BackwardPass) -> None:
        """Read the connections that gradients and reports will use, for a moment: that saves waking threads for them."""
        is_own = functools.partial(is_about_pass, current.pass_id)  # messages of other passes may run user code
        ranks = current.context.known_workers | self._last_participants
        while not current.state.is_over:
            if not self._agent.server.take_notices(ranks, _READ_S, lambda: current.state.is_over, is_own):
                return

    def _wait(self, current: BackwardPass, send: int | None) -> None:
        """Wait until a send is settled or the pass is over, and watch the pass meanwhile."""
        detector = current.detector
        if detector is None:
            detector = current.detector = StallDetector(self._agent, self.prober, current)
        while not current.wait(send, detector.pause_s()):
            problem = detector.look()
            if problem is not None:
                self.fail(current, *problem)
        if current.state.is_over:
            current.detector = None  # it holds the pass: the two would stay until the garbage collector comes

    # -- actions ------------------------------------------------------------------------------------------------------

    def _perform(self, current: BackwardPass, actions: Sequence[Action]) -> None:
        """Perform the actions of a pass; any error, also in user code, ends the pass."""
        operation = ""
        try:
            # Actions that follow from a run are not performed inside it: chains of runs may be long.
            while actions:
                runs: list[RunComponent] = []
                following: list[Action] = []
                for action in actions:
                    kind = type(action)
                    if kind is RunComponent:
                        runs.append(action)  # type: ignore[arg-type]
                    elif kind is Report:
                        operation = "reporting to the root"
                        following += self._report(current, action)  # type: ignore[arg-type]
                    else:
                        operation = "notifying other workers"
                        self._do(current, action)
                for action in runs[1:]:  # components run side by side
                    self._perform_soon(current, [action])
                if runs:
                    operation = "running the local backward"
                    run = _Run(self, current, runs[0])
                    began_ns = time.monotonic_ns() if current.trace is not None else 0
                    found = run.run()
                    if current.trace is not None:
                        current.trace.tell("local_engine", "local engine", began_ns)
                    following += run.following
                    following += current.finish(runs[0].index, found)
                actions = following
        except PassDropped:
            pass
        except BaseException as error:  # the user's hooks and functions may raise SystemExit, too
            self.fail(current, error, operation)
            # In a service thread it comes from user code, and would stop the reader of a connection.
            if isinstance(error, KeyboardInterrupt) and not self._agent.reactor.is_service_thread():
                raise

    def _perform_soon(self, current: BackwardPass, actions: Sequence[Action]) -> None:
        self._agent.reactor.run_soon(functools.partial(self._perform, current, actions))

    def _do(self, current: BackwardPass, action: Action) -> None:
        if isinstance(action, Tell):
            items = tuple([GradientItem(message_id, via=action.via) for message_id in action.message_ids])
            self._post(current, action.peer, items)
        elif isinstance(action, Fail) and action.error is not None:
            self.fail(current, action.error, "adding up gradients")
        elif isinstance(action, Fail) and action.abort is not None:
            self._take_abort(current, action.abort)
        elif isinstance(action, Fail) and action.lost is not None:
            name = self._names.get(action.lost) or self.name_of(action.lost)
            self.fail(current, WorkerLost(f"worker {name} is lost", name), "waiting for reports")

    def _report(self, current: BackwardPass, report: Report) -> list[Action]:
        """Report to the root that everything here is done; on the root, return the next actions."""
        current.run_hooks()
        if current.root == self._own:
            return current.report_received(self._own, report)
        note = ReportDone(current.context.context_id, current.pass_id, report)
        name = self._names.get(current.root) or self.name_of(current.root)
        self._agent.notices.send(name, "autograd.report", note, (), current.deadline)
        return []

    def _post(
        self,
        current: BackwardPass,
        peer: int,
        items: tuple[GradientItem, ...],
        tensors: Sequence[torch.Tensor] = (),
        report: Report | None = None,
    ) -> None:
        began_ns = time.monotonic_ns() if current.trace is not None else 0
        introduction = current.introduce(peer)
        note = PropagateGradients(
            current.context.context_id, current.pass_id, current.options, items, introduction, report
        )
        if peer == self._own:
            values = list(tensors)
            if values:  # of one message
                values = current.capture(items[0].message_id, items[0].defined or (), values)
            self._agent.reactor.run_soon(lambda: self._on_propagate(self._agent.info, note, values))
        else:
            name = self._names.get(peer) or self.name_of(peer)
            self._agent.notices.send(name, "autograd.propagate", note, tensors, current.deadline)
            if current.trace is not None:
                current.trace.tell_sent(name, items, tensors, began_ns)

    # -- messages of a pass --------------------------------------------------------------------------------------------

    def _on_propagate(self, sender: WorkerInfo, message: PropagateGradients, tensors: list[torch.Tensor]) -> None:
        if sender.id in self.lost:
            self.heard_of(sender)
            if sender.id in self.lost:  # a late message: its sends were settled when the sender was lost
                return
        began_ns = time.monotonic_ns() if events.sink is not None else 0
        current = self._find_or_begin(message, sender)
        if current is not None:
            trace = current.trace
            try:
                introduction = message.introduction
                if introduction is not None and introduction.shortcuts:
                    introduction = self._trim(introduction)
                actions = current.take(sender, message, introduction, tensors)
            except Exception as error:
                self.fail(current, error, f"taking gradients from {sender.name}")
            else:
                self._perform(current, actions)
            if trace is not None:
                trace.tell_received(sender.name, message, tensors, began_ns)
        if message.report is not None:  # after the gradients that came with it
            self._take_report(sender, message.context_id, message.pass_id, message.report)

    def _find_or_begin(self, message: PropagateGradients, sender: WorkerInfo) -> BackwardPass | None:
        """Return the pass of a message, started here if necessary; None if it is over, or cannot be started here.

        The first message of a pass may come from any worker known from forward messages of the context.
        """
        context = self.container.find(message.context_id)
        current = context.passes.get(message.pass_id) if context is not None else None
        if current is not None:
            return current
        try:
            if context is None:
                context = self.container.get_or_create(message.context_id, sender.id)
            if context is None:
                where = self.container.where_released(message.context_id)
                raise UnknownContext(f"context {message.context_id} was released {where or 'long ago'}")
            if creator_of(message.pass_id) == self._own:  # a root knows its passes until they end
                return None
            return context.begin_pass(message.pass_id, functools.partial(self._make_pass, context, message, sender.id))
        except Exception as error:
            failure = self.failure(error, "taking gradients")
            abort = AbortPass(message.context_id, message.pass_id, self.describe(failure))
            self._tell_all({creator_of(message.pass_id), sender.id}, "autograd.abort", abort)
            return None

    def _make_pass(self, context: DistAutogradContext, message: PropagateGradients, sender: int) -> BackwardPass:
        num_bytes = PASS_BYTES + PASS_BYTES_PER_MESSAGE * len(context.exchanges)
        self.container.quotas.charge(sender, context, num_bytes + ENDED_PASS_BYTES)
        began_ns = time.monotonic_ns() if events.sink is not None else 0
        current = BackwardPass(self._own, message.pass_id, context, message.options, NO_ROOTS, self.lost, (sender,))
        current.charged = sender, num_bytes
        if began_ns:
            current.trace = PassTrace(self.worker, current, began_ns)
        self.num_passes += 1
        return current

    def _trim(self, introduction: Introduction) -> Introduction:
        """Return an introduction without shortcuts to workers that cannot be reached now."""
        kept = [item for item in introduction.shortcuts if all(self._is_near(route[0]) for route in item[1])]
        return msgspec.structs.replace(introduction, shortcuts=tuple(kept))

    def _is_near(self, rank: int) -> bool:
        if rank == self._own:
            return True
        if rank in self.lost:
            return False
        if any(lane.address.info.id == rank for lane in self._agent.peers.lanes()):
            return True
        if rank not in self._tried and any(info.id == rank for info in self._agent.directory.infos()):
            self._tried.add(rank)
            self._agent.reactor.run_soon(functools.partial(self._connect, rank))
        return False

    def _connect(self, rank: int) -> None:
        peers = self._agent.peers
        with contextlib.suppress(RpcError, TransportError):
            peers.peer(peers.name_of(rank)).lane("control", time.monotonic() + _CONNECT_S)

    # -- two-phase commit ----------------------------------------------------------------------------------------------

    def _on_report(self, sender: WorkerInfo, message: ReportDone, _: list[torch.Tensor]) -> None:
        self._take_report(sender, message.context_id, message.pass_id, message.report)

    def _take_report(self, sender: WorkerInfo, context_id: int, pass_id: int, report: Report) -> None:
        if creator_of(pass_id) != self._own:
            self.num_refused += 1
            return
        context = self.container.find(context_id)
        current = context.passes.get(pass_id) if context is not None else None
        if current is not None:
            actions = current.report_received(sender.id, report)
            if actions:
                self._perform(current, actions)
        if current is None or current.phase is PassPhase.ABORTED:
            self._answer(sender, context_id, pass_id, commits=False)

    def _answer(self, sender: WorkerInfo, context_id: int, pass_id: int, *, commits: bool = True) -> None:
        """Tell a worker how a pass of this root has ended. The passes of a released context count as failed.

        A worker that joined late, because of a message of a dead worker, was not told with the others. A worker that
        asks how a pass ended may have reported, with a report that never arrived. Both wait for this answer.
        """
        context = self.container.find(context_id)
        is_committed = context.ended_passes.get(pass_id, False) if context is not None else False
        if not is_committed:
            failure = BackwardFailed("the backward pass has failed already", self.worker, "waiting")
            self.tell(sender.id, "autograd.abort", AbortPass(context_id, pass_id, self.describe(failure)))
        elif commits:
            self.tell(sender.id, "autograd.commit", CommitPass(context_id, pass_id))

    def owe_commit(self, context_id: int, pass_id: int, ranks: Collection[int]) -> None:
        """Schedule the commit for these workers; it often travels with the next message.

        The end of the context carries it, and so does the step of an optimizer. Any other call sends it first, so that
        no worker is asked for gradients that it would have to wait for. A timer sends it in any case.
        """
        if self.container.find(context_id) is None:
            return  # they are told of its end
        when = time.monotonic() + _OWE_S
        with self._owing:
            earlier = self.due.get(context_id)
            self.due[context_id] = pass_id, frozenset(ranks), when
        if earlier is not None:
            self._tell_all(earlier[1], "autograd.commit", CommitPass(context_id, earlier[0]))
        self._has_owed = True
        self._agent.reactor.expect(when)

    def take_due(self, context_id: int, ranks: Collection[int]) -> tuple[int, Set[int]]:
        """Return the pass whose commit the caller sends, and to which of these workers; send it to the others now."""
        pass_id, waiting, _ = self.due.pop(context_id, _NOTHING_DUE)
        told = waiting.intersection(ranks)
        self._tell_all(waiting - told, "autograd.commit", CommitPass(context_id, pass_id))
        return pass_id, told

    def tell_due(self) -> None:
        """Send all scheduled commits now."""
        for context_id in list(self.due):
            self.take_due(context_id, ())

    def _sweep(self, now: float) -> float:
        """Send the commits that are due; return when to run again."""
        first = min([when for _, _, when in list(self.due.values())], default=float("inf"))
        if first <= now:
            self._agent.reactor.run_soon(self.tell_due)
        # In a training loop most commits are sent by now; but each of the next ones would wake the timer again.
        is_in_demand, self._has_owed = self._has_owed, False
        return min(first if first > now else float("inf"), now + _OWE_S if is_in_demand else float("inf"))

    def on_commit(self, sender: WorkerInfo, message: CommitPass, _: Sequence[torch.Tensor] = ()) -> None:
        """Handle the commit of a pass, which its root sent as a notice or with another message."""
        context = self.container.find(message.context_id)
        current = context.passes.get(message.pass_id) if context is not None else None
        if current is not None and current.root == sender.id and current.commit_received():
            if current.charged:
                self.container.quotas.refund(current.context, *current.charged)
            if current.trace is not None:
                current.trace.tell_ended(current)

    def fail(self, current: BackwardPass, error: BaseException, operation: str) -> None:
        """End a pass because of an error here, and tell the other workers.

        A worker that has reported leaves that to the root, which may have committed already: then the gradients here
        are valid.
        """
        if not current.state.is_over:
            self._abort(current, self.failure(error, operation))

    def _abort(
        self,
        current: BackwardPass,
        failure: BaseException,
        note: AbortPass | None = None,
        sender: int | None = None,
        *,
        is_final: bool = False,
    ) -> None:
        """End a pass without gradients, and tell the workers that the state names."""
        abort = current.abort(failure, sender, is_final=is_final)
        if abort is None:
            return
        if abort.ends and current.charged:
            self.container.quotas.refund(current.context, *current.charged)
        if abort.ends and current.trace is not None and not current.is_root:
            current.trace.tell_ended(current, failure)
        if abort.peers:
            note = note or AbortPass(current.context.context_id, current.pass_id, self.describe(failure))
            is_told = self._tell_all(abort.peers, "autograd.abort", note)
            if not (abort.ends or is_told):  # the root is gone, so no decision can arrive
                self._abort(current, failure, note, is_final=True)

    def _on_abort(self, sender: WorkerInfo, message: AbortPass, _: list[torch.Tensor]) -> None:
        exceptions.check_error(message.error, self._agent.config.limits)
        context = self.container.find(message.context_id)
        if context is not None and not self._may_abort(context, message, sender.id):
            self.num_refused += 1
        elif context is not None:
            current = context.passes.get(message.pass_id)
            if current is not None:
                self._take_abort(current, message, sender.id)
        if creator_of(message.pass_id) == self._own and (context is None or message.pass_id in context.ended_passes):
            self._answer(sender, message.context_id, message.pass_id)

    def _may_abort(self, context: DistAutogradContext, message: AbortPass, sender: int) -> bool:
        """Return whether a worker may end a pass; an unknown pass cannot start later: messages may overtake each other."""
        is_known = context.knows(sender) or sender == creator_of(message.pass_id)
        charge = functools.partial(self.container.quotas.charge, sender, context, ENDED_PASS_BYTES)
        current = context.passes.get(message.pass_id)
        if current is None:
            try:
                if not is_known or context.bar_pass(message.pass_id, charge):
                    return is_known
            except LimitExceeded:  # the sender has ended too many
                return False
            current = context.passes.get(message.pass_id)  # started meanwhile
        return is_known or current is None or current.may_abort(sender, message)

    def _take_abort(self, current: BackwardPass, message: AbortPass, sender: int | None = None) -> None:
        failure = exceptions.rebuild_exception(message.error, self._agent.trust)
        self._abort(current, failure, message, sender)

    def failure(self, error: BaseException, operation: str) -> BackwardFailed:
        """Return the error that the caller of backward gets."""
        if isinstance(error, BackwardFailed):
            return error
        name = self.worker
        if isinstance(error, WorkerLost) and error.worker:  # whichever worker noticed it: name the one that is gone
            name, operation = error.worker, "taking part in the pass"
        rank = next((info.id for info in self._agent.directory.infos() if info.name == name), None)
        node = "" if rank is None else f" on Node {rank}"
        kind = type(error).__name__
        text = f"Error{node}: {error} ({kind}; the backward pass failed on worker {name} while {operation})"
        failure = BackwardFailed(text, name, operation)
        failure.__cause__ = error
        return failure

    def describe(self, failure: BaseException) -> Any:
        return exceptions.describe_exception(failure, self.worker, self._agent.config.limits)

    # -- notices ---------------------------------------------------------------------------------------------------------

    def _tell_all(self, ranks: Iterable[int], name: str, note: Any) -> bool:
        """Send a notice to several workers; return whether any of them can be reached."""
        is_any_told = False
        for rank in ranks:
            if rank != self._own:
                is_any_told = self.tell(rank, name, note) or is_any_told
        return is_any_told

    def tell(self, rank: int, name: str, note: Any, *, is_urgent: bool = True) -> bool:
        """Send a notice; False if the worker is gone. If an urgent one is not read, another thread keeps trying."""
        deadline = time.monotonic() + _TELL_S if is_urgent else None  # None: the timeout of a call
        try:
            to = self._names.get(rank) or self.name_of(rank)
            if rank in self.lost and self._agent.notices.is_out_of_reach(to):
                return False
            self._agent.notices.send(to, name, note, (), deadline)
        except RpcTimeout:
            if is_urgent:
                # If its connection breaks meanwhile, it considers this worker dead and needs no notice.
                again = functools.partial(self.tell, rank, name, note, is_urgent=False)
                self._agent.reactor.run_soon(again)
            return is_urgent
        except (RpcError, TransportError):
            return False
        return True

    # -- the end of contexts ---------------------------------------------------------------------------------------------

    def release(self, context_id: int) -> bool:
        """Release a context on every worker that took part; False if it was not here."""
        if self.observer is not None:
            self.observer.before_release(context_id)
        return self._release(context_id, f"on worker {self.worker} at {find_call_site()}")

    def _release(self, context_id: int, where: str, sender: int | None = None, *, is_suspected: bool = False) -> bool:
        context = self.container.release(context_id, where, None if is_suspected else sender)
        if context is None:
            return False
        self.due.pop(context_id, None)
        for current in list(context.passes.values()) if context.passes else ():
            if not is_suspected and current.drop():
                if current.trace is not None:
                    current.trace.tell_ended(current)
                continue
            # Its gradients can no longer be read, whether it is committed or not.
            failure = self.failure(UnknownContext(f"the context was released {clean(where)}"), "waiting")
            self._abort(current, failure, is_final=True)
        others = context.known_workers - {sender, self._own}
        if others:
            note = ReleaseContext(context.context_id, where[:WHERE_CHARS], is_suspected)
            for rank in others:
                self.tell(rank, "autograd.release", note)
        return True

    def _on_release(self, sender: WorkerInfo, message: ReleaseContext, _: list[torch.Tensor]) -> None:
        context = self.container.find(message.context_id)
        if context is not None and not (sender.id in context.known_workers or context.knows(sender.id)):
            self.num_refused += 1
        elif context is not None and message.is_suspected:  # the creator may be alive, and reachable from here
            self.ask_soon(message.context_id)
        else:
            self._release(message.context_id, message.where, sender.id)

    def ask_soon(self, context_id: int) -> None:
        """Ask to be told of the end of a context, in another thread: this one may hold a connection."""
        if creator_of(context_id) != self._own:
            self._agent.reactor.run_soon(functools.partial(self._ask_to_be_told, context_id))

    def _ask_to_be_told(self, context_id: int) -> None:
        creator = creator_of(context_id)
        if not self.tell(creator, "autograd.holds", HoldsContext(context_id), is_urgent=False):
            where = (
                f"because rank {creator}, which made it, and the worker that sent it to {self.worker} are unreachable"
            )
            self._release(context_id, where, creator, is_suspected=True)

    def _on_holds(self, sender: WorkerInfo, message: HoldsContext, _: list[torch.Tensor]) -> None:
        context_id = message.context_id
        if creator_of(context_id) != self._own:
            self.num_refused += 1
            return
        context = self.container.find(context_id)
        if context is None or not context.touch(sender.id):
            where = self.container.where_released(context_id) or f"on worker {self.worker} long ago"
            self.tell(sender.id, "autograd.release", ReleaseContext(context_id, where[:WHERE_CHARS]))

    # -- lost workers -------------------------------------------------------------------------------------------------

    def _on_worker_lost(self, address: WorkerAddress, reason: str) -> None:
        """Continue passes without the worker, or fail them; release the contexts that the worker created."""
        rank, name = address.info.id, address.info.name
        self.lost.add(rank)
        self._tried.discard(rank)  # if it comes back, a connection may be possible
        self._names.pop(rank, None)
        orphans, brought = [], []
        for context in self.container:
            for current in list(context.passes.values()):
                # In another thread: this one may hold a connection, and sending to the others may take long.
                self._agent.reactor.run_soon(functools.partial(self._without_worker, current, rank, name, reason))
            creator = creator_of(context.context_id)
            if creator == rank:
                orphans.append(context.context_id)
            elif creator != self._own and rank in context.known_workers:  # it would have told this one of the end
                brought.append(context.context_id)
        where = f"because worker {name}, which made it, is lost: {reason}"

        def end_contexts() -> None:
            for context_id in orphans:
                self._release(context_id, where, rank, is_suspected=True)
            for context_id in brought:
                self._ask_to_be_told(context_id)

        if orphans or brought:
            self._agent.reactor.run_soon(end_contexts)

    def _without_worker(self, current: BackwardPass, rank: int, name: str, reason: str) -> None:
        actions = current.lose_worker(rank)
        if actions is None:
            self.fail(current, WorkerLost(f"worker {name} is lost: {reason}", name), "waiting")
        else:
            self._perform(current, actions)

    def _on_cut(self, name: str) -> None:
        """Handle a lost connection to a live worker: gradients, or the end of a context, may be lost with it."""
        rank = self._agent.directory.find(name).info.id
        error = WorkerLost(f"the connection to worker {name} was cut off", name)
        for context in self.container:
            for current in list(context.passes.values()):
                if rank in current.state.peers:
                    self._agent.reactor.run_soon(functools.partial(self.fail, current, error, "waiting"))
            if rank in context.known_workers:
                self.ask_soon(context.context_id)


class _Run:
    """A run of the local engine through one component, and what the nodes of messages do in it."""

    __slots__ = ("_action", "_engine", "_pass", "ambient_id", "following", "thread")

    def __init__(self, engine: DistEngine, current: BackwardPass, action: RunComponent) -> None:
        self._engine = engine
        self._pass = current
        self._action = action  # the component, and its sends that may have a gradient
        self.following: list[Action] = []  # actions to perform when it has ended
        self.thread = self.ambient_id = 0

    def run(self) -> Found:
        """Run the component; return the gradients of its leaves."""
        current, index, sends = self._pass, self._action.index, self._action.sends
        direct = current.graph.direct[index]
        if direct is not None and current.roots.inputs is None:  # those may be tensors that are passed on
            return self._take_directly(direct)
        has_roots = current.graph.components[index].has_roots
        sources = Sources(current.roots.tensors, current.roots.gradients) if has_roots else Sources()
        waiting = []
        for send in sends:
            if not current.state.is_settled(send):
                waiting.append((send, current.sends[send].output))
        if waiting:
            current.graph.make_room_below()
            unsettled = {send for send, _ in waiting}
            sources.add_gated([current.sends[send].output for send in sends if send not in unsettled], waiting)
        else:
            for send in sends:
                sources.add_settled(current.sends[send].output, current.gradients_of(send))
        return run_component(self, sources, current.inputs_of(index), current.options, current.context)

    def _take_directly(self, targets: Sequence[torch.Tensor | tuple[int, int]]) -> Found:
        """Return the answer for a send directly: its tensors are leaves, or were received and passed on untouched."""
        current = self._pass
        gradients = current.gradients_of(self._action.sends[0])
        found: Found = []
        has_origins = False
        for number, target in enumerate(targets):
            gradient = gradients[number]
            if isinstance(target, tuple):
                has_origins = True
            elif gradient is not None and not current.options.skips_leaves:
                found.append((target, gradient))
        if has_origins:
            for message_id, sums in sum_by_origin(targets, gradients, current.options.create_graph).items():
                numbers = range(current.recvs[message_id].num_tensors)
                self.fire(current.context.context_id, message_id, [sums.get(number) for number in numbers])
        return found

    def fire(self, context_id: int, message_id: int, gradients: Gradients) -> None:
        """Send the gradients of a recv that the engine reached to the worker that sent the message."""
        current = self._pass
        recv = current.recvs.get(message_id)
        if context_id != current.context.context_id or recv is None:
            raise AutogradError(
                f"the loss depends on a tensor received from another worker in context {context_id}, but this is a "
                f"pass of context {current.context.context_id}; detach it, or make both calls in one context"
            )
        firing = current.fire(message_id)
        if firing is None:
            return
        if firing.routes is not None:
            self._follow_shortcut(recv, firing.routes, gradients)
        else:
            # Leaves, and hooks of this node, run after it.
            is_last = firing.is_last and not (current.graph.has_leaves or recv.node.is_watched)
            self._answer(recv, gradients, firing.is_lost, is_last)

    def _answer(
        self, recv: RecordedRecv, gradients: Gradients, is_lost: bool, is_last: bool, via: int | None = None
    ) -> None:
        """Send the answer for a message; via another worker, if its tensors came that way."""
        engine, current = self._engine, self._pass
        recorded_id = engine.container.new_message_id() if current.options.create_graph else NO_ID
        items, tensors = pack_answer(current.context, recv, gradients, recorded_id, via)
        if not tensors:
            if not is_lost and recv.peer not in engine.lost:
                engine._post(current, recv.peer, items)
        elif is_lost:  # even if it is alive after all: its sends were settled without it
            peer = engine._agent.peers.peer(engine.name_of(recv.peer))
            raise peer.lost("it was lost before its gradient was ready")
        elif is_last and recv.peer == current.root:  # one message for both: nothing else of the run is left
            engine._post(current, recv.peer, items, tensors, current.report_early())
        else:
            engine._post(current, recv.peer, items, tensors)

    def _follow_shortcut(self, recv: RecordedRecv, routes: Sequence[Any], gradients: Gradients) -> None:
        """Send the gradients of a message that a worker only passed on to the workers that its tensors came from."""
        current = self._pass
        settled: dict[int, Gradients | None] = {}
        for (worker, message_id), answer in follow_routes(recv, routes, gradients).items():
            if worker == current.own:
                settled[message_id] = answer and self._capture(message_id, answer)
            else:
                origin = RecordedRecv(message_id, worker, recv.function, recv.node)
                self._answer(origin, answer or (), worker in current.state.lost, False, recv.peer)
        if settled:
            actions = current.came_back(recv.peer, settled)
            component = current.graph.components[self._action.index]
            if len(component.sends) + component.has_roots == 1:
                self.following += actions
            elif actions:  # with several sources, this run may wait for an action that its own start caused
                self._engine._perform_soon(current, actions)

    def _capture(self, message_id: int, gradients: Gradients) -> Gradients:
        defined = [gradient is not None for gradient in gradients]
        present = [gradient for gradient in gradients if gradient is not None]
        copies = iter(self._pass.capture(message_id, defined, present))
        return [next(copies) if is_defined else None for is_defined in defined]

    def gradients_of(self, message_id: int) -> Gradients:
        return self._pass.gradients_of(message_id)

    def wait_settled(self, message_id: int) -> None:
        """Block the local engine until a send is settled."""
        current = self._pass
        if not current.state.is_settled(message_id):
            began_ns = time.monotonic_ns() if current.trace is not None else 0
            with while_waiting():
                self._engine._wait(current, message_id)
            if current.trace is not None:
                send = current.sends[message_id]
                peer = self._engine._names.get(send.peer) or self._engine.name_of(send.peer)
                current.trace.tell("wait", send.function, began_ns, peer=peer)
        if current.state.is_over:
            raise PassDropped
