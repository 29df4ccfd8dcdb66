"""One run of torch's engine through a component of a worker's graph, and what the nodes of messages do in it."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge
from torch.nn.parallel import DistributedDataParallel

from gradwire.autograd import anomaly_mode as anomalies
from gradwire.autograd import current_context as ambient
from gradwire.autograd._backward_state import Action, Route, RunComponent
from gradwire.autograd._graph import Target
from gradwire.autograd.context import RESULT, DistAutogradContext, RecordedRecv
from gradwire.autograd.functions import ANCHOR, Gradients, hooks_running, make_gates, running
from gradwire.autograd.messages import NO_ID, GradientItem
from gradwire.errors import AutogradError
from gradwire.params import rwlock as guards
from gradwire.params.grads import GradClaim
from gradwire.params.saved_tensors import saving
from gradwire.rpc.connection import while_waiting
from gradwire.types import WorkerInfo

if TYPE_CHECKING:
    from gradwire.autograd.backward_pass import BackwardPass


class PassDropped(Exception):
    """The pass was aborted while the local engine ran; ends the run quietly."""


GradientTable = dict[torch.Tensor, torch.Tensor]
K = TypeVar("K")


def keep_apart(gradient: torch.Tensor, seen: set[int]) -> torch.Tensor:
    """A gradient that shares no memory with those seen before, nor with itself, so that it may be changed in place."""
    if gradient.layout is not torch.strided or gradient.is_nested or not gradient.numel():
        return gradient
    address = gradient.data_ptr()
    if address in seen or 0 in gradient.stride():
        return gradient.clone(memory_format=torch.contiguous_format)
    seen.add(address)
    return gradient


def add_gradient(table: dict[K, torch.Tensor], leaf: K, gradient: torch.Tensor, is_recorded: bool = False) -> None:
    """Adds to what a table has for a leaf, out of place: others may hold what was there.

    The sum is recorded or not, whatever the grad mode of the thread that happens to add.
    """
    num_known, known = len(table), table.setdefault(leaf, gradient)
    if len(table) > num_known:
        return
    with torch.set_grad_enabled(is_recorded):
        if known.layout is not torch.strided and gradient.layout is torch.strided:
            table[leaf] = gradient + known  # dense + sparse works, sparse + dense does not
        else:
            table[leaf] = known + gradient


def sum_by_origin(
    targets: Sequence[torch.Tensor | tuple[int, int]],
    gradients: Sequence[torch.Tensor | None],
    is_recorded: bool = False,
) -> dict[int, dict[int, torch.Tensor]]:
    """The gradients of tensors that came in messages, by the message and the tensor's number there; others are left out."""
    found: dict[int, dict[int, torch.Tensor]] = {}
    for target, gradient in zip(targets, gradients, strict=True):
        if gradient is not None and isinstance(target, tuple):
            message_id, number = target
            add_gradient(found.setdefault(message_id, {}), number, gradient, is_recorded)
    return found


Answers = tuple[tuple[GradientItem, ...], list[torch.Tensor]]
"""What goes back for messages, and the gradients beside it."""

_MOST_TENSORS = 1 << 20  # in one message, whatever others say


def pack_answer(
    context: DistAutogradContext,
    recv: RecordedRecv,
    gradients: Gradients,
    recorded_id: int = NO_ID,
    via: int | None = None,
) -> tuple[GradientItem, list[torch.Tensor]]:
    """The gradients of a recv, if any are defined; recorded as a send of their own under that id, if given."""
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return GradientItem(recv.message_id, via=via), present
    if len(present) == len(gradients):
        defined = (True,) * len(present)
    else:
        defined = tuple([gradient is not None for gradient in gradients])
    recorded: tuple[int, ...] = ()
    if recorded_id != NO_ID:
        recorded = tuple(number for number, gradient in enumerate(present) if gradient.requires_grad)
        if recorded:
            chosen = [present[number] for number in recorded]
            context.record_send(recorded_id, recv.peer, f"the gradient of {recv.function}", chosen, RESULT)
        else:
            recorded_id = NO_ID
    item = GradientItem(recv.message_id, defined, recorded_id, recorded, via)
    return item, [gradient.detach() if gradient.requires_grad else gradient for gradient in present]


def follow_routes(
    recv: RecordedRecv, routes: Sequence[Route], gradients: Gradients
) -> dict[tuple[int, int], list[torch.Tensor | None] | None]:
    """The gradients of a recv, by the worker and the message that its tensors came from; None where there are none.

    Raises:
        AutogradError: The routes are not those of that message.
    """
    if len(routes) != len(gradients):
        raise AutogradError(f"worker {recv.peer} offered a shortcut that does not fit message {recv.message_id:#x}")
    sums = sum_by_origin([route[1:3] for route in routes], gradients)
    answers: dict[tuple[int, int], list[torch.Tensor | None] | None] = {}
    for worker, message_id, _, num_tensors in routes:
        found = sums.get(message_id)
        if found and (num_tensors > _MOST_TENSORS or not all(0 <= number < num_tensors for number in found)):
            raise AutogradError(f"worker {recv.peer} offered a shortcut to tensors that cannot be")
        answers[worker, message_id] = [found.get(number) for number in range(num_tensors)] if found else None
    return answers


def unpack_answers(
    context: DistAutogradContext, sender: WorkerInfo, items: tuple[GradientItem, ...], tensors: list[torch.Tensor]
) -> dict[int, Gradients | None]:
    """The answers of a message, each with its own tensors.

    Raises:
        AutogradError: There are not as many as it says.
    """
    answers: dict[int, Gradients | None] = {}
    rest = list(tensors)
    for item in items:
        if item.defined is None:
            answers[item.message_id] = None
            continue
        number = sum(item.defined)
        if number > len(rest):
            raise AutogradError(f"a message of {sender.name} lacks gradients for message {item.message_id:#x}")
        mine, rest = rest[:number], rest[number:]
        if item.recorded_id != NO_ID:
            mine = _record_gradients(context, sender, item, mine)
        following = iter(mine)
        answers[item.message_id] = [next(following) if is_defined else None for is_defined in item.defined]
    if rest:
        raise AutogradError(f"a message of {sender.name} carries {len(rest)} gradients more than it names")
    return answers


def _record_gradients(
    context: DistAutogradContext, sender: WorkerInfo, item: GradientItem, gradients: list[torch.Tensor]
) -> list[torch.Tensor]:
    """With `create_graph`: gradients that arrive are part of the graph, too."""
    if not all(0 <= number < len(gradients) for number in item.recorded) or not item.recorded:
        raise AutogradError(f"a message of {sender.name} names gradients that it does not carry")
    chosen = [gradients[number] for number in item.recorded]
    outputs = context.record_recv(item.recorded_id, sender.id, "gradient", chosen)
    gradients = list(gradients)
    for number, output in zip(item.recorded, outputs, strict=True):
        gradients[number] = output
    return gradients


_NO_GRADIENT = torch.zeros(())  # for the anchor, which never gets one
_HANDLE_GRADIENT = torch.empty(0)  # what the engine is given for a send's handle; nobody reads it
_NOTHING = contextlib.nullcontext()
_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward


class EngineRun:
    """A run, in the thread that makes it.

    Args:
        current: The pass it belongs to.
        action: The component, and the sends that may have a gradient.

    Attributes:
        following: What is to be done when it has ended, apart from that it has ended.
    """

    def __init__(self, current: BackwardPass, action: RunComponent) -> None:
        self._pass = current
        self._index = action.index
        self._sends = action.sends
        self._component = current.graph.components[action.index]
        self.following: list[Action] = []

    def run(self) -> None:
        """
        Raises:
            PassDropped: The pass was aborted meanwhile.
            Exception: Whatever a node or a hook raised.
        """
        current = self._pass
        direct = current.graph.direct[self._index]
        if direct is not None and current.roots.inputs is None:  # those may be what passes through
            self._take_directly(direct)
            return
        outputs: list[torch.Tensor | GradientEdge] = []
        gradients: list[torch.Tensor] = []
        waiting = [(send, current.sends[send].output) for send in self._sends if not current.state.is_settled(send)]
        if waiting:
            # The nodes of all sends take part: a recv that none of their gradients reaches must not wait for the gates.
            current.graph.make_room_below()
            unsettled = {send for send, _ in waiting}
            outputs += [current.sends[send].output for send in self._sends if send not in unsettled]
            outputs.append(make_gates(waiting))
            gradients += [_HANDLE_GRADIENT] * len(outputs)
        else:
            for send in self._sends:
                self._add_settled(send, outputs, gradients)
        if self._component.has_roots:
            outputs += current.roots.tensors
            gradients += current.roots.gradients
        self._run_engine(outputs, gradients, current.inputs_of(self._index))

    def _add_settled(
        self, send: int, outputs: list[torch.Tensor | GradientEdge], gradients: list[torch.Tensor]
    ) -> None:
        """What came for a send goes straight to where its tensors came from: its node has nothing to do."""
        edges: Any = self._pass.sends[send].output.grad_fn.next_functions  # type: ignore[union-attr]
        for (node, number), gradient in zip(edges, self.gradients_of(send), strict=True):
            if gradient is not None:
                outputs.append(GradientEdge(node, number))
                gradients.append(gradient)
        # A root that is alone does not count as a node that will be run: `register_multi_grad_hook` asks for that.
        outputs.append(ANCHOR)
        gradients.append(_NO_GRADIENT)

    def _take_directly(self, targets: Sequence[Target]) -> None:
        """What came for a send is the gradient of leaves, and of tensors that came from others and went on untouched."""
        current = self._pass
        wanted = {id(leaf) for leaf in current.inputs_of(self._index)}
        gradients = self.gradients_of(self._sends[0])
        found = [
            (target, gradient)
            for target, gradient in zip(targets, gradients, strict=True)
            if gradient is not None and not isinstance(target, tuple) and id(target) in wanted
        ]
        if found:
            current.add(found)
        for message_id, sums in sum_by_origin(targets, gradients, current.options.create_graph).items():
            numbers = range(current.recvs[message_id].num_tensors)
            self.fire(current.context.context_id, message_id, [sums.get(number) for number in numbers])

    def _run_engine(
        self,
        outputs: Sequence[torch.Tensor | GradientEdge],
        gradients: Sequence[torch.Tensor],
        inputs: list[torch.Tensor],
    ) -> None:
        current, options = self._pass, self._pass.options
        with running(self), ambient.carried(), self._surroundings():
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
        seen = {gradient.data_ptr() for gradient in current.roots.gradients}
        found = [(leaf, gradient) for leaf, gradient in zip(inputs, results, strict=False) if gradient is not None]
        if not options.create_graph:
            found = [(leaf, keep_apart(gradient, seen)) for leaf, gradient in found]
        current.add(found)

    def _surroundings(self) -> contextlib.AbstractContextManager[object]:
        """Anomaly mode; and a recorded pass saves what the forward pass saved: aliases of shared parameters."""
        options = self._pass.options
        is_saving = options.create_graph and guards.has_any()
        if not (is_saving or options.detects_anomalies):
            return _NOTHING
        stack = contextlib.ExitStack()
        stack.enter_context(anomalies.detecting(options.detects_anomalies))
        if is_saving:
            stack.enter_context(saving(self._pass.context))
        return stack

    # -- for the nodes of messages -----------------------------------------------------------------------------------

    def fire(self, context_id: int, message_id: int, gradients: Gradients) -> None:
        """The engine reached a recv: its gradients go to whoever sent the message."""
        current = self._pass
        recv = current.recvs.get(message_id)
        if context_id != current.context.context_id or recv is None:
            raise AutogradError(
                f"the loss depends on a tensor that came from another worker in context {context_id}, but this is a pass of "
                f"context {current.context.context_id}; detach it, or do both in one context"
            )
        with current.lock:
            if current.is_over:
                raise PassDropped
            if current.state.has_fired(message_id):
                return
            routes = current.state.recv_fired(message_id)
            # Where there are leaves, their nodes and hooks may take long after this.
            is_last = current.state.is_ending and not current.has_leaves
        if routes is not None:
            self._fire_shortly(recv, routes, gradients)
        else:
            current.answer(current, recv, gradients, is_last, None)

    def _fire_shortly(self, recv: RecordedRecv, routes: Sequence[Route], gradients: Gradients) -> None:
        """Somebody has only passed a message on: its gradients go to where its tensors came from."""
        current = self._pass
        settled: dict[int, Gradients | None] = {}
        for (worker, message_id), answer in follow_routes(recv, routes, gradients).items():
            if worker == current.own:  # captured, as on the way to others: two leaves share no memory
                settled[message_id] = answer and [item if item is None else item.clone() for item in answer]
            else:
                origin = RecordedRecv(message_id, worker, recv.function, recv.node)
                current.answer(current, origin, answer or (), False, recv.peer)
        if settled:
            self._settle(recv.peer, settled)

    def _settle(self, via: int, answers: dict[int, Gradients | None]) -> None:
        """Sends of this worker that another one passed back to it."""
        current = self._pass
        with current.lock:
            if current.is_over:
                raise PassDropped
            news = {send: answer is not None for send, answer in answers.items() if current.accept(send, via, answer)}
            actions = current.state.came_back(news)
            current.wake_gates()
        if len(self._component.sends) + self._component.has_roots == 1:
            self.following += actions
        elif actions:  # with several sources, this run may wait for what follows from its own beginning
            current.perform_soon(current, actions)

    def gradients_of(self, message_id: int) -> Gradients:
        """What came for a send; all None if it was settled with nothing."""
        return self._pass.gradients_of(message_id)

    def wait_settled(self, message_id: int) -> None:
        """The local engine stands still until a send is settled."""
        self._pass.wait_settled(message_id)


_WAIT_S = 60.0
_CYCLE = r"Using backward\(\) with create_graph=True will create a reference cycle"
# Parameters of DistributedDataParallel, by id, and what averages them.
_reduced: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[Any]]] = {}
_static: weakref.WeakSet[Any] = weakref.WeakSet()  # reducers that expect the same graph every time
_has_node_hooks = False  # whether Python has ever registered a hook on any node


# -- which leaves have hooks ----------------------------------------------------------------------------------------------


def _note_node_hooks() -> None:
    """Learns from now on that there are hooks on nodes; where they are is looked up when it matters."""
    mixin: Any = torch.autograd.function._HookMixin
    register = mixin._register_hook

    @functools.wraps(register)
    def noted(backward_hooks: Any, hook: Any) -> Any:
        global _has_node_hooks
        _has_node_hooks = True
        return register(backward_hooks, hook)

    mixin._register_hook = staticmethod(noted)


def _note_reducers() -> None:
    """Learns of the parameters of every `DistributedDataParallel` that is made from now on."""
    reducer: Any = dist.Reducer  # type: ignore[attr-defined]
    make, fix_graph = reducer.__init__, reducer._set_static_graph

    @functools.wraps(make)
    def noted(self: Any, params: Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        params = list(params)
        make(self, params, *args, **kwargs)
        _note_reduced(params, self)

    @functools.wraps(fix_graph)
    def noted_static(self: Any) -> None:
        _static.add(self)
        fix_graph(self)

    reducer.__init__, reducer._set_static_graph = noted, noted_static


def _find_reducers() -> None:
    """Learns of those that were made before."""
    for made in gc.get_objects():
        if issubclass(type(made), DistributedDataParallel):
            _note_reduced(made._module_parameters, made.reducer)
            if made.static_graph:
                _static.add(made.reducer)


def _note_reduced(params: Iterable[torch.Tensor], reducer: Any) -> None:
    for param in params:
        key = id(param)
        known = weakref.ref(param, lambda _, key=key: _reduced.pop(key, None))  # type: ignore[misc]
        _reduced[key] = known, weakref.ref(reducer)


def _reducer_of(leaf: torch.Tensor) -> Any:
    """What averages the gradient of a leaf with those of other ranks, if anything does."""
    param, reducer = _reduced.get(id(leaf), (None, None))
    return reducer() if reducer is not None and param is not None and param() is leaf else None


def _find_accumulator(leaf: torch.Tensor) -> GradientEdge | None:
    """The edge to the node of a leaf, if hooks want to see what it does."""
    is_hooked = bool(getattr(leaf, "_post_accumulate_grad_hooks", None)) or _reducer_of(leaf) is not None
    if not (is_hooked or _has_node_hooks) or leaf.grad_fn is not None or not leaf.requires_grad:
        return None
    with torch.enable_grad():  # not `torch.autograd.graph.get_gradient_edge`: it cannot look at nested tensors
        node, number = torch.ops.aten.alias(leaf).grad_fn.next_functions[0]
    edge = GradientEdge(node, number)
    return edge if is_hooked or _has_hooks(edge.node) else None


def _has_hooks(node: Any) -> bool:
    """Asks a node for its table of hooks, by adding one and taking it away again."""
    for register in (node.register_hook, node.register_prehook):
        handle = register(_nothing)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def _nothing(*_: object) -> None:
    """A hook that does nothing."""


# -- running them ---------------------------------------------------------------------------------------------------------


def run_accumulators(
    table: GradientTable, of_context: GradientTable | None = None, is_recorded: bool = False
) -> set[torch.Tensor]:
    """Shows the totals of a pass to hooks, as ``.grad``, and takes what they make of them.

    A hook that sets ``.grad`` to None has consumed the gradient; one that changes or replaces it has changed it.

    Args:
        table: The gradients of leaves; changed in place.
        of_context: What earlier passes have left in the context. `DistributedDataParallel` averages it along, because they
            may have been made with its ``no_sync``.
        is_recorded: Whether the pass is, for gradients of gradients.

    Returns:
        The leaves whose gradient in the table is that of the whole context.

    Raises:
        AutogradError: Another pass has been running hooks of the same leaves for too long, or is doing so further out in
            this thread.
        Exception: What a hook raised; ``.grad`` is as it was.
    """
    edges = {leaf: edge for leaf in table if (edge := _find_accumulator(leaf)) is not None}
    if not edges:
        return set()
    leaves = list(edges)
    reducers = [_reducer_of(leaf) for leaf in leaves]  # held: one that goes meanwhile takes its hooks along
    if any(reducer in _static for reducer in reducers):
        # In its first backward it reduces at the end of the run that computes the gradients, which is over by now.
        raise AutogradError(
            "DistributedDataParallel(static_graph=True) does not work inside of a context; make it without static_graph"
        )
    claim = GradClaim(leaves)
    _acquire(claim)
    try:
        before = [leaf.grad for leaf in leaves]
        quiet = [hook for leaf in leaves for hook in _hooks_that_ran(leaf)]
        try:
            for leaf, reducer in zip(leaves, reducers, strict=True):
                known = of_context.get(leaf) if of_context and reducer is not None else None
                leaf.grad = known if known is None else known.detach().clone()
            for hook, leaf in quiet:
                hook.seen = table[leaf]
            if is_recorded:
                _silence_cycle_warning()
            with hooks_running():
                _run_backward(
                    tuple(edges.values()),
                    tuple(table[leaf] for leaf in leaves),
                    is_recorded,
                    is_recorded,
                    (),
                    allow_unreachable=True,
                    accumulate_grad=True,
                )
            after = [leaf.grad for leaf in leaves]
        finally:
            for hook, _ in quiet:
                hook.seen = None
            for leaf, gradient in zip(leaves, before, strict=True):
                leaf.grad = gradient
    finally:
        claim.release()
    for leaf, gradient, reducer in zip(leaves, after, reducers, strict=True):
        if gradient is None:
            del table[leaf]
        else:  # a reducer goes on using the memory that it has put there
            table[leaf] = gradient if reducer is None else gradient.clone()
    return {leaf for leaf, reducer in zip(leaves, reducers, strict=True) if reducer is not None}


@functools.cache
def _silence_cycle_warning() -> None:
    """Torch warns, once in a process, of a cycle through ``.grad``. Here it ends, when that is put back.

    Not with every pass: each change of the filters makes Python show all warnings of the program once more.
    """
    warnings.filterwarnings("ignore", message=_CYCLE)


def _acquire(claim: GradClaim) -> None:
    if claim.is_nested:
        raise AutogradError(
            "a hook of a leaf runs another pass that reaches the same leaf; use another copy of the leaf"
        )
    if not claim.acquire(blocking=False):
        with while_waiting():
            if not claim.acquire(timeout=_WAIT_S):
                raise AutogradError(f".grad of a leaf with hooks has been in use elsewhere for {_WAIT_S:g} s")


class _RanBefore:
    """A hook on a leaf itself. It ran when the gradient was captured, so not again when that is accumulated."""

    __slots__ = ("_hook", "seen")

    def __init__(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self._hook = hook
        self.seen: torch.Tensor | None = None  # what is accumulated now, in any thread

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return None if gradient is self.seen else self._hook(gradient)


def _hooks_that_ran(leaf: torch.Tensor) -> list[tuple[_RanBefore, torch.Tensor]]:
    hooks = leaf._backward_hooks or {}
    for key, hook in list(hooks.items()):
        if not isinstance(hook, _RanBefore):
            hooks[key] = _RanBefore(hook)
    return [(hook, leaf) for hook in hooks.values() if isinstance(hook, _RanBefore)]


_note_node_hooks()
if dist.is_available():
    _note_reducers()
    if dist.is_initialized():  # else there can be none
        _find_reducers()
