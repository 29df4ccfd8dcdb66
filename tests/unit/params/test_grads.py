"""What happens to the gradients of leaves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.params.grads import GradientTable, add_gradient, keep_apart
from gradwire.rpc import Agent
from unit.autograd.layers import layer


def sparse(*values: float) -> torch.Tensor:
    return torch.tensor(values).to_sparse()


# -- apart -----------------------------------------------------------------------------------------------------------


def test_first_comer_keeps_its_memory() -> None:
    gradient = torch.ones(3)
    assert keep_apart(gradient, set()) is gradient


def test_gradient_that_shares_memory_is_copied() -> None:
    gradient = torch.ones(3)
    seen: set[int] = set()
    first, second = keep_apart(gradient, seen), keep_apart(gradient, seen)
    second.mul_(2)
    assert first.tolist() == [1.0, 1.0, 1.0]


def test_gradient_that_repeats_one_number_is_copied() -> None:
    """The gradient of a sum is one number seen many times: changing it in place would change all of them."""
    kept = keep_apart(torch.ones(()).expand(3), set())
    kept[0] = 5
    assert kept.tolist() == [5.0, 1.0, 1.0]


@pytest.mark.parametrize("gradient", [sparse(1.0, 0.0), torch.empty(0)], ids=["sparse", "empty"])
def test_what_has_no_memory_to_share_is_left_alone(gradient: torch.Tensor) -> None:
    seen: set[int] = set()
    assert keep_apart(gradient, seen) is gradient
    assert keep_apart(gradient, seen) is gradient


@pytest.mark.parametrize(
    "function",
    [lambda x, y: (x + y).sum(), lambda x, y: x.sum() + y.sum(), lambda x, y: (x + y) @ torch.ones(3)],
    ids=["sum of a sum", "two sums", "product"],
)
def test_gradients_of_a_context_may_be_changed_in_place(
    trio: list[Agent], function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """As optimizers and gradient clipping do."""
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    root_gradient = torch.ones(())
    with gw.autograd.context() as ctx:
        ctx.backward(function(x, y), gradients=root_gradient)
        found = ctx.gradients()
        found[x].mul_(10)
        assert found[y].tolist() == [1.0, 1.0, 1.0]
        assert root_gradient.item() == 1.0


# -- sums --------------------------------------------------------------------------------------------------------------


def test_gradients_add_up_out_of_place() -> None:
    leaf, table = torch.ones(2, requires_grad=True), GradientTable()
    add_gradient(table, leaf, torch.ones(2))
    held = table[leaf]
    add_gradient(table, leaf, torch.ones(2))
    assert table[leaf].tolist() == [2.0, 2.0]
    assert held.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("one", "other", "stays_sparse"),
    [
        (sparse(1.0, 0.0), sparse(0.0, 5.0), True),
        (sparse(1.0, 0.0), torch.tensor([0.0, 5.0]), False),
        (torch.tensor([0.0, 5.0]), sparse(1.0, 0.0), False),
    ],
    ids=["sparse and sparse", "sparse and dense", "dense and sparse"],
)
def test_sparse_gradients_add_up(one: torch.Tensor, other: torch.Tensor, stays_sparse: bool) -> None:
    leaf, table = torch.ones(2, requires_grad=True), GradientTable()
    add_gradient(table, leaf, one)
    add_gradient(table, leaf, other)
    assert table[leaf].is_sparse == stays_sparse
    assert table[leaf].to_dense().tolist() == [1.0, 5.0]


def test_leaves_are_told_apart_by_identity_not_by_value(trio: list[Agent]) -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with gw.autograd.context() as ctx:
        ctx.backward((x * 2 + y * 3).sum())
        found = ctx.gradients()
        assert (found[x].tolist(), found[y].tolist()) == ([2.0, 2.0], [3.0, 3.0])


def test_table_that_a_user_got_does_not_change(trio: list[Agent]) -> None:
    x = torch.ones(2, requires_grad=True)
    with gw.autograd.context() as ctx:
        ctx.backward((x * 2).sum())
        before = ctx.gradients()
        ctx.backward((x * 2).sum())
        before_clear = ctx.gradients()
        before_clear.clear()
        assert before[x].tolist() == [2.0, 2.0]
        assert ctx.gradients()[x].tolist() == [4.0, 4.0]
        assert x.grad is None


def test_grad_leaves_the_context_alone(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", layer, args=(x,)).sum()
        (gradient,) = gw.autograd.grad(ctx, loss, x)
        assert gradient is not None
        assert ctx.gradients() == {}
