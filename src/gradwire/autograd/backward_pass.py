"""One backward pass on one worker: what came for it, what it has found, and who waits.

`BackwardState` decides, `DistEngine` sends and receives, `EngineRun` computes; here is what they share.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from gradwire.autograd._backward_state import (
    Action,
    BackwardState,
    ComponentPhase,
    Mode,
    PassSnapshot,
    Termination,
    WaitingSend,
)
from gradwire.autograd._graph import LocalGraph
from gradwire.autograd.context import DistAutogradContext, RecordedRecv, RecordedSend
from gradwire.autograd.functions import Gradients
from gradwire.autograd.local_engine import Answers, GradientTable, PassDropped, add_gradient, run_accumulators
from gradwire.autograd.messages import AbortPass, CommitPass, PassOptions
from gradwire.errors import AutogradError
from gradwire.rpc.connection import while_waiting

if TYPE_CHECKING:
    from gradwire.autograd.stall_detector import Watch


class FollowUp(Protocol):
    """What one pass is followed by."""

    @property
    def ranks(self) -> frozenset[int]:
        """Workers that it is going to tell something: they hear of the commit from it."""

    def run(self, commit: CommitPass, ranks: Set[int]) -> None:
        """The pass is committed: does what follows, and tells those workers of the commit.

        If it raises, they are told of it once more; what has joined a context stays there.
        """


class FollowsBackward(Protocol):
    """What `backward` can be given to go on with: an optimizer."""

    def follow_backward(self, context_id: int) -> FollowUp:
        """What is to follow a pass in that context."""


@dataclass(frozen=True, slots=True)
class Roots:
    """Where a pass begins, on the worker that called backward.

    Attributes:
        tensors: The roots.
        gradients: One for each.
        inputs: Collect gradients only for these; None for all leaves.
        joins_context: Whether gradients join the context, and post-accumulate hooks run: for `backward`, not for `grad`.
        follow_up: What is done as soon as the pass is committed.
    """

    tensors: tuple[torch.Tensor, ...] = ()
    gradients: tuple[torch.Tensor, ...] = ()
    inputs: tuple[torch.Tensor, ...] | None = None
    joins_context: bool = True
    follow_up: FollowUp | None = None


def check_roots(roots: Any, gradients: Any, inputs: Any, *, joins_context: bool = True) -> Roots:
    """The roots of a pass, with a gradient for each.

    Raises:
        AutogradError: A root cannot be one; says why.
    """
    tensors = (roots,) if isinstance(roots, torch.Tensor) else tuple(roots)
    if not tensors:
        raise AutogradError("No tensors provided for gradient computation.")
    given = (gradients,) if isinstance(gradients, torch.Tensor) else tuple(gradients or (None,) * len(tensors))
    if len(given) != len(tensors):
        raise AutogradError(f"{len(given)} gradients were given for {len(tensors)} roots")
    found = []
    for number, (tensor, gradient) in enumerate(zip(tensors, given, strict=True)):
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
            raise AutogradError(f"root {number} does not have a valid gradient function: it is a leaf")
        if gradient is None:
            gradient = torch.ones_like(tensor, memory_format=torch.preserve_format)
        elif gradient.shape != tensor.shape:
            raise AutogradError(
                f"the gradient of root {number} has shape {tuple(gradient.shape)}, not {tuple(tensor.shape)}"
            )
        found.append(gradient)
    wanted = None if inputs is None else (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    if wanted is not None and not all(isinstance(item, torch.Tensor) and item.requires_grad for item in wanted):
        raise AutogradError("inputs must be tensors that require grad, on the worker that calls backward")
    return Roots(tensors, tuple(found), wanted, joins_context)


class PassPhase(enum.Enum):
    """Where a pass is on this worker."""

    RUNNING = "running"
    DONE = "done here, not yet everywhere"
    COMMITTING = "done everywhere, and some may know already"
    COMMITTED = "committed"
    ABORTED = "aborted"


_NO_ROOTS = Roots()


class BackwardPass:
    """One pass on one worker. `join` first; the engine holds `lock` meanwhile.

    Args:
        own: This worker's rank.
        pass_id: Carries the root's rank.
        context: Whose pass it is; its lock is held by the caller.
        options: What the root asked for.
        answer: Called with a recv that was reached, its gradients, whether the report is all that will follow, and via whom
            its tensors came, if it is another worker's.
        perform_soon: Called with what follows in the middle of a run that may wait for it.
        make_watch: Makes what looks after the pass while somebody waits.
        roots: On the root only.
    """

    def __init__(
        self,
        own: int,
        pass_id: int,
        context: DistAutogradContext,
        options: PassOptions,
        answer: Callable[[BackwardPass, RecordedRecv, Gradients, bool, int | None], None],
        perform_soon: Callable[[BackwardPass, Sequence[Action]], None],
        make_watch: Callable[[BackwardPass], Watch],
        roots: Roots | None = None,
    ) -> None:
        self.own = own
        self.pass_id = pass_id
        self.context = context
        self.options = options
        self.answer = answer
        self.perform_soon = perform_soon
        self.roots = roots or _NO_ROOTS
        self.lock = threading.Lock()  # guards everything below
        self._moved: threading.Condition | None = None  # made by who waits, for its gate or for the end
        self.phase = PassPhase.RUNNING
        self.is_over = False
        self.deadline = time.monotonic() + options.timeout_s
        self.sends: dict[int, RecordedSend] = dict(context.sends)
        self.recvs: dict[int, RecordedRecv] = dict(context.recvs)
        self._exchanges = list(context.exchanges)
        self.introduced: set[int] = set()
        self.last_peer: int | None = None  # whom the last message went to; the next may well come from there
        self.gradients: GradientTable = {}
        self.totals: set[torch.Tensor] = set()  # leaves whose gradient is that of the context, earlier passes included
        self._arrived: dict[int, Gradients] = {}
        self.last_answer: Answers | None = None  # waits for the report, to travel with it
        self.early: dict[int, AbortPass] = {}  # on the root: what workers say that nobody has named yet
        self.on_over: Callable[[], None] = lambda: None
        self.num_sent = self.num_received = 0  # messages of the pass, for the stall probe
        self.gates: set[int] = set()  # sends that a run stands still for
        self.termination = Termination(own) if roots is not None else None
        self.error: BaseException | None = None
        self.graph: LocalGraph
        self.state: BackwardState
        self._make_watch = make_watch
        self._watch: Watch | None = None  # made when somebody waits

    def __repr__(self) -> str:
        return f"<BackwardPass {self.pass_id:#x} {self.phase.value}: {getattr(self, 'state', 'not joined')}>"

    @property
    def is_root(self) -> bool:
        """Whether backward was called here."""
        return self.termination is not None

    @property
    def joins_context(self) -> bool:
        """Whether its gradients join the context."""
        return self.roots.joins_context

    @property
    def follow_up(self) -> FollowUp | None:
        """What follows the pass, if that is known here."""
        return self.roots.follow_up

    @property
    def is_open(self) -> bool:
        """Whether it may still fail."""
        return self.phase in (PassPhase.RUNNING, PassPhase.DONE)

    @property
    def is_undecided(self) -> bool:
        """Whether it is done here, but maybe not everywhere."""
        return self.phase in (PassPhase.DONE, PassPhase.COMMITTING)

    @property
    def is_joined(self) -> bool:
        """Whether `join` was called."""
        return hasattr(self, "state")

    def join(self, heard: Collection[int], lost: Collection[int]) -> list[Action]:
        """Walks the local graph and begins; under `lock`."""
        nodes = [tensor.grad_fn for tensor in self.roots.tensors]
        sends = {message_id: send.output.grad_fn for message_id, send in self.sends.items()}
        self.graph = LocalGraph(nodes, sends, self.recvs)
        self.has_leaves = any(self.graph.leaves)
        mode = Mode.FAST if self.options.is_fast else Mode.SMART
        # What is asked for may be what passes through; and a recorded pass records what passes through.
        is_asked = self.roots.inputs is not None or self.options.create_graph
        untouched = None if is_asked else self.graph.untouched
        graph, exchanges = self.graph, self._exchanges
        self.state = BackwardState(self.own, mode, exchanges, graph.components, graph.reached_by, lost, untouched)
        return self.state.begin(heard)

    def accept(self, message_id: int, receiver: int, gradients: Gradients | None) -> bool:
        """Takes what came for a send to that worker; False if it is no news. Under `lock`.

        Raises:
            AutogradError: Gradients that cannot be for that send.
        """
        if not self.state.knows_send(message_id, receiver):
            if gradients is None:
                return False  # made after this worker joined, so it has no part in the loss
            raise AutogradError(
                f"a gradient came for message {message_id:#x}, which this worker has not sent to worker {receiver} in this "
                f"context; was this worker restarted?"
            )
        if self.state.is_settled(message_id):
            return False
        if gradients is not None:
            self.sends[message_id].check(gradients)
            self._arrived[message_id] = gradients
        return True

    # -- for runs of the local engine -----------------------------------------------------------------------------------

    def add(self, found: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Adds to the gradients of leaves."""
        with self.lock:
            for leaf, gradient in found:
                add_gradient(self.gradients, leaf, gradient, self.options.create_graph)

    def inputs_of(self, index: int) -> list[torch.Tensor]:
        """What a run of a component shall give gradients of."""
        wanted, leaves = self.roots.inputs, self.graph.leaves[index]
        if wanted is not None:
            return self.graph.inputs_in(index, wanted)
        return [] if self.options.skips_leaves else leaves

    def take_last_answer(self) -> Answers | None:
        """What waits for the report, once."""
        with self.lock:
            answer, self.last_answer = self.last_answer, None
        return answer

    def gradients_of(self, message_id: int) -> Gradients:
        """What came for a send; all None if it was settled with nothing."""
        with self.lock:
            if self.is_over:
                raise PassDropped
            found = self._arrived.get(message_id)
        return found if found is not None else self.sends[message_id].no_gradients

    def wait_settled(self, message_id: int) -> None:
        """The local engine stands still until a send is settled."""
        with self.lock:
            if not self.is_over and self.state.is_settled(message_id):
                return
            self.gates.add(message_id)
        try:
            if not self._wait_until(lambda: self.state.is_settled(message_id)):
                raise PassDropped
        finally:
            with self.lock:
                self.gates.discard(message_id)

    def wake_gates(self) -> None:
        """Something was settled; under `lock`. Nobody is woken for nothing: that costs more than a small run."""
        if self.gates:
            self.wake()

    def wake(self) -> None:
        """Something happened that threads here wait for; under `lock`."""
        if self._moved is not None:
            self._moved.notify_all()

    def wait_over(self) -> None:
        """Blocks until the pass is decided."""
        self._wait_until(lambda: False)

    def _wait_until(self, is_true: Callable[[], bool]) -> bool:
        """Blocks, and looks after the pass meanwhile; False if the pass is over. The condition is asked under `lock`."""
        with while_waiting():
            while True:
                with self.lock:
                    watch = self._watch = self._watch or self._make_watch(self)
                while not (self.is_over or is_true()) and watch.help(lambda: self.is_over or is_true()):
                    pass
                with self.lock:
                    if not self.is_over and not is_true():
                        self._moved = self._moved or threading.Condition(self.lock)
                        self._moved.wait(watch.pause_s())
                    if self.is_over:
                        self._watch = None  # it holds the pass: the two would stay until the garbage collector comes
                        return False
                    if is_true():
                        return True
                watch.look()

    # -- end -----------------------------------------------------------------------------------------------------

    def followers(self) -> set[int]:
        """On the root: those who wait for its word, whether or not anybody has named them; under `lock`."""
        if self.termination is None:
            return set()
        return {*self.termination.participants, *self.early} - {self.own}

    def run_hooks(self) -> None:
        """Everything here is done: hooks see the totals. What they raise fails the pass."""
        if self.roots.joins_context:
            self.totals = run_accumulators(self.gradients, self.context.gradients, self.options.create_graph)

    def forget(self) -> None:
        """Drops what the pass held; under `lock`."""
        self._arrived.clear()
        self.last_answer = None
        self.roots = _NO_ROOTS
        self._watch = self.error = None  # both lead back to the pass
        self.gradients, self.totals = {}, set()
        if self.is_joined:
            del self.graph

    # -- what it waits for --------------------------------------------------------------------------------------------

    @property
    def _num_running(self) -> int:
        """Runs that do not stand still; one that has not begun yet, or whose gate is open, waits only for its thread."""
        num_standing = sum(not self.state.is_settled(gate) for gate in self.gates)
        return self.state.phases.count(ComponentPhase.RUNNING) - num_standing

    def snapshot(self, worker: str, name_of: Callable[[int], str]) -> PassSnapshot:
        """The answer to the stall probe."""
        with self.lock:
            if not self.is_joined:
                return PassSnapshot(worker)
            waiting = []
            for message_id in self.state.unsettled:
                send = self.sends[message_id]
                is_gate = message_id in self.gates
                waiting.append(
                    WaitingSend(message_id, worker, name_of(send.peer), send.function, str(send.site), is_gate)
                )
            return PassSnapshot(
                worker,
                not self.is_over,
                self.state.has_reported,
                self._num_running,
                self.num_sent,
                self.num_received,
                tuple(waiting),
                self.state.peers,
            )
