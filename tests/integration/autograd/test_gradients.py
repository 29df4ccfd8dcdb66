"""Kinds of gradients, hooks and `grad`, on real workers, against one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import gradwire as gw
from autograd import graphs, worlds
from autograd.graphs import FIRST, SECOND
from gradwire.cluster.api import Cluster
from gradwire.errors import AutogradError

Tensor = torch.Tensor


def _input(name: str, *shape: int) -> Tensor:
    return worlds.make_values(name, *shape).requires_grad_()


# -- sparse and complex ----------------------------------------------------------------------------------------------------


def _embed(rows: Tensor) -> Tensor:
    """The gradient of the table is sparse."""
    return torch.nn.functional.embedding(rows, worlds.weight("table", 10, 3), sparse=True)


def _embedding_loss(rows: Tensor) -> Tensor:
    once = worlds.call(FIRST, _embed, rows)
    again = worlds.call(FIRST, _embed, rows[:2])
    own = torch.nn.functional.embedding(rows, worlds.weight("table", 10, 3), sparse=True)
    return (once * own).sum() + again.sin().sum()


def test_sparse_gradients_stay_sparse_and_add_up(cluster: Cluster) -> None:
    rows = torch.tensor([1, 4, 4, 7])
    with worlds.OneProcess("driver") as world:
        _embedding_loss(rows).backward()
    with gw.autograd.context() as ctx:
        ctx.backward(_embedding_loss(rows))
        found = worlds.gather_gradients(ctx)
    assert set(found) == {"driver/table", f"{FIRST}/table"}
    assert all(gradient.is_sparse for gradient in found.values())
    assert worlds.difference(found, world.gradients()) == ""


class _SparseGradient(torch.autograd.Function):
    """Its gradient is sparse, for a tensor that is not a leaf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return (gradient * torch.tensor([1.0, 0.0, 1.0], dtype=gradient.dtype)).to_sparse()


def _with_sparse_gradient(x: Tensor) -> Tensor:
    return _SparseGradient.apply(x)


def test_sparse_gradients_travel(cluster: Cluster) -> None:
    x = _input("x", 3)
    with gw.autograd.context() as ctx:
        ctx.backward(cluster.workers[0].call(_with_sparse_gradient, x).sum())
        found = ctx.gradients()[x]
    assert found.is_sparse
    assert found.to_dense().tolist() == [1.0, 0.0, 1.0]


def _rotate(x: Tensor) -> Tensor:
    return x * torch.view_as_complex(torch.stack([worlds.weight("real"), worlds.weight("imaginary")], -1)).conj()


def _complex_loss(x: Tensor) -> Tensor:
    turned = worlds.call(FIRST, _rotate, torch.view_as_complex(x))
    both = worlds.call(SECOND, graphs.echo, [turned.conj(), turned.real, turned])
    return (both[0] * both[2]).real.sum() + both[1].sum() + (both[2] ** 2).imag.sum()


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_complex_gradients(cluster: Cluster, mode: str) -> None:
    x, local = _input("x", 3, 2), _input("x", 3, 2)
    with worlds.OneProcess("driver") as world:
        _complex_loss(local).backward()
    with gw.autograd.context() as ctx:
        ctx.backward(_complex_loss(x), mode=mode)
        found = {"x": ctx.gradients()[x], **worlds.gather_gradients(ctx)}
    assert worlds.difference(found, {"x": local.grad, **world.gradients()}) == ""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_have_the_dtype_of_their_tensor(cluster: Cluster, dtype: torch.dtype) -> None:
    x = torch.ones(4, dtype=dtype, requires_grad=True)
    with gw.autograd.context() as ctx:
        ctx.backward(cluster.workers[0].call(torch.mul, x, 3).sum())
        assert torch.equal(ctx.gradients()[x], torch.full((4,), 3, dtype=dtype))


# -- hooks ---------------------------------------------------------------------------------------------------------------


_seen: dict[str, list[Tensor]] = {}  # on a worker: what its hooks saw


def _watched() -> torch.nn.Parameter:
    """A parameter with all kinds of hooks."""
    weight = worlds.weight("watched")
    if not weight._backward_hooks:
        weight.register_hook(_double_and_note)
        weight.register_post_accumulate_grad_hook(lambda leaf: _note("accumulated", leaf.grad))
    return weight


def _double_and_note(gradient: Tensor) -> Tensor:
    _note("tensor", gradient)
    return gradient * 2


def _note(kind: str, gradient: Tensor) -> None:
    _seen.setdefault(kind, []).append(gradient.detach().clone())


def _use_watched(x: Tensor) -> Tensor:
    return torch.sin(x * _watched())


def _take_seen() -> dict[str, list[Tensor]]:
    taken = {kind: list(items) for kind, items in _seen.items()}
    _seen.clear()
    return taken


def _watched_loss(x: Tensor) -> Tensor:
    """The parameter is used by three calls, one of them inside another worker's, and one result is unused."""
    hidden = worlds.call(FIRST, _use_watched, x)
    worlds.call(FIRST, _use_watched, hidden)
    hidden = hidden + worlds.call(SECOND, _use_elsewhere, hidden)
    return worlds.call(FIRST, _use_watched, hidden).sum()


def _use_elsewhere(x: Tensor) -> Tensor:
    return worlds.call(FIRST, _use_watched, x)


def test_hooks_run_once_in_each_pass_with_the_total(cluster: Cluster) -> None:
    x = _input("x", 3)
    _seen.clear()
    with worlds.OneProcess("driver") as world:
        _watched_loss(x.detach().requires_grad_()).backward()
    here = _take_seen()
    assert {kind: len(items) for kind, items in here.items()} == {"tensor": 1, "accumulated": 1}
    with gw.autograd.context() as ctx:
        loss = _watched_loss(x)
        for number in (1, 2):
            ctx.backward(loss, retain_graph=True)
            there = cluster.workers[0].call(_take_seen)
            assert {kind: len(items) for kind, items in there.items()} == {"tensor": 1, "accumulated": 1}
            assert torch.allclose(there["tensor"][0], here["tensor"][0], rtol=1e-9)
            assert torch.allclose(there["accumulated"][0], here["accumulated"][0], rtol=1e-9)
            found = worlds.gather_gradients(ctx)
            expected = {name: number * gradient for name, gradient in world.gradients().items()}
            assert worlds.difference(found, expected) == ""


def _hook_on_received(x: Tensor) -> Tensor:
    x.register_hook(worlds.bend)
    hidden = x * 2
    hidden.register_hook(worlds.bend)
    return hidden * torch.sin(x)


def test_hooks_on_what_arrived_and_on_what_is_sent(cluster: Cluster) -> None:
    def loss_of(x: Tensor) -> Tensor:
        hidden = torch.tanh(x)
        hidden.register_hook(worlds.bend)
        result = worlds.call(FIRST, _hook_on_received, hidden)
        result.register_hook(worlds.bend)
        return (result * hidden).sum() + worlds.call(SECOND, graphs.layer, result).sum()

    x, local = _input("x", 3), _input("x", 3)
    with worlds.OneProcess("driver") as world:
        loss_of(local).backward()
    with gw.autograd.context() as ctx:
        ctx.backward(loss_of(x))
        found = {"x": ctx.gradients()[x], **worlds.gather_gradients(ctx)}
    assert worlds.difference(found, {"x": local.grad, **world.gradients()}) == ""


def test_a_hook_behind_an_unused_result_sees_no_gradient(cluster: Cluster) -> None:
    """In one process it would not run at all; here it may be told that there is none."""
    x, seen = _input("x", 3), []
    with gw.autograd.context() as ctx:
        hidden = x * 2
        unused = torch.sin(hidden)
        unused.register_hook(seen.append)
        cluster.workers[0].call(graphs.layer, unused)
        ctx.backward((hidden + cluster.workers[1].call(graphs.layer, hidden)).sum())
        assert x in ctx.gradients()
    assert set(seen) <= {None}


# -- grad ------------------------------------------------------------------------------------------------------------------


def test_grad_returns_gradients_and_the_context_keeps_none(cluster: Cluster) -> None:
    x, y = _input("x", 3), _input("y", 3)
    with gw.autograd.context() as ctx:
        loss = graphs.diamond(x, y)
        first, second, third = gw.autograd.grad(ctx, loss, [x, y, x], retain_graph=True)
        assert not worlds.gather_gradients(ctx)
        assert not ctx.gradients()
        ctx.backward(loss)
        assert torch.equal(first, ctx.gradients()[x])
        assert torch.equal(second, ctx.gradients()[y])
        assert torch.equal(third, first)


def test_grad_of_intermediate_values_and_of_unused_ones(cluster: Cluster) -> None:
    x, y = _input("x", 3), _input("y", 3)
    with gw.autograd.context() as ctx:
        hidden = cluster.workers[0].call(graphs.layer, x)
        loss = (cluster.workers[1].call(graphs.layer, hidden) * hidden).sum()
        found = gw.autograd.grad(ctx, loss, [hidden, y, x], allow_unused=True, retain_graph=True)
        with pytest.raises(AutogradError, match="input 1"):
            gw.autograd.grad(ctx, loss, [hidden, y, x])
    local, inner = _input("x", 3), []
    with worlds.OneProcess("driver"):
        inner = [worlds.call(FIRST, graphs.layer, local)]
        loss = (worlds.call(SECOND, graphs.layer, inner[0]) * inner[0]).sum()
    expected = torch.autograd.grad(loss, [inner[0], local])
    assert found[1] is None
    assert torch.allclose(found[0], expected[0], rtol=1e-9)
    assert torch.allclose(found[2], expected[1], rtol=1e-9)


def test_backward_with_inputs_gathers_nothing_else(cluster: Cluster) -> None:
    x, y = _input("x", 3), _input("y", 3)
    with gw.autograd.context() as ctx:
        gw.autograd.backward(ctx, graphs.diamond(x, y), inputs=[x])
        assert set(ctx.gradients()) == {x}
        assert not worlds.gather_gradients(ctx)


# -- hooks over several tensors, and hooks that wait -----------------------------------------------------------------------

_seen_together: list[list[list[float] | None]] = []
_has_arrived = threading.Event()


def _hooked_together(x: Tensor, is_alone: bool) -> Tensor:
    hidden = x * 3
    result = hidden * 2

    def note(gradients: Sequence[Tensor | None]) -> None:
        _seen_together.append([None if gradient is None else gradient.tolist() for gradient in gradients])

    torch.autograd.graph.register_multi_grad_hook((result,) if is_alone else (result, hidden), note)
    return result


def _take_together() -> list[list[list[float] | None]]:
    found, _seen_together[:] = list(_seen_together), []
    return found


@pytest.mark.parametrize("is_alone", [True, False], ids=["the result", "the result and what is behind it"])
def test_hook_over_several_tensors_runs_once_with_all_of_them(cluster: Cluster, is_alone: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    with gw.autograd.context() as ctx:
        ctx.backward(worlds.call(FIRST, _hooked_together, x, is_alone).sum())
        assert ctx.gradients()[x].tolist() == [6.0, 6.0]
    assert worlds.call(FIRST, _take_together) == [[[1.0, 1.0]] if is_alone else [[1.0, 1.0], [2.0, 2.0]]]


def _wait_for_arrival() -> bool:
    return _has_arrived.wait(20.0)


def _with_waiting_hook(x: Tensor) -> Tensor:
    """Its hook waits for what the root does with the gradient of `x`, as a collective operation in hooks would."""
    leaf = torch.ones(2, requires_grad=True)

    def wait(_: Tensor) -> None:
        if not gw.rpc.rpc_sync("driver", _wait_for_arrival):
            raise AssertionError("the root has not got its gradient")

    leaf.register_post_accumulate_grad_hook(wait)
    return x * leaf


def test_hook_may_wait_for_what_the_root_does_with_its_gradient(cluster: Cluster) -> None:
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: _has_arrived.set())  # type: ignore[no-untyped-call]
    _has_arrived.clear()
    with gw.autograd.context() as ctx:
        ctx.backward(worlds.call(FIRST, _with_waiting_hook, x).sum(), timeout=60.0)
        assert ctx.gradients()[x].tolist() == [1.0, 1.0]
