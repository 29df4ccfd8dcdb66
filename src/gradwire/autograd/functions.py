"""The nodes that stand in the local autograd graph for messages: send, recv, and the gate that waits for a gradient.

    worker A                                        worker B
    tensors --> SendFunction      === message ==>   RecvFunction --> tensors
    (backward: returns what came)  <== gradients =  (backward: sends what it gets)

A send's node has the sent tensors' gradient edges behind it. A recv's node has the received tensors in front of it: they
are ordinary non-leaf tensors, which may be changed in place. Both know only their message's id; what to do in backward is
the business of the run of the engine that has reached them (`LocalRun`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from gradwire._torch import Carried
from gradwire.errors import AutogradError

Gradients = Sequence[torch.Tensor | None]


class LocalRun(Protocol):
    """A run of the local engine, as the nodes see it."""

    def fire(self, context_id: int, message_id: int, gradients: Gradients) -> None:
        """A recv was reached."""

    def gradients_of(self, message_id: int) -> Gradients:
        """What a send hands on: the gradients that came for it."""

    def wait_settled(self, message_id: int) -> None:
        """Blocks until a message for a send has come."""


_current: Carried[LocalRun | None] = Carried("gradwire.autograd.run", None)  # what the engine runs, in all its threads


class _Local(threading.local):
    runs_hooks = (
        False  # not carried: process groups copy what is, and drop it in threads that may be waited for with the GIL
    )


_local = _Local()
ANCHOR = torch.zeros((), requires_grad=True)
"""Every recv leads here: asking the engine for this leaf makes it run the recvs. It never gets a gradient."""
_anchored = ANCHOR.view_as(ANCHOR)  # so that it need not be prepared for every recv anew


class running:
    """Makes a run the one that nodes report to, whichever thread of the engine they run in."""

    def __init__(self, run: LocalRun) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._outer = _current.set(self._run)

    def __exit__(self, *_: object) -> None:
        _current.set(self._outer)


class hooks_running:
    """Surrounds a run of the engine that reaches no messages, but hooks of leaves."""

    def __enter__(self) -> None:
        self._outer, _local.runs_hooks = _local.runs_hooks, True

    def __exit__(self, *_: object) -> None:
        _local.runs_hooks = self._outer


def is_inside_run() -> bool:
    """Whether the local engine runs in this thread: another run inside would mix the work of the two."""
    return _current.get() is not None or _local.runs_hooks


class SendFunction(torch.autograd.Function):
    """Stands for a message that left. Its one output has no elements; it is only a handle on the node."""

    @staticmethod
    def forward(ctx: Any, message_id: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.message_id = message_id
        ctx.materialize_grads = False  # what set_materialize_grads does
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *_run_here("a send").gradients_of(ctx.message_id)


class RecvFunction(torch.autograd.Function):
    """Stands for a message that arrived. Its outputs are the very tensors that came: nothing is copied."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, context_id: int, message_id: int, tensors: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        ctx.context_id = context_id
        ctx.message_id = message_id
        ctx.materialize_grads = False
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None, None]:
        _run_here("a tensor that came from another worker").fire(ctx.context_id, ctx.message_id, gradients)
        return None, None, None, None


class Gate(torch.autograd.Function):
    """Holds a run up until a send is settled; behind it are that send and the gate of the send made before it.

    Gates have the lowest sequence number, so the engine does everything else that is ready before it waits.
    """

    @staticmethod
    def forward(ctx: Any, message_id: int, *behind: torch.Tensor) -> torch.Tensor:
        ctx.message_id = message_id
        ctx.num_behind = len(behind)
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> tuple[None, ...]:
        _run_here("a gate").wait_settled(ctx.message_id)
        nothing: tuple[None, ...] = (None,) * (ctx.num_behind + 1)
        return nothing


class _Hooks:
    """Notes on the node of a recv that hooks were registered there: then it takes the engine to run them.

    Torch registers hooks on a tensor that is no leaf at the tensor's node, through one of these.
    """

    is_watched = False

    def _register_hook_dict(self, tensor: torch.Tensor) -> None:
        self.is_watched = True
        super()._register_hook_dict(tensor)  # type: ignore[misc]

    def register_hook(self, hook: Any) -> Any:
        self.is_watched = True
        return super().register_hook(hook)  # type: ignore[misc]

    def register_prehook(self, hook: Any) -> Any:
        self.is_watched = True
        return super().register_prehook(hook)  # type: ignore[misc]


def _with_hooks(kind: Any) -> Any:
    return type(kind.__name__, (_Hooks, kind), {})


RecvFunction._backward_cls = _with_hooks(RecvFunction._backward_cls)

# Function.apply first looks for functorch's transforms, which take no part here; that doubles its cost.
_apply_send: Any = super(torch.autograd.Function, SendFunction).apply
_apply_recv: Any = super(torch.autograd.Function, RecvFunction).apply
_apply_gate: Any = super(torch.autograd.Function, Gate).apply


def _run_here(what: str) -> LocalRun:
    run = _current.get()
    if run is None:
        raise AutogradError(
            f"local autograd reached {what}: use gradwire.autograd.backward(context_id, [loss]) instead of loss.backward()"
        )
    return run


def make_send(message_id: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Records a send, whatever the grad mode; the result's `grad_fn` is its node."""
    if torch.is_grad_enabled():
        # Apply, which has the GIL, wants a leaf's accumulator; another thread must not be about to make it (rref/values.py).
        held = [item.view_as(item) for item in tensors if item.is_leaf and item.layout is torch.strided]
        output: torch.Tensor = _apply_send(message_id, *tensors)
        del held
        return output
    with torch.enable_grad():
        return make_send(message_id, tensors)


def make_recv(context_id: int, message_id: int, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Records a recv, whatever the grad mode; the tensors (leaves that nobody else holds) become its outputs."""
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return make_recv(context_id, message_id, tensors)
    # No parameters, and no leaves that require grad.
    plain = [tensor.requires_grad_(False) if type(tensor) is torch.Tensor else tensor.detach() for tensor in tensors]
    outputs: tuple[torch.Tensor, ...] = _apply_recv(ANCHOR, context_id, message_id, plain)
    return outputs


def make_gates(sends: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Chains gates for sends (in the order in which they were made); only the last one's is ready at first."""
    with torch.enable_grad():
        chain: list[torch.Tensor] = []
        for message_id, output in sends:
            gate: torch.Tensor = _apply_gate(message_id, *chain, output)
            gate.grad_fn._set_sequence_nr(0)  # type: ignore[union-attr]
            chain = [gate]
    return chain[0]


def _kinds() -> tuple[Any, Any]:
    leaf = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        accumulate: Any = leaf.view_as(leaf).grad_fn
        recv = make_recv(0, 0, [torch.zeros(())])[0].grad_fn
    return type(accumulate.next_functions[0][0]), type(recv)


AccumulateGrad, RecvNode = _kinds()
