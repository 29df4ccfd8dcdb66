"""What only one rank wants, or cannot do, concerns all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from closeness import assert_close
from gradwire.shard import ShardedTensor
from gradwire.shard.group_backend import all_or_none
from shard.worlds import GroupWorld, Worlds


def check_all_or_none(world: GroupWorld) -> str:
    def action() -> int:
        if world.rank == 1:
            raise LookupError("no such thing")
        return world.rank

    assert all_or_none(None, lambda: 10 * world.rank) == [0, 10, 20]
    with pytest.raises((LookupError, RuntimeError)) as raised:
        all_or_none(None, action)
    return f"{raised.type.__name__}: {raised.value}"


def check_text_of_an_os_error(world: GroupWorld) -> str:
    def action() -> None:
        if world.rank == 1:
            raise OSError(28, "no space left")

    with pytest.raises((OSError, RuntimeError)) as caught:
        all_or_none(None, action)
    return str(caught.value)


def test_an_error_that_has_several_arguments_is_told_whole(worlds: Worlds) -> None:
    first, second = worlds.check("group", 2, check_text_of_an_os_error)
    assert second == "[Errno 28] no space left"
    assert first.endswith("OSError: [Errno 28] no space left")


def test_an_action_that_fails_on_one_rank_is_an_error_on_all(worlds: Worlds) -> None:
    first, second, third = worlds.check("group", 3, check_all_or_none)
    assert second == "LookupError: no such thing"
    assert first == third == "RuntimeError: failed on rank 1; no rank was changed: LookupError: no such thing"


def check_gradients_of_one_rank(world: GroupWorld) -> None:
    """Only rank 0 wants gradients of its own inputs; the others take part in backward."""
    weight, batch = torch.randn(6, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    for spec in (world.chunks(0), world.chunks(1)):
        x = world.own(batch).clone().requires_grad_(world.rank == 0)
        table = world.shard(weight, spec, requires_grad=True)
        found = F.linear(x, table)
        found.square().sum().backward()  # type: ignore[no-untyped-call]
        expected = weight.clone().requires_grad_()
        everything = batch.clone().requires_grad_()
        F.linear(everything, expected).square().sum().backward()  # type: ignore[no-untyped-call]
        assert expected.grad is not None
        assert everything.grad is not None
        world.assert_gradient(table, expected.grad)
        if world.rank == 0:
            assert_close(x.grad, world.own(everything.grad))
        else:
            assert x.grad is None


def check_sample_weights_of_one_rank(world: GroupWorld) -> None:
    weight = torch.randn(6, 4, dtype=torch.float64)
    ids, weights = torch.tensor([[0, 4], [3, 3]]), torch.rand(2, 2, dtype=torch.float64)
    for does_train in (True, False):
        own = weights.clone().requires_grad_(world.rank == 0)
        table = world.shard(weight, world.chunks(0), requires_grad=does_train)
        found = F.embedding_bag(ids, table, mode="sum", per_sample_weights=own)
        if found.requires_grad:
            found.square().sum().backward()  # type: ignore[no-untyped-call]
        expected = weights.clone().requires_grad_()
        F.embedding_bag(ids, weight, mode="sum", per_sample_weights=expected).square().sum().backward()  # type: ignore[no-untyped-call]
        if world.rank == 0:
            assert_close(own.grad, expected.grad)
        else:
            assert own.grad is None


def test_gradients_that_only_one_rank_wants(worlds: Worlds) -> None:
    assert worlds.check("group", 3, check_gradients_of_one_rank) == [None] * 3
    assert worlds.check("group", 3, check_sample_weights_of_one_rank) == [None] * 3


def mistakes(world: GroupWorld, table: ShardedTensor) -> dict[str, Callable[[], Any]]:
    """Calls that are right on all ranks but rank 1."""
    is_wrong = world.rank == 1
    x = torch.ones(2, 4, dtype=torch.float32 if is_wrong else torch.float64)
    ids = torch.tensor([[0, 1]]).to(torch.float32 if is_wrong else torch.int64)
    weights = torch.ones(1, 3 if is_wrong else 2, dtype=torch.float64)
    out = torch.empty(2) if is_wrong else None
    return {
        "linear": lambda: F.linear(x, table),
        "embedding": lambda: F.embedding(ids, table),
        "embedding_bag": lambda: F.embedding_bag(ids, table),
        "weights": lambda: F.embedding_bag(torch.tensor([[0, 1]]), table, per_sample_weights=weights, mode="sum"),
        "dtype": lambda: F.embedding_bag(
            torch.tensor([[0, 1]]), table, per_sample_weights=torch.ones(1, 2, dtype=x.dtype), mode="sum"
        ),
        "no weights": lambda: F.embedding_bag(
            torch.tensor([[0, 1]]),
            table,
            per_sample_weights=None if is_wrong else torch.ones(1, 2).double(),
            mode="sum",
        ),
        "shard": lambda: world.chunks(5 if is_wrong else 0).shard(torch.ones(4, 3)),
        "strided": lambda: world.chunks(0).shard(torch.ones(3, 4).t() if is_wrong else torch.ones(4, 3)),
        "gather": lambda: table.gather(1, out),
    }


def check_mistakes(world: GroupWorld) -> dict[str, str]:
    table = world.shard(torch.ones(6, 4, dtype=torch.float64), world.chunks(0))
    raised = {}
    for name, call in mistakes(world, table).items():
        try:
            call()
            raised[name] = ""
        except (RuntimeError, ValueError) as error:
            raised[name] = str(error)
        assert table.sum() == 24  # the ranks are still in step with each other
    with pytest.raises(ValueError, match="dst=7 is not a rank"):
        table.gather(7)
    return raised


def test_mistakes_of_one_rank_are_raised_by_all(worlds: Worlds) -> None:
    first, second, third = worlds.check("group", 3, check_mistakes)
    assert all(second.values())
    for name in set(second) - {"gather"}:
        assert all("rank 1" in text for text in (first[name], third[name])), name
    assert first["gather"] == third["gather"] == ""  # nothing went wrong there
