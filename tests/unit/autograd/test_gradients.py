"""What happens to the gradients of leaves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd.gradients import GradientTable, add_gradient, keep_apart, run_post_accumulate_hooks
from gradwire.errors import BackwardFailed
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


# -- post-accumulate hooks -------------------------------------------------------------------------------------------


def hooked_leaf(hook: Callable[[torch.Tensor], None]) -> torch.Tensor:
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return leaf


def test_hook_sees_the_gradient_and_grad_is_as_before() -> None:
    seen: list[torch.Tensor | None] = []
    leaf = hooked_leaf(lambda param: seen.append(param.grad))
    leaf.grad = torch.full((2,), 7.0)
    table = {leaf: torch.ones(2)}
    run_post_accumulate_hooks(table, [leaf, torch.ones(2, requires_grad=True)])
    (first,) = seen
    assert first is not None
    assert first.tolist() == [1.0, 1.0]
    assert leaf.grad.tolist() == [7.0, 7.0]
    assert table[leaf].tolist() == [1.0, 1.0]


def test_hook_may_consume_the_gradient() -> None:
    def consume(param: torch.Tensor) -> None:
        param.grad = None

    leaf = hooked_leaf(consume)
    table = {leaf: torch.ones(2)}
    run_post_accumulate_hooks(table, [leaf])
    assert table == {}


def test_hook_may_replace_the_gradient() -> None:
    def scale(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad = param.grad * 10

    leaf = hooked_leaf(scale)
    table = {leaf: torch.ones(2)}
    run_post_accumulate_hooks(table, [leaf])
    assert table[leaf].tolist() == [10.0, 10.0]


def test_hook_that_raises_leaves_grad_as_before() -> None:
    def fail(param: torch.Tensor) -> None:
        raise ValueError("on purpose")

    leaf = hooked_leaf(fail)
    with pytest.raises(ValueError, match="on purpose"):
        run_post_accumulate_hooks({leaf: torch.ones(2)}, [leaf])
    assert leaf.grad is None


def test_hook_runs_once_with_the_total_of_the_pass(trio: list[Agent]) -> None:
    """The leaf is used here, and behind two calls."""
    seen: list[list[float]] = []

    def note(param: torch.Tensor) -> None:
        assert param.grad is not None
        seen.append(param.grad.tolist())

    leaf = hooked_leaf(note)
    with gw.autograd.context() as ctx:
        there = [rpc.rpc_sync(name, torch.mul, args=(leaf * 2, 3.0)) for name in ("b", "c")]
        ctx.backward((there[0] + there[1] + leaf).sum())
        assert ctx.gradients()[leaf].tolist() == [13.0, 13.0]
    assert seen == [[13.0, 13.0]]
    assert leaf.grad is None


def test_hook_that_raises_fails_the_pass(trio: list[Agent]) -> None:
    def fail(param: torch.Tensor) -> None:
        raise ValueError("no good gradient")

    leaf = hooked_leaf(fail)
    with gw.autograd.context() as ctx:
        value = rpc.rpc_sync("b", torch.mul, args=(leaf, 3.0))
        with pytest.raises(BackwardFailed, match=r"no good gradient \(ValueError;") as caught:
            ctx.backward(value.sum())
        assert caught.value.worker == "a"
        assert ctx.gradients() == {}
        assert leaf.grad is None


def test_grad_leaves_the_context_alone(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", layer, args=(x,)).sum()
        (gradient,) = gw.autograd.grad(ctx, loss, x)
        assert gradient is not None
        assert ctx.gradients() == {}
