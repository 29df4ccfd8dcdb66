"""What a person would write without distributed autograd: a plain call for each forward, and one for each backward.

It shows what the same gradients cost over plain calls of gradwire, and does no more than the cases ask of it: one server,
one tensor as the result of a call, nothing unused, nobody dies.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from models import FACTOR, LEARNING_RATE, affine, apply_model, model

FUNCTIONS: dict[str, Callable[..., Tensor]] = {"mm": torch.mm, "affine": affine, "apply_model": apply_model}
_kept: dict[int, tuple[tuple[Any, ...], Tensor]] = {}  # on the server: arguments and outputs, until their backward
_numbers = itertools.count()


def run_forward(number: int, name: str, *args: Any) -> Tensor:
    """Called on the server: computes, and keeps the graph."""
    output = FUNCTIONS[name](*args)
    _kept[number] = args, output
    return output.detach()


def run_backward(number: int, gradient: Tensor) -> list[Tensor | None]:
    """Called on the server: the gradients of what it got; those of parameters stay there."""
    args, output = _kept.pop(number)
    torch.autograd.backward(output, gradient)
    return [arg.grad if isinstance(arg, Tensor) else None for arg in args]


@functools.cache
def _optimizer(name: str) -> torch.optim.Optimizer:
    return torch.optim.SGD(model(name).parameters(), lr=LEARNING_RATE)


def run_step(name: str) -> None:
    """Called on the server: the optimizer of a model that lives there."""
    _optimizer(name).step()
    _optimizer(name).zero_grad()


class _RemoteCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rpc: Any, to: str, name: str, *args: Any) -> Tensor:
        ctx.rpc, ctx.to, ctx.number = rpc, to, next(_numbers)
        return rpc.rpc_sync(to, run_forward, args=(ctx.number, name, *args))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, *ctx.rpc.rpc_sync(ctx.to, run_backward, args=(ctx.number, *gradients))


class ByHand:
    """The few names of `rpc` and `autograd` that the cases use."""

    def __init__(self, rpc: Any) -> None:
        self._rpc = rpc

    def rpc_sync(self, to: str, function: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
        return _RemoteCall.apply(self._rpc, to, function.__name__, *args)

    @contextlib.contextmanager
    def context(self) -> Iterator[int]:
        FACTOR.grad = None  # a new context has no gradients either
        yield 0

    def backward(self, _context_id: int, roots: list[Tensor]) -> None:
        torch.autograd.backward(roots)

    def make_optimizer(self, name: str) -> Any:
        return _Optimizer(self._rpc, name)

    def get_gradients(self, _context_id: int) -> Any:
        return _Gradients()

    def shutdown(self) -> None:
        self._rpc.shutdown()


class _Gradients:
    def __getitem__(self, tensor: Tensor) -> Tensor | None:
        return tensor.grad


class _Optimizer:
    def __init__(self, rpc: Any, name: str) -> None:
        self._rpc, self._name = rpc, name

    def step(self, _context_id: int) -> None:
        self._rpc.rpc_sync("server", run_step, args=(self._name,))
