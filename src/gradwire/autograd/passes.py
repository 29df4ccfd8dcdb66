"""One backward pass on one worker: what the pure state decides about, and the runs of the local engine.

`BackwardState` decides, `DistEngine` sends and receives; here are the tensors, the gates and the engine between them.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge

from gradwire.autograd import anomalies, guards
from gradwire.autograd._backward_state import Action, BackwardState, ComponentPhase, Mode, RunComponent
from gradwire.autograd._graph import LocalGraph, Target
from gradwire.autograd._termination import PassSnapshot, Termination, WaitingSend
from gradwire.autograd.context import DistAutogradContext, RecordedRecv, RecordedSend
from gradwire.autograd.follow_ups import FollowUp
from gradwire.autograd.functions import ANCHOR, Gradients, make_gates, running
from gradwire.autograd.gradients import GradientTable, add_gradient, keep_apart, run_post_accumulate_hooks
from gradwire.autograd.messages import PassOptions
from gradwire.autograd.roots import Roots
from gradwire.autograd.saving import saving
from gradwire.errors import AutogradError
from gradwire.rpc.incoming import while_waiting

if TYPE_CHECKING:
    from gradwire.autograd.watching import Watch
    from gradwire.rpc.peers import OpenLane

_NO_GRADIENT = torch.zeros(())  # for the anchor, which never gets one
_HANDLE_GRADIENT = torch.empty(0)  # what the engine is given for a send's handle; nobody reads it
_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward


class PassPhase(enum.Enum):
    """Where a pass is on this worker."""

    RUNNING = "running"
    DONE = "done here, not yet everywhere"
    COMMITTING = "done everywhere, and some may know already"
    COMMITTED = "committed"
    ABORTED = "aborted"


class PassDropped(Exception):
    """The pass was aborted while the local engine ran; ends the run quietly."""


_NO_ROOTS = Roots()
_NOTHING = contextlib.nullcontext()


class BackwardPass:
    """One pass on one worker. `join` first; the engine holds `lock` meanwhile.

    Args:
        own: This worker's rank.
        pass_id: Carries the root's rank.
        context: Whose pass it is; its lock is held by the caller.
        options: What the root asked for.
        fire: Called with a recv that was reached, its gradients, and whether the report is all that will follow.
        make_watch: Makes what looks after the pass while somebody waits.
        roots: On the root only.
    """

    def __init__(
        self,
        own: int,
        pass_id: int,
        context: DistAutogradContext,
        options: PassOptions,
        fire: Callable[[BackwardPass, RecordedRecv, Gradients, bool], None],
        make_watch: Callable[[BackwardPass], Watch],
        roots: Roots | None = None,
    ) -> None:
        self._own = own
        self.pass_id = pass_id
        self.context = context
        self.options = options
        self._fire = fire
        self._roots = roots or _NO_ROOTS
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
        self._arrived: dict[int, Gradients] = {}
        self.lane_to_flush: OpenLane | None = None  # the last gradient waits there for the report
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
        return self._roots.joins_context

    @property
    def follow_up(self) -> FollowUp | None:
        """What follows the pass, if that is known here."""
        return self._roots.follow_up

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
        nodes = [tensor.grad_fn for tensor in self._roots.tensors]
        sends = {message_id: send.output.grad_fn for message_id, send in self.sends.items()}
        self.graph = LocalGraph(nodes, sends, self.recvs)
        self._has_leaves = any(self.graph.leaves)
        mode = Mode.FAST if self.options.is_fast else Mode.SMART
        self.state = BackwardState(self._own, mode, self._exchanges, self.graph.components, self.graph.reached_by, lost)
        return self.state.begin(heard)

    def accept(self, message_id: int, sender: int, gradients: Gradients | None) -> bool:
        """Takes what came for a send; False if it is no news. Under `lock`.

        Raises:
            AutogradError: Gradients that cannot be for that send.
        """
        if not self.state.knows_send(message_id, sender):
            if gradients is None:
                return False  # made after this worker joined, so it has no part in the loss
            raise AutogradError(
                f"worker {sender} sent a gradient for message {message_id:#x}, which this worker has not sent to it in this "
                f"context; was this worker restarted?"
            )
        if self.state.is_settled(message_id):
            return False
        if gradients is not None:
            self.sends[message_id].check(gradients)
            self._arrived[message_id] = gradients
        return True

    # -- one run of the local engine ---------------------------------------------------------------------------------

    def run(self, action: RunComponent) -> None:
        """Runs the local engine through a component.

        Raises:
            PassDropped: The pass was aborted meanwhile.
            Exception: Whatever a node or a hook raised.
        """
        direct = self.graph.direct[action.index]
        if direct is not None and self._roots.inputs is None:  # those may be what passes through
            self._take_directly(direct, action)
            return
        component, roots = self.graph.components[action.index], self._roots
        outputs: list[torch.Tensor | GradientEdge] = []
        gradients: list[torch.Tensor] = []
        waiting = [(send, self.sends[send].output) for send in action.sends if not self.state.is_settled(send)]
        if waiting:
            # The nodes of all sends take part: a recv that none of their gradients reaches must not wait for the gates.
            self.graph.make_room_below()
            unsettled = {send for send, _ in waiting}
            outputs += [self.sends[send].output for send in action.sends if send not in unsettled]
            outputs.append(make_gates(waiting))
            gradients += [_HANDLE_GRADIENT] * len(outputs)
        else:
            for send in action.sends:
                self._add_settled(send, outputs, gradients)
        if component.has_roots:
            outputs += roots.tensors
            gradients += roots.gradients
        self._run_engine(outputs, gradients, self._inputs_of(action.index))

    def _add_settled(
        self, send: int, outputs: list[torch.Tensor | GradientEdge], gradients: list[torch.Tensor]
    ) -> None:
        """What came for a send goes straight to where its tensors came from: its node has nothing to do."""
        edges: Any = self.sends[send].output.grad_fn.next_functions  # type: ignore[union-attr]
        for (node, number), gradient in zip(edges, self.gradients_of(send), strict=True):
            if gradient is not None:
                outputs.append(GradientEdge(node, number))
                gradients.append(gradient)
        # A root that is alone does not count as a node that will be run: `register_multi_grad_hook` asks for that.
        outputs.append(ANCHOR)
        gradients.append(_NO_GRADIENT)

    def _take_directly(self, targets: Sequence[Target], action: RunComponent) -> None:
        """What came for a send is the gradient of leaves, and of tensors that came from others and went on untouched."""
        wanted = {id(leaf) for leaf in self._inputs_of(action.index)}
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        passed_on: dict[int, dict[int, torch.Tensor]] = {}
        for target, gradient in zip(targets, self.gradients_of(action.sends[0]), strict=True):
            if gradient is None:
                continue
            if isinstance(target, tuple):
                message_id, number = target
                add_gradient(passed_on.setdefault(message_id, {}), number, gradient, self.options.create_graph)
            elif id(target) in wanted:
                found.append((target, gradient))
        if found:
            self._add(found)
        for message_id, gradients in passed_on.items():
            numbers = range(len(self.recvs[message_id].outputs))
            self.fire(self.context.context_id, message_id, [gradients.get(number) for number in numbers])

    def _add(self, found: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with self.lock:
            for leaf, gradient in found:
                add_gradient(self.gradients, leaf, gradient, self.options.create_graph)

    def _inputs_of(self, index: int) -> list[torch.Tensor]:
        wanted, leaves = self._roots.inputs, self.graph.leaves[index]
        if wanted is not None:
            return self.graph.inputs_in(index, wanted)
        return [] if self.options.skips_leaves else leaves

    def _run_engine(
        self,
        outputs: Sequence[torch.Tensor | GradientEdge],
        gradients: Sequence[torch.Tensor],
        inputs: list[torch.Tensor],
    ) -> None:
        options = self.options
        with running(self), self._surroundings():
            # What torch.autograd.grad calls, without its checks: they take longer than a small graph.
            results = _run_backward(
                tuple(outputs),
                tuple(gradients),
                options.retain_graph or options.create_graph,
                options.create_graph,
                (*inputs, ANCHOR),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        seen = {gradient.data_ptr() for gradient in self._roots.gradients}
        found = [(leaf, gradient) for leaf, gradient in zip(inputs, results, strict=False) if gradient is not None]
        if not options.create_graph:
            found = [(leaf, keep_apart(gradient, seen)) for leaf, gradient in found]
        self._add(found)

    def _surroundings(self) -> contextlib.AbstractContextManager[object]:
        """Anomaly mode; and a recorded pass saves what the forward pass saved: aliases of shared parameters."""
        is_saving = self.options.create_graph and guards.has_any()
        if not (is_saving or self.options.detects_anomalies):
            return _NOTHING
        stack = contextlib.ExitStack()
        stack.enter_context(anomalies.detecting(self.options.detects_anomalies))
        if is_saving:
            stack.enter_context(saving(self.context))
        return stack

    def fire(self, context_id: int, message_id: int, gradients: Gradients) -> None:
        """The engine reached a recv: its gradients go to whoever sent the message."""
        recv = self.recvs.get(message_id)
        if context_id != self.context.context_id or recv is None:
            raise AutogradError(
                f"the loss depends on a tensor that came from another worker in context {context_id}, but this is a pass of "
                f"context {self.context.context_id}; detach it, or do both in one context"
            )
        with self.lock:
            if self.is_over:
                raise PassDropped
            if self.state.has_fired(message_id):
                return
            self.state.recv_fired(message_id)
            # Where there are leaves, their nodes and hooks may take long after this.
            is_last = self.state.is_ending and not self._has_leaves
        self._fire(self, recv, gradients, is_last)

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

    def run_hooks(self) -> None:
        """Everything here is done: hooks see the totals. What they raise fails the pass."""
        if self._roots.joins_context:
            run_post_accumulate_hooks(self.gradients, list(self.gradients))

    def forget(self) -> None:
        """Drops what the pass held; under `lock`."""
        self._arrived.clear()
        self._roots = _NO_ROOTS
        self._watch = self.error = None  # both lead back to the pass
        self.gradients = {}
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
