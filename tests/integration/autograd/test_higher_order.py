"""Gradients of gradients, on real workers, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradwire as gw
from autograd import worlds
from autograd.graphs import FIRST, SECOND
from gradwire.cluster.api import Cluster

Tensor = torch.Tensor


def _input(name: str, *shape: int) -> Tensor:
    return worlds.make_values(name, *shape).requires_grad_()


def _cubic(x: Tensor, key: str = "cubic") -> Tensor:
    return (x * worlds.weight(key)) ** 3 + torch.sin(x)


def _deep_loss(x: Tensor) -> Tensor:
    hidden = worlds.call(FIRST, _cubic, x)
    hidden = hidden * x + worlds.call(SECOND, _cubic_elsewhere, hidden)
    worlds.call(FIRST, _cubic, hidden)
    return hidden.sin().sum()


def _cubic_elsewhere(x: Tensor) -> Tensor:
    return worlds.call(FIRST, _cubic, torch.tanh(x)) * worlds.weight("factor")


Grad = Callable[[Tensor, Tensor], Tensor]


def _derivative(order: int, x: Tensor, grad: Grad) -> Tensor:
    value = _deep_loss(x)
    for _ in range(order):
        value = grad(value, x).square().sum()
    return value


@pytest.mark.parametrize("order", [1, 2])
def test_second_and_third_order(cluster: Cluster, order: int) -> None:
    x, local = _input("x", 3), _input("x", 3)
    with worlds.OneProcess("driver") as world:
        _derivative(order, local, lambda y, x: torch.autograd.grad(y, x, create_graph=True)[0]).backward()
    with gw.autograd.context() as ctx:

        def grad(value: Tensor, x: Tensor) -> Tensor:
            (found,) = gw.autograd.grad(ctx, value, x, create_graph=True)
            assert found is not None
            return found

        ctx.backward(_derivative(order, x, grad))
        found = {"x": ctx.gradients()[x], **worlds.gather_gradients(ctx)}
    assert worlds.difference(found, {"x": local.grad, **world.gradients()}) == ""


def test_backward_with_create_graph_gives_gradients_to_differentiate(cluster: Cluster) -> None:
    x, local = _input("x", 3), _input("x", 3)
    with worlds.OneProcess("driver"):
        (first,) = torch.autograd.grad(_deep_loss(local), local, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), local)
    with gw.autograd.context() as ctx:
        ctx.backward(_deep_loss(x), create_graph=True)
        total = ctx.gradients()[x]
        assert torch.allclose(total, first, rtol=1e-9)
        assert torch.allclose(gw.autograd.grad(ctx, total.sum(), x)[0], second, rtol=1e-9)


def _remote_value(x: Tensor) -> Tensor:
    return worlds.call(SECOND, _cubic, worlds.call(FIRST, _cubic, x) + x)


class _RemoteCubic(torch.autograd.Function):
    """An ordinary function whose value and gradient are computed by workers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        with gw.autograd.context():
            return _remote_value(x).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _RemoteCubicBackward.apply(*ctx.saved_tensors, gradient)


class _RemoteCubicBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(x, gradient)
        with gw.autograd.context() as context, torch.enable_grad():
            x = x.detach().requires_grad_()
            return gw.autograd.grad(context, _remote_value(x), x, gradient)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, second: Tensor) -> tuple[Tensor, Tensor]:
        x, gradient = (item.detach().requires_grad_() for item in ctx.saved_tensors)
        with gw.autograd.context() as context, torch.enable_grad():
            (first,) = gw.autograd.grad(context, _remote_value(x), x, gradient, create_graph=True)
            return gw.autograd.grad(context, first, [x, gradient], second)


def test_gradcheck_and_gradgradcheck(cluster: Cluster) -> None:
    x = _input("x", 3)
    assert torch.autograd.gradcheck(_RemoteCubic.apply, (x,))
    assert torch.autograd.gradgradcheck(_RemoteCubic.apply, (x,))
