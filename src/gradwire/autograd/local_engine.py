"""The only caller of torch's engine: runs a component of a worker's graph, and hooks of leaves at the end of a pass.

A component is run for the gradients of its leaves, which are captured and not accumulated: `.grad` does not change. The
nodes of messages report to the run (`current_context.LocalRun`). A C++ extension would replace this module.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge
from torch.nn.parallel import DistributedDataParallel

from gradwire._interrupts import interruptible
from gradwire._torch import (
    hook_mixin,
    leaf_hooks,
    post_accumulate_hooks,
    run_backward,
    set_uses_device_threads,
    uses_device_threads,
)
from gradwire.autograd import anomaly_mode
from gradwire.autograd.current_context import LocalRun, begin_run, current_run
from gradwire.autograd.functions import ANCHOR, Gradients, make_gates
from gradwire.autograd.messages import PassOptions
from gradwire.errors import AutogradError
from gradwire.params.grads import GradClaim, GradientTable, keep_apart
from gradwire.params.rwlock import UsesParameters, guarded_params
from gradwire.params.snapshots import saving
from gradwire.rpc.connection import while_waiting

Found = list[tuple[torch.Tensor, torch.Tensor]]
"""Leaves, or other requested tensors, with their gradients."""

Edge = torch.Tensor | GradientEdge

_NO_GRADIENT = torch.zeros(())  # for the anchor, which never gets one
_HANDLE_GRADIENT = torch.empty(0)  # what the engine is given for a send's handle; never read


class Sources:
    """The edges that a run of the engine starts from, with a gradient for each."""

    __slots__ = ("edges", "gradients", "of_roots")

    def __init__(self, roots: Sequence[torch.Tensor] = (), gradients: Sequence[torch.Tensor] = ()) -> None:
        self.edges: list[Edge] = list(roots)
        self.gradients = list(gradients)
        self.of_roots = gradients

    def add_settled(self, handle: torch.Tensor, gradients: Gradients) -> None:
        """Start behind the node of a settled send, with the gradients that arrived for it."""
        node: Any = handle.grad_fn
        for number, (following, position) in enumerate(node.next_functions):
            gradient = gradients[number]
            if gradient is not None:
                self.edges.append(GradientEdge(following, position))
                self.gradients.append(gradient)
        # The engine does not count a single root as a node to run, which `register_multi_grad_hook` relies on.
        self.edges.append(ANCHOR)
        self.gradients.append(_NO_GRADIENT)

    def add_gated(self, settled: Sequence[torch.Tensor], waiting: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Start from the nodes of all sends: a recv that none of their gradients reaches must not wait for the gates."""
        handles = [*settled, make_gates(waiting)]
        self.edges += handles
        self.gradients += [_HANDLE_GRADIENT] * len(handles)


def run_component(
    run: LocalRun, sources: Sources, inputs: Sequence[torch.Tensor], options: PassOptions, context: UsesParameters
) -> Found:
    """Run the engine from the sources; return the gradients of the inputs that it reached."""
    keeps_graph = options.retain_graph or options.create_graph
    arguments = tuple(sources.edges), tuple(sources.gradients), keeps_graph, options.create_graph, (*inputs, ANCHOR)
    is_saving = options.create_graph and bool(guarded_params)
    outer = begin_run(run)
    try:
        if options.detects_anomalies or is_saving:
            with contextlib.ExitStack() as stack:
                if options.detects_anomalies:
                    stack.enter_context(anomaly_mode.detecting())
                if is_saving:  # a recorded pass saves what the forward pass saved: aliases of shared parameters
                    stack.enter_context(saving(context))
                results = _run_here(*arguments)
        else:
            results = _run_here(*arguments)
    finally:
        current_run.set(outer)
    found: Found = []
    seen: set[int] = set()
    for gradient in sources.of_roots:  # the user's
        seen.add(gradient.data_ptr())
    for number, leaf in enumerate(inputs):
        gradient = results[number]
        if gradient is not None:
            found.append((leaf, gradient if options.create_graph else keep_apart(gradient, seen)))
    return found


@interruptible  # the engine runs hooks and functions of the user
def _run_here(
    edges: tuple[Edge, ...],
    gradients: tuple[torch.Tensor, ...],
    keeps_graph: bool,
    is_recorded: bool,
    inputs: tuple[torch.Tensor, ...] = (),  # if there are none, gradients are accumulated
) -> Any:
    """Run the engine in this thread alone.

    A node that waits, or a hook, holds up its thread. A thread of a device serves all runs of the process; and while the
    thread that began a run waits at a gate, it cannot run a node of the CPU that a device has made ready.
    """
    before = uses_device_threads()
    try:
        set_uses_device_threads(False)
        return run_backward(
            edges,
            gradients,
            keeps_graph,
            is_recorded,
            inputs,
            allow_unreachable=True,
            accumulate_grad=not inputs,
        )
    finally:
        set_uses_device_threads(before)


_WAIT_S = 60.0
_CYCLE = r"Using backward\(\) with create_graph=True will create a reference cycle"
# Parameters of DistributedDataParallel, by id, and their reducers.
_reduced: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[Any]]] = {}
_static: weakref.WeakSet[Any] = weakref.WeakSet()  # reducers that expect the same graph every time
_has_node_hooks = False  # whether Python has ever registered a hook on any node


def _note_node_hooks() -> None:
    """Note from now on whether any hook is registered on a node; which nodes have one is looked up when needed."""
    register = hook_mixin._register_hook

    @functools.wraps(register)
    def noted(backward_hooks: Any, hook: Any) -> Any:
        global _has_node_hooks
        _has_node_hooks = True
        return register(backward_hooks, hook)

    hook_mixin._register_hook = staticmethod(noted)


def _note_reducers() -> None:
    """Note the parameters of every `DistributedDataParallel` that is created from now on."""
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


def _find_reducers() -> None:  # those that were made before
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
    """Return the reducer that averages the gradient of a leaf with other ranks, if there is one."""
    param, reducer = _reduced.get(id(leaf), (None, None))
    return reducer() if reducer is not None and param is not None and param() is leaf else None


def _find_accumulator(leaf: torch.Tensor) -> GradientEdge | None:
    """Return the edge to the accumulator of a leaf, if it has hooks."""
    is_hooked = bool(post_accumulate_hooks(leaf)) or (bool(_reduced) and _reducer_of(leaf) is not None)
    if not (is_hooked or _has_node_hooks) or leaf.grad_fn is not None or not leaf.requires_grad:
        return None
    with torch.enable_grad():  # not `torch.autograd.graph.get_gradient_edge`: it cannot look at nested tensors
        node, number = torch.ops.aten.alias(leaf).grad_fn.next_functions[0]
    edge = GradientEdge(node, number)
    return edge if is_hooked or _has_hooks(edge.node) else None


def _has_hooks(node: Any) -> bool:
    """Read a node's table of hooks, by adding a hook and removing it again."""
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def run_accumulators(
    table: GradientTable, of_context: GradientTable | None = None, is_recorded: bool = False
) -> dict[torch.Tensor, torch.Tensor | None]:
    """Run hooks with the totals of a pass as ``.grad``, and put their results into the table.

    A hook that sets ``.grad`` to None has consumed the gradient; one that changes or replaces it has changed it.

    Returns:
        Leaves whose gradient in the table includes earlier passes of the context, with the earlier gradient:
        `DistributedDataParallel` averages those, too, because they may have been computed under its ``no_sync``.
    """
    edges: dict[torch.Tensor, GradientEdge] = {}
    for leaf in table:
        if (post_accumulate_hooks(leaf) or _reduced or _has_node_hooks) and (edge := _find_accumulator(leaf)):
            edges[leaf] = edge
    if not edges:
        return {}
    leaves = list(edges)
    reducers = [_reducer_of(leaf) for leaf in leaves]  # kept alive: a reducer that is freed takes its hooks along
    if any(reducer in _static for reducer in reducers):
        # Its first backward reduces at the end of the run that computes the gradients, which has ended by now.
        raise AutogradError(
            "DistributedDataParallel(static_graph=True) is not supported inside a context; pass static_graph=False"
        )
    of_context = of_context or {}
    totals = {leaf: of_context.get(leaf) for leaf, reducer in zip(leaves, reducers, strict=True) if reducer is not None}
    claim = GradClaim(leaves)
    _acquire(claim)
    try:
        before = [leaf.grad for leaf in leaves]
        quiet = [hook for leaf in leaves for hook in _hooks_that_ran(leaf)]
        try:
            for leaf in leaves:
                known = totals.get(leaf)
                leaf.grad = known if known is None else known.detach().clone()
            for hook, leaf in quiet:
                hook.seen = table[leaf]
            if is_recorded:
                _silence_cycle_warning()
            _run_here(tuple(edges.values()), tuple(table[leaf] for leaf in leaves), is_recorded, is_recorded)
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
        else:  # a reducer keeps using the memory that it assigned to .grad
            table[leaf] = gradient if reducer is None else gradient.clone()
    return totals


@functools.cache
def _silence_cycle_warning() -> None:
    """Ignore torch's warning about a cycle through ``.grad``: here the cycle ends when ``.grad`` is restored.

    Called once, not in every pass: each change of the filters makes Python repeat all warnings of the program.
    """
    warnings.filterwarnings("ignore", message=_CYCLE)


def _acquire(claim: GradClaim) -> None:
    if claim.is_nested:
        raise AutogradError(
            "a hook on a leaf tensor started another backward pass that reaches the same leaf; run that pass on a "
            "copy of the leaf"
        )
    if not claim.acquire(blocking=False):
        with while_waiting():
            if not claim.acquire(timeout=_WAIT_S):
                raise AutogradError(
                    f"timed out after {_WAIT_S:g} s waiting for the .grad of a leaf with hooks, which another thread "
                    f"is using"
                )


class _RanBefore:
    """Wraps a hook of a leaf, which ran when the gradient was captured, so that accumulating does not run it again."""

    __slots__ = ("_hook", "seen")

    def __init__(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self._hook = hook
        self.seen: torch.Tensor | None = None  # the gradient being accumulated, in any thread

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return None if gradient is self.seen else self._hook(gradient)


def _hooks_that_ran(leaf: torch.Tensor) -> list[tuple[_RanBefore, torch.Tensor]]:
    hooks = leaf_hooks(leaf) or {}
    for key, hook in list(hooks.items()):
        if not isinstance(hook, _RanBefore):
            hooks[key] = _RanBefore(hook)
    return [(hook, leaf) for hook in hooks.values() if isinstance(hook, _RanBefore)]


_note_node_hooks()
if dist.is_available():
    _note_reducers()
    if dist.is_initialized():  # otherwise there is none
        _find_reducers()
