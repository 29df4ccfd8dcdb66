"""The nodes that stand in the local autograd graph for messages: send, recv, and the gate that waits for a gradient.

    worker A                                        worker B
    tensors --> SendFunction      === message ==>   RecvFunction --> tensors
    (backward: returns them)       <== gradients =  (backward: sends them)

A send's node has the sent tensors' gradient edges behind it. A recv's node has the received tensors in front of it: they
are ordinary non-leaf tensors, which may be changed in place. Both know only their message's id; what to do in backward is
decided by the run of the engine that has reached them (`current_context.LocalRun`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from gradwire._torch import (
    backward_class,
    function_apply,
    local_backward_code,
    set_backward_class,
    set_sequence_number,
)
from gradwire.autograd.current_context import current_run
from gradwire.errors import AutogradError

Gradients = Sequence[torch.Tensor | None]


ANCHOR = torch.zeros((), requires_grad=True)
"""Every recv leads to this leaf: asking the engine for it makes it run the recvs. It never gets a gradient."""
_anchored = ANCHOR.view_as(ANCHOR)  # so that it need not be prepared again for every recv


class SendFunction(torch.autograd.Function):
    """Stands for a sent message. Its one output has no elements; it is only a handle on the node."""

    @staticmethod
    def forward(ctx: Any, message_id: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.message_id = message_id
        ctx.materialize_grads = False  # the same as set_materialize_grads
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        run = current_run.get()
        if run is None:
            raise _outside("a send")
        return None, *run.gradients_of(ctx.message_id)


class RecvFunction(torch.autograd.Function):
    """Stands for a received message. Its outputs are the received tensors themselves: nothing is copied."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, context_id: int, message_id: int, tensors: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        ctx.context_id = context_id
        ctx.message_id = message_id
        ctx.materialize_grads = False
        return tuple(tensors)


class Gate(torch.autograd.Function):
    """Blocks a run until a send is settled; behind it are that send and the gate of the send made before it.

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
        run = current_run.get()
        if run is None:
            raise _outside("a gate")
        run.wait_settled(ctx.message_id)
        nothing: tuple[None, ...] = (None,) * (ctx.num_behind + 1)
        return nothing


class _RecvNode:
    """The backward of a recv, which also notes whether hooks were registered on it: only the engine can run those.

    Torch registers hooks of a non-leaf tensor on the tensor's node, through one of the methods here.
    """

    is_watched = False
    context_id: int
    message_id: int

    def apply(self, *gradients: torch.Tensor | None) -> tuple[None, None, None, None]:
        run = current_run.get()
        caller = sys._getframe().f_back  # None in a thread that torch starts where runs are nested too deeply
        if run is None or (caller is not None and caller.f_code is local_backward_code):
            # The second in a hook of a run: it is not the run that got here.
            raise _outside("a tensor received from another worker")
        run.fire(self.context_id, self.message_id, gradients)
        return None, None, None, None

    def _register_hook_dict(self, tensor: torch.Tensor) -> None:
        self.is_watched = True
        super()._register_hook_dict(tensor)  # type: ignore[misc]

    def register_hook(self, hook: Any) -> Any:
        self.is_watched = True
        return super().register_hook(hook)  # type: ignore[misc]

    def register_prehook(self, hook: Any) -> Any:
        self.is_watched = True
        return super().register_prehook(hook)  # type: ignore[misc]


_node_class: Any = backward_class(RecvFunction)
set_backward_class(RecvFunction, type(_node_class.__name__, (_RecvNode, _node_class), {}))

_apply_send, _apply_recv, _apply_gate = (function_apply(kind) for kind in (SendFunction, RecvFunction, Gate))


def _outside(what: str) -> AutogradError:
    return AutogradError(
        f"local autograd reached {what}: use gradwire.autograd.backward(context_id, [loss]) instead of loss.backward()"
    )


def make_send(message_id: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Record a send, whatever the grad mode; the result's `grad_fn` is its node."""
    if torch.is_grad_enabled():
        held = []
        for item in tensors:
            if item.is_leaf and item.layout is torch.strided:
                # apply() needs a leaf's accumulator and holds the GIL; no other thread may be creating it
                # (rref/values.py).
                held.append(item.view_as(item))
        output: torch.Tensor = _apply_send(message_id, *tensors)
        del held
        return output
    with torch.enable_grad():
        return make_send(message_id, tensors)


def make_recv(context_id: int, message_id: int, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Record a recv, whatever the grad mode; the tensors (leaves that only the message holds) become its outputs."""
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return make_recv(context_id, message_id, tensors)
    plain = []
    for tensor in tensors:  # no parameters, and no leaves that require grad
        plain.append(tensor.requires_grad_(False) if type(tensor) is torch.Tensor else tensor.detach())
    outputs: tuple[torch.Tensor, ...] = _apply_recv(ANCHOR, context_id, message_id, plain)
    return outputs


def make_gates(sends: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Chain gates for sends (in the order in which they were made); only the last gate is ready at first."""
    with torch.enable_grad():
        chain: list[torch.Tensor] = []
        for message_id, output in sends:
            gate: torch.Tensor = _apply_gate(message_id, *chain, output)
            set_sequence_number(gate.grad_fn, 0)
            chain = [gate]
    return chain[0]


def _kinds() -> tuple[Any, Any]:
    leaf = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        accumulate: Any = leaf.view_as(leaf).grad_fn
        recv = make_recv(0, 0, [torch.zeros(())])[0].grad_fn
    return type(accumulate.next_functions[0][0]), type(recv)


AccumulateGrad, RecvNode = _kinds()
