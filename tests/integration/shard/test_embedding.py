"""Rows of sharded tables, in both worlds: values and gradients are those of one process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from closeness import assert_close
from gradwire.shard import ShardedTensor
from shard.worlds import World, Worlds

BACKENDS = pytest.mark.parametrize("backend", ["group", "workers"])

NUM_ROWS, WIDTH = 11, 6
OPTIONS: list[dict[str, Any]] = [
    {},
    {"padding_idx": 3},
    {"padding_idx": -1},
    {"sparse": True},
    {"sparse": True, "padding_idx": 0},
    {"scale_grad_by_freq": True},
    {"max_norm": 1.0},
    {"max_norm": 0.7, "norm_type": 1.0},
    {"max_norm": 0.4, "norm_type": float("inf"), "padding_idx": 2},
]


def close(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    assert_close(found, expected.to_dense() if expected.is_sparse else expected)


def table() -> torch.Tensor:
    return torch.randn(NUM_ROWS, WIDTH, dtype=torch.float64)


def check_embedding(world: World, options: list[dict[str, Any]]) -> int:
    weight = table()
    ids = torch.randint(NUM_ROWS, (9, 3))
    factors = torch.randn(9, 3, WIDTH, dtype=torch.float64)
    num_checked = 0
    for chosen in options:
        whole = weight.clone().requires_grad_()
        expected = F.embedding(ids, whole, **chosen)
        (expected * factors).sum().backward()
        for spec in world.specs(NUM_ROWS, WIDTH):
            with world.fresh_gradients():
                sharded = world.place(weight, spec, requires_grad=True)
                found = F.embedding(world.own(ids), sharded, **chosen)
                assert not isinstance(found, ShardedTensor)
                close(found.detach(), world.own(expected.detach()))
                world.backward((found * world.own(factors)).sum())
                world.assert_full_gradient(sharded, whole.grad)
                close(sharded.full_tensor().detach(), whole.detach())  # max_norm changes it
                num_checked += 1
    return num_checked


@BACKENDS
@pytest.mark.parametrize("num_places", [2, 4])
def test_embedding(worlds: Worlds, backend: str, num_places: int) -> None:
    assert set(worlds.check(backend, num_places, check_embedding, OPTIONS)) == {5 * len(OPTIONS)}


def check_gradients_of_all(world: World, sparse: bool) -> list[bool]:
    """Which shards have a gradient if only rows of the first are looked up."""
    sharded = world.shard(table(), world.chunks(), requires_grad=True)
    world.backward(F.embedding(torch.tensor([0, 1]), sharded, sparse=sparse).sum())
    return [gradient is not None for gradient in world.part_gradients(sharded)]


@BACKENDS
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_reach_shards_that_nobody_asked(worlds: Worlds, backend: str, sparse: bool) -> None:
    """They are zero there; optimizers with momentum or decay change such shards, too, as they would the whole table."""
    for found in worlds.check(backend, 4, check_gradients_of_all, sparse):
        assert found == [True] * 4


def check_sparse(world: World) -> list[bool]:
    sharded = world.shard(table(), world.chunks(), requires_grad=True)
    F.embedding(torch.tensor([0, 5, 10]), sharded, sparse=True).sum().backward()
    return [shard.tensor.grad.is_sparse for shard in sharded.local_shards()]  # type: ignore[union-attr]


def test_gradients_of_shards_are_sparse(worlds: Worlds) -> None:
    assert worlds.check("group", 3, check_sparse) == [[True], [True], [True]]


def check_module(world: World) -> None:
    module = nn.Embedding(NUM_ROWS, WIDTH, padding_idx=1, dtype=torch.float64)
    ids = torch.tensor([[1, 2], [3, 10], [0, 1], [7, 7]])
    expected = module(ids)
    module.weight = nn.Parameter(world.shard(module.weight, world.uneven(0, NUM_ROWS, WIDTH)))
    close(world.join(module(world.own(ids))), expected.detach())
    with torch.no_grad():
        assert not module(world.own(ids)).requires_grad
    none = module(torch.empty(0, 2, dtype=torch.int64))
    assert none.size() == (0, 2, WIDTH)
    one = module(torch.tensor(4))
    close(one.detach(), module(torch.tensor([4]))[0].detach())


@BACKENDS
def test_module(worlds: Worlds, backend: str) -> None:
    assert None in worlds.check(backend, 3, check_module)


def check_one_bad_rank(world: World) -> str:
    sharded = world.shard(table(), world.chunks())
    ids = torch.tensor([0, NUM_ROWS + 3 if getattr(world, "rank", 0) == 0 else 1])
    with pytest.raises((IndexError, RuntimeError)) as info:
        F.embedding(ids, sharded)
    close(world.join(F.embedding(world.own(torch.tensor([1, 2])), sharded)), sharded.full_tensor()[1:3])
    return f"{info.type.__name__} {info.value}"


def test_an_index_out_of_range_on_one_rank(worlds: Worlds) -> None:
    """Nobody is left waiting, and the ranks can go on."""
    said = worlds.check("group", 3, check_one_bad_rank)
    assert said[0] == "IndexError index out of range in self: 14 is not a row of a table with 11 rows"
    words = "RuntimeError the operation on a sharded tensor failed on rank 0, "
    assert all(text.startswith(words) for text in said[1:])
    assert worlds.check("workers", 3, check_one_bad_rank)[0].startswith("IndexError index out of range in self: 14")


def check_misuse(world: World) -> list[str]:
    sharded = world.shard(table(), world.chunks())
    mistakes: list[tuple[type[Exception], Any]] = [
        (IndexError, lambda: F.embedding(torch.tensor([-1]), sharded)),
        (RuntimeError, lambda: F.embedding(torch.tensor([0.5]), sharded)),
        (AssertionError, lambda: F.embedding(torch.tensor([1]), sharded, padding_idx=NUM_ROWS)),
        (TypeError, lambda: F.embedding(sharded, table())),
    ]
    said = []
    for kind, mistake in mistakes:
        with pytest.raises(kind) as info:
            mistake()
        said.append(str(info.value))
    return said


@BACKENDS
def test_misuse(worlds: Worlds, backend: str) -> None:
    for said in worlds.check(backend, 2, check_misuse):
        assert "-1 is not a row" in said[0]
        assert "Long, Int" in said[1]
        assert "Padding_idx must be within" in said[2]
        assert "plain tensor" in said[3]
