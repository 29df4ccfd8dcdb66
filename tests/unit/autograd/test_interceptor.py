"""Gradients go through subclasses of tensors, or the call says that they cannot: they are never lost silently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from gradwire import autograd, rpc
from gradwire.errors import CannotSend
from gradwire.rpc import Agent

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


class Labelled(torch.Tensor):
    """Adds attributes."""


class Scaled(torch.nn.Parameter):
    """A parameter of another class."""


class Rebuilt(torch.Tensor):
    """Says itself how it is rebuilt, inside the graph."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self.as_subclass(torch.Tensor),)


def _rebuild(plain: torch.Tensor) -> torch.Tensor:
    return plain.as_subclass(Rebuilt)


class CutOff(torch.Tensor):
    """Is rebuilt outside the graph."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild_cut_off, (self.as_subclass(torch.Tensor),)


def _rebuild_cut_off(plain: torch.Tensor) -> torch.Tensor:
    return plain.detach().as_subclass(CutOff).requires_grad_()


def compute(value: torch.Tensor) -> torch.Tensor:
    return value.sin() * value


def compute_nested(value: torch.Tensor) -> torch.Tensor:
    return torch.nested.to_padded_tensor(value * value, 0.0)


def make_two() -> torch.Tensor:
    return TwoTensor(torch.ones(2), torch.ones(2)).requires_grad_()


def make_values() -> torch.Tensor:
    return torch.arange(1.0, 5.0)


def as_kind(values: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
    return kind(values) if kind is Scaled else values.as_subclass(kind).requires_grad_()


@pytest.mark.parametrize("to", ["a", "b"])
@pytest.mark.parametrize("kind", [Labelled, Scaled, Rebuilt])
def test_gradients_are_those_of_one_process(trio: list[Agent], kind: type[torch.Tensor], to: str) -> None:
    local, sent = as_kind(make_values(), kind), as_kind(make_values(), kind)
    compute(compute(local) * 2).sum().backward()
    with autograd.context() as ctx:
        first = rpc.rpc_sync(to, compute, (sent,))
        assert type(first) is type(compute(local))
        autograd.backward(ctx, [rpc.rpc_sync("c", compute, (first * 2,)).sum()])
        found = autograd.get_gradients(ctx)[sent]
    assert local.grad is not None
    assert torch.equal(found.as_subclass(torch.Tensor), local.grad.as_subclass(torch.Tensor))


@pytest.mark.parametrize("kind", [Labelled, Scaled, Rebuilt])
def test_the_grad_mode_of_the_thread_that_waits_does_not_matter(trio: list[Agent], kind: type[torch.Tensor]) -> None:
    sent = as_kind(make_values(), kind)
    with autograd.context() as ctx:
        future = rpc.rpc_async("b", compute, (sent,))
        with torch.no_grad():
            result = future.wait()
        autograd.backward(ctx, [result.sum()])
        assert sent in autograd.get_gradients(ctx)
    with torch.no_grad():
        assert rpc.rpc_sync("b", torch.Tensor.as_subclass, (sent, kind)).requires_grad


def test_gradients_of_nested_tensors_are_those_of_one_process(trio: list[Agent]) -> None:
    def make() -> torch.Tensor:
        parts = [torch.arange(6.0).view(2, 3), torch.ones(1, 3)]
        return torch.nested.nested_tensor(parts, requires_grad=True)

    local, sent = make(), make()
    compute_nested(local).sum().backward()
    with autograd.context() as ctx:
        autograd.backward(ctx, [rpc.rpc_sync("b", compute_nested, (sent,)).sum()])
        found = autograd.get_gradients(ctx)[sent]
    assert local.grad is not None
    for one, other in zip(found.unbind(), local.grad.unbind(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("to", ["a", "b"])
def test_wrappers_that_require_grad_are_refused_inside_a_context(trio: list[Agent], to: str) -> None:
    with autograd.context():
        with pytest.raises(CannotSend, match=rf"argument of .*compute.*TwoTensor that requires grad, .* sent to {to}"):
            rpc.rpc_sync(to, compute, (make_two(),))
        with pytest.raises(CannotSend, match=r"result of .*make_two.*TwoTensor that requires grad"):
            rpc.rpc_sync(to, make_two)
        assert rpc.rpc_sync(to, compute, (make_two().detach(),)).a.shape == (2,)
        with torch.no_grad():
            assert rpc.rpc_sync(to, compute, (make_two(),)).a.shape == (2,)
    made = rpc.rpc_sync(to, make_two)
    assert made.is_leaf
    assert made.requires_grad


def test_a_class_that_is_rebuilt_outside_of_the_graph_is_refused(trio: list[Agent]) -> None:
    value = make_values().as_subclass(CutOff).requires_grad_()
    with autograd.context(), pytest.raises(CannotSend, match=r"gradients cannot flow through a .*CutOff"):
        rpc.rpc_sync("b", compute, (value,))
    assert rpc.rpc_sync("b", compute, (value,)).shape == (4,)
