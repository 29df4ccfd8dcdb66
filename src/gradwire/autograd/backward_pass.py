"""One backward pass on one worker: received gradients, computed gradients, and the threads that wait for it.

`BackwardState` decides and `DistEngine` acts. In between, each event of a pass is one method here: it takes the lock,
asks the state, and returns the actions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from gradwire import _interrupts
from gradwire.autograd._backward_state import (
    Abort,
    Action,
    BackwardState,
    Commit,
    ComponentPhase,
    Fail,
    Firing,
    Introduction,
    Mode,
    PassPhase,
    PassSnapshot,
    Report,
    Route,
    WaitingSend,
)
from gradwire.autograd._graph import LocalGraph
from gradwire.autograd.context import RESULT, DistAutogradContext, RecordedRecv
from gradwire.autograd.functions import Gradients
from gradwire.autograd.local_engine import Found, run_accumulators
from gradwire.autograd.messages import NO_ID, AbortPass, GradientItem, PassOptions, PropagateGradients
from gradwire.errors import AutogradError
from gradwire.params.grads import GradientTable, add_gradient
from gradwire.types import COUNTER_BITS, WorkerInfo

if TYPE_CHECKING:
    from gradwire.autograd.pass_events import PassTrace
    from gradwire.autograd.stall_detector import StallDetector

_MOST_TENSORS = 1 << 20  # in one message; peers cannot claim more


class FollowsBackward(Protocol):
    """An optimizer that `backward` can step when it has succeeded."""

    def follow_backward(self, context_id: int) -> None:
        """Step, after a pass of that context was committed."""


@dataclass(frozen=True, slots=True)
class Roots:
    """The tensors that a pass starts from, on the worker that called backward."""

    tensors: tuple[torch.Tensor, ...] = ()
    gradients: tuple[torch.Tensor, ...] = ()  # one for each
    inputs: tuple[torch.Tensor, ...] | None = None  # collect gradients only for these; None for all leaves
    # For `backward`, not for `grad`: gradients join the context, and post-accumulate hooks run.
    joins_context: bool = True


NO_ROOTS = Roots()


def list_roots(roots: Any) -> tuple[Any, ...]:
    """Return the roots, of which there may be one; they are not checked."""
    if isinstance(roots, torch.Tensor):
        return (roots,)
    if not isinstance(roots, Iterable):
        raise TypeError(f"roots must be a tensor or a sequence of tensors, not {type(roots).__name__}")
    return tuple(roots)


def check_roots(roots: Any, gradients: Any, inputs: Any, joins_context: bool = True) -> Roots:
    """Return the roots of a pass, with a gradient for each."""
    tensors = list_roots(roots)
    if not tensors:
        raise AutogradError("No tensors provided for gradient computation.")
    given = (gradients,) if isinstance(gradients, torch.Tensor) else tuple(gradients or (None,) * len(tensors))
    if len(given) != len(tensors):
        raise AutogradError(f"the number of gradients ({len(given)}) is not the number of roots ({len(tensors)})")
    found = []
    for number, tensor in enumerate(tensors):
        gradient = given[number]
        if not isinstance(tensor, torch.Tensor):
            raise AutogradError(f"root {number} is a {type(tensor).__name__}, not a tensor")
        if not tensor.requires_grad:
            raise AutogradError(f"requires_grad not set on root {number} of shape {tuple(tensor.shape)}")
        if gradient is None and tensor.numel() != 1:
            raise AutogradError(
                f"root {number} of shape {tuple(tensor.shape)} is not a scalar, all roots need to be scalar "
                f"unless gradients are given"
            )
        if tensor.grad_fn is None:
            raise AutogradError(
                f"root {number} does not have a valid gradient function: no recorded operation produced it. If it is "
                f"the result of a call, that call was made outside this context: move the call inside the `with` "
                f"block"
            )
        if gradient is None:
            gradient = torch.ones_like(tensor, memory_format=torch.preserve_format)
        elif gradient.shape != tensor.shape:
            raise AutogradError(
                f"the gradient of root {number} has shape {tuple(gradient.shape)}, not {tuple(tensor.shape)}"
            )
        found.append(gradient)
    wanted = None if inputs is None else (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    if wanted is not None and not all(isinstance(item, torch.Tensor) and item.requires_grad for item in wanted):
        raise AutogradError("inputs must be tensors on this worker that require grad")
    return Roots(tensors, tuple(found), wanted, joins_context)


class PassDropped(Exception):
    """Ends work for a pass that was decided meanwhile; not an error."""


class BackwardPass:
    """One running pass on one worker."""

    def __init__(
        self,
        own: int,
        pass_id: int,  # carries the root's rank
        context: DistAutogradContext,  # whose `begin_pass` holds its lock meanwhile
        options: PassOptions,
        roots: Roots = NO_ROOTS,  # on the root only
        lost: Collection[int] = (),
        heard: Collection[int] = (),  # ranks whose message made this worker join; that message is handled next
    ) -> None:
        self.own = own
        self.pass_id = pass_id
        self.root = pass_id >> COUNTER_BITS
        self.context = context
        self.options = options
        self.roots = roots
        self.started = time.monotonic()
        self.deadline = self.started + options.timeout_s
        # The worker whose message started it here, and how many bytes of its budget that uses until the end.
        self.charged: tuple[int, int] | None = None
        self._lock = threading.Lock()  # guards everything below
        self._moved: threading.Condition | None = None  # made by a thread that waits, for its gate or for the end
        self.sends, self.recvs = dict(context.sends), dict(context.recvs)
        self._introduced: set[int] = set()
        self.gradients: GradientTable = {}  # of leaves, as far as they are computed
        # Leaves whose gradient is that of the context, earlier passes included, with what the context had for them.
        self.totals: dict[torch.Tensor, torch.Tensor | None] = {}
        self._arrived: dict[int, Gradients] = {}
        self._num_sent = self._num_received = 0  # messages of the pass, for the stall probe
        self._gates: set[int] = set()  # sends that a run is blocked on at a gate
        self.error: BaseException | None = None  # why it failed, on the root
        self.followers: Collection[int] = ()  # on the root: ranks of the workers that wait to be told of the commit
        self.detector: StallDetector | None = None  # made by a thread that waits
        self.trace: PassTrace | None = None  # tells what happens to it; None if nothing was observed when it began
        nodes, sends = [], {}
        for tensor in roots.tensors:
            nodes.append(tensor.grad_fn)
        for message_id, send in self.sends.items():
            sends[message_id] = send.start
        graph = self.graph = LocalGraph(nodes, sends, self.recvs)
        # `inputs` may be tensors that are passed on; and a recorded pass must record those, too.
        is_asked = roots.inputs is not None or options.create_graph
        self.state = BackwardState(
            own,
            Mode.FAST if options.is_fast else Mode.SMART,
            list(context.exchanges),
            graph.components,
            graph.reached_by,
            lost,
            None if is_asked else graph.untouched,
            self.root,
        )
        self.begun = self.state.begin(heard)  # the first actions; `take` returns them, too

    def __repr__(self) -> str:
        return f"<BackwardPass {self.pass_id:#x} {self.phase.value}: {self.state}>"

    @property
    def phase(self) -> PassPhase:
        return self.state.phase

    @property
    def is_root(self) -> bool:
        return self.root == self.own

    @property
    def is_undecided(self) -> bool:
        """Whether it has finished here, but maybe not everywhere."""
        return self.state.phase is PassPhase.DONE

    # -- messages ------------------------------------------------------------------------------------------------------

    def take(
        self, sender: WorkerInfo, message: PropagateGradients, introduction: Introduction | None, tensors: list[Any]
    ) -> list[Action]:
        """Handle a message of the pass with these gradients; `introduction` has the shortcuts that can be taken."""
        answers = unpack_answers(self.context, sender, message.items, tensors)
        with self._lock:
            if self.state.is_over:
                return []
            actions, self.begun = self.begun, []
            self._num_received += 1
            settled = {}
            for item in message.items:
                gradients = answers[item.message_id]
                if self._accept(item.message_id, sender.id if item.via is None else item.via, gradients):
                    settled[item.message_id] = gradients is not None
            actions += self.state.message_received(sender.id, introduction, settled)
            if self._gates:
                self._wake()
        return actions

    def _accept(self, message_id: int, receiver: int, gradients: Gradients | None) -> bool:
        """Accept the answer for a send to that worker; False if it is not new. Called under the lock."""
        is_awaited = self.state.awaits(message_id, receiver)
        if is_awaited is None and gradients is not None:
            raise AutogradError(
                f"received a gradient for message {message_id:#x}, which this worker did not send to rank {receiver} "
                f"in this context; was this worker restarted?"
            )
        if not is_awaited:  # or it was made after this worker joined, so it has no part in the loss
            return False
        if gradients is not None:
            self.sends[message_id].check(gradients)
            self._arrived[message_id] = gradients
        return True

    def introduce(self, peer: int) -> Introduction | None:
        """Return what the first message to a worker says; None for later ones."""
        with self._lock:
            if self.state.is_over:
                raise PassDropped
            self._num_sent += 1
            if peer in self._introduced:
                return None
            self._introduced.add(peer)
            return self.state.introduction_to(peer)

    def lose_worker(self, rank: int) -> list[Action] | None:
        """Handle the loss of a worker; None if the pass must fail because of it."""
        with self._lock:
            if self.state.is_over:
                return []
            actions = None if self.root == rank else self.state.worker_lost(rank)
            if self.state.termination is not None and rank in self.state.termination.participants:
                actions = None
            self._wake()
        return actions

    # -- runs of the local engine ---------------------------------------------------------------------------------------

    def inputs_of(self, index: int) -> Sequence[torch.Tensor]:
        """Return the tensors whose gradients a run of a component computes."""
        if self.roots.inputs is not None:
            return self.graph.inputs_in(index, self.roots.inputs)
        return () if self.options.skips_leaves else self.graph.leaves[index]

    def gradients_of(self, message_id: int) -> Gradients:
        """Return the gradients of a send; all None if it was settled without any."""
        with self._lock:
            if self.state.is_over:
                raise PassDropped
            found = self._arrived.get(message_id)
        return found if found is not None else self.sends[message_id].no_gradients

    def fire(self, message_id: int) -> Firing | None:
        with self._lock:
            if self.state.is_over:
                raise PassDropped
            return self.state.recv_fired(message_id)

    def capture(self, message_id: int, defined: Sequence[bool], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of gradients for a send, of those tensors that have one; see `RecordedSend.capture`."""
        send = self.sends.get(message_id)  # if it is not one, the gradients are refused later
        return gradients if send is None else send.capture(defined, gradients, self.deadline)

    def came_back(self, via: int, answers: dict[int, Gradients | None]) -> list[Action]:
        """Handle the answers of a recv with a shortcut to sends of this worker, which another worker passed back to it."""
        with self._lock:
            if self.state.is_over:
                raise PassDropped
            settled = {send: answer is not None for send, answer in answers.items() if self._accept(send, via, answer)}
            actions = self.state.came_back(settled)
            self._wake()
        return actions

    def finish(self, index: int, found: Found) -> list[Action]:
        with self._lock:
            if self.state.is_over:
                raise PassDropped
            for leaf, gradient in found:
                num_known = len(self.gradients)
                self.gradients.setdefault(leaf, gradient)  # one hash of a tensor, which is a function in Python
                if len(self.gradients) == num_known:
                    add_gradient(self.gradients, leaf, gradient, self.options.create_graph)
            actions = self.state.component_finished(index)
            if self._gates:  # a message to oneself that has no gradient is settled without one
                self._wake()
        return actions

    def report_early(self) -> Report | None:
        """Return the report that can go to the root with the last answer; None if there is more to do."""
        with self._lock:
            if self.state.is_over:
                raise PassDropped
            return self.state.report_early()

    def run_hooks(self) -> None:
        """Run hooks with the totals, when everything else here is done."""
        if self.roots.joins_context and self.gradients:
            self.totals = run_accumulators(self.gradients, self.context.gradients, self.options.create_graph)
        with self._lock:
            if self.state.is_over:
                raise PassDropped
            self.state.done_here()

    # -- the end -------------------------------------------------------------------------------------------------------

    def report_received(self, worker: int, report: Report) -> list[Action]:
        """Handle a report, on the root. The last report commits the pass at once."""
        with self._lock:
            actions = self.state.report_received(worker, report)
            if actions and type(actions[0]) is Commit:
                try:
                    self._commit()
                    self.followers = actions[0].peers
                except Exception as error:  # out of memory, say; no worker was told yet
                    return [Fail(error=error)]
            return actions

    def participants(self) -> set[int]:
        """Return the ranks of the other workers known to take part, on the root."""
        with self._lock:
            termination = self.state.termination
            return set(termination.participants) - {self.own} if termination is not None else set()

    def commit_received(self) -> bool:
        """Commit the pass, as the root decided: its gradients join the context. False if it was decided before."""
        with self._lock:
            if self.state.is_over:
                return False
            self._commit()
        return True

    def _commit(self) -> None:
        if self.trace is not None:
            self.trace.note_commit()
        self.context.end_pass(self, is_committed=True)  # if that fails, nothing has changed
        if self.trace is not None:
            self.trace.note_committed()
        self.state.commit()
        self._forget()

    def abort(self, error: BaseException, sender: int | None = None, *, is_final: bool = False) -> Abort | None:
        with self._lock:
            abort = self.state.abort(sender, is_final=is_final)
            if abort is not None and abort.ends:
                self.error = error if self.root == self.own else None
                self.context.end_pass(self, is_committed=False)
                self._forget()
        return abort

    def drop(self) -> bool:
        """End the pass because its context ended, if this worker has reported and so need not tell any other."""
        with self._lock:
            if self.is_root or not self.is_undecided:
                return False
            self.state.abort(is_final=True)
            self.context.end_pass(self, is_committed=False)
            self._forget()
        return True

    def may_abort(self, sender: int, message: AbortPass) -> bool:
        with self._lock:
            return self.state.may_abort(sender, message)

    def _forget(self) -> None:
        """Free what the pass holds, but for the root's gradients, which backward returns. Called under the lock."""
        self.detector = None  # it holds the pass: the two would stay until the garbage collector comes
        if self.root != self.own:
            self._arrived.clear()
            self.gradients, self.totals = {}, {}
        self._wake()

    # -- waiting -------------------------------------------------------------------------------------------------------

    def wait(self, send: int | None, seconds: float) -> bool:
        """Wait until a send is settled or the pass is over; False if neither happened in time, and to be called again."""
        with self._lock:
            if not self._may_go_on(send):
                self._moved = self._moved or threading.Condition(self._lock)
                if send is not None:
                    self._gates.add(send)
                _interrupts.wait(self._moved, seconds)
                if not self._may_go_on(send):
                    return False
                if send is not None:
                    self._gates.discard(send)
            return True

    def _may_go_on(self, send: int | None) -> bool:
        return self.state.is_over or (send is not None and self.state.is_settled(send))

    def _wake(self) -> None:
        """Wake the threads that wait for the pass. Called under the lock."""
        if self._moved is not None:
            self._moved.notify_all()

    def snapshot(self, worker: str, name_of: Callable[[int], str]) -> PassSnapshot:
        with self._lock:
            waiting = []
            for message_id in self.state.unsettled:
                send = self.sends[message_id]
                is_gate = message_id in self._gates
                waiting.append(
                    WaitingSend(message_id, worker, name_of(send.peer), send.function, str(send.site), is_gate)
                )
            # A run that has not started yet, or whose gate is open, waits only for its thread.
            num_standing = sum(not self.state.is_settled(gate) for gate in self._gates)
            return PassSnapshot(
                worker,
                not self.state.is_over,
                self.state.has_reported,
                self.state.phases.count(ComponentPhase.RUNNING) - num_standing,
                self._num_sent,
                self._num_received,
                tuple(waiting),
                self.state.peers,
            )


# -- answers: gradients for messages of the forward pass --------------------------------------------------------------------

Answers = tuple[tuple[GradientItem, ...], list[torch.Tensor]]
"""Answers for messages, and the gradients that travel beside them."""


def pack_answer(
    context: DistAutogradContext,
    recv: RecordedRecv,
    gradients: Gradients,
    recorded_id: int = NO_ID,
    via: int | None = None,
) -> Answers:
    """Return the gradients of a recv, if any are defined; recorded as a send of their own under that id, if given."""
    present: list[torch.Tensor] = []
    defined = []
    for gradient in gradients:
        defined.append(gradient is not None)
        if gradient is not None:
            present.append(gradient)
    if not present:
        return (GradientItem(recv.message_id, via=via),), present
    recorded: tuple[int, ...] = ()
    if recorded_id != NO_ID:
        recorded = tuple(number for number, gradient in enumerate(present) if gradient.requires_grad)
        if recorded:
            chosen = [present[number] for number in recorded]
            context.record_send(recorded_id, recv.peer, f"the gradient of {recv.function}", chosen, RESULT)
        else:
            recorded_id = NO_ID
    for number, gradient in enumerate(present):
        if gradient.requires_grad:
            present[number] = gradient.detach()
    return (GradientItem(recv.message_id, tuple(defined), recorded_id, recorded, via),), present


def unpack_answers(
    context: DistAutogradContext, sender: WorkerInfo, items: tuple[GradientItem, ...], tensors: list[torch.Tensor]
) -> dict[int, Gradients | None]:
    """Return the answers of a message, each with its own tensors."""
    answers: dict[int, Gradients | None] = {}
    position = 0
    for item in items:
        if item.defined is None:
            answers[item.message_id] = None
            continue
        mine = tensors[position : position + sum(item.defined)]
        if len(mine) < sum(item.defined):
            raise AutogradError(f"a message from {sender.name} is missing gradients for message {item.message_id:#x}")
        position += len(mine)
        send = context.sends.get(item.message_id)
        if send is not None and send.is_on_device:
            mine = send.place(item.defined, mine)  # before they are recorded: the copy is not part of the graph
        if item.recorded_id != NO_ID:
            mine = _record_gradients(context, sender, item, mine)
        if len(mine) == len(item.defined):
            answers[item.message_id] = mine
        else:
            following = iter(mine)
            answers[item.message_id] = [next(following) if is_defined else None for is_defined in item.defined]
    if position < len(tensors):
        raise AutogradError(
            f"a message from {sender.name} carries {len(tensors) - position} more gradients than it lists"
        )
    return answers


def _record_gradients(
    context: DistAutogradContext, sender: WorkerInfo, item: GradientItem, gradients: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Record gradients that arrive as part of the graph, for `create_graph`."""
    if not all(0 <= number < len(gradients) for number in item.recorded) or not item.recorded:
        raise AutogradError(f"a message from {sender.name} lists gradients that it does not carry")
    chosen = [gradients[number] for number in item.recorded]
    outputs = context.record_recv(item.recorded_id, sender.id, "gradient", chosen)
    gradients = list(gradients)
    for number, output in zip(item.recorded, outputs, strict=True):
        gradients[number] = output
    return gradients


def sum_by_origin(
    targets: Iterable[torch.Tensor | tuple[int, int]], gradients: Gradients, is_recorded: bool = False
) -> dict[int, dict[int, torch.Tensor]]:
    """Return the gradients of received tensors, by the message and the tensor's number in it."""
    found: dict[int, dict[int, torch.Tensor]] = {}
    for target, gradient in zip(targets, gradients, strict=True):
        if gradient is not None and isinstance(target, tuple):
            message_id, number = target
            add_gradient(found.setdefault(message_id, {}), number, gradient, is_recorded)
    return found


def follow_routes(
    recv: RecordedRecv, routes: Sequence[Route], gradients: Gradients
) -> dict[tuple[int, int], list[torch.Tensor | None] | None]:
    """Return the gradients of a recv, by the worker and message that its tensors came from; None where there are none."""
    if len(routes) != len(gradients):
        raise AutogradError(f"rank {recv.peer} offered a shortcut that does not fit message {recv.message_id:#x}")
    sums = sum_by_origin([route[1:3] for route in routes], gradients)
    answers: dict[tuple[int, int], list[torch.Tensor | None] | None] = {}
    for worker, message_id, _, num_tensors in routes:
        found = sums.get(message_id)
        if found and (num_tensors > _MOST_TENSORS or not all(0 <= number < num_tensors for number in found)):
            raise AutogradError(
                f"rank {recv.peer} offered a shortcut to tensors that message {message_id:#x} does not have"
            )
        answers[worker, message_id] = [found.get(number) for number in range(num_tensors)] if found else None
    return answers
