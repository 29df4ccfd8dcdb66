"""Bags of rows of sharded tables, in both worlds: values and gradients are those of one process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from closeness import assert_close
from gradwire.shard import ShardedTensor
from shard.worlds import GroupWorld, World, Worlds

BACKENDS = pytest.mark.parametrize("backend", ["group", "workers"])

NUM_ROWS, WIDTH, NUM_BAGS = 11, 6, 9
COMMON: list[dict[str, Any]] = [
    {},
    {"padding_idx": 3},
    {"padding_idx": -2, "max_norm": 0.9},
    {"max_norm": 0.7, "norm_type": 1.0},
]
DENSE_OR_SPARSE: list[dict[str, Any]] = [
    {"sparse": True},
    {"sparse": True, "padding_idx": 0},
    {"scale_grad_by_freq": True},
    {"scale_grad_by_freq": True, "sparse": True},
]
SIZES = [0, 3, 1, 4, 0, 2, 5, 1, 0]  # of bags


def close(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    assert_close(found, expected.to_dense() if expected.is_sparse else expected)


def randn(*size: int) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float64)


class Batch:
    """Bags of different sizes, one after the other; some are empty."""

    def __init__(self, world: World) -> None:
        self.ids = torch.randint(NUM_ROWS, (sum(SIZES),))
        self.weights = randn(sum(SIZES))
        self.bags = torch.arange(NUM_BAGS).repeat_interleave(torch.tensor(SIZES))
        self.is_own = torch.isin(self.bags, world.own(torch.arange(NUM_BAGS)))
        self.offsets = self.offsets_of(torch.tensor(SIZES))
        self.own_offsets = self.offsets_of(world.own(torch.tensor(SIZES)))

    @staticmethod
    def offsets_of(sizes: torch.Tensor) -> torch.Tensor:
        return sizes.cumsum(0) - sizes

    def own(self, values: torch.Tensor) -> torch.Tensor:
        return values[self.is_own]


def look_up_alone(
    batch: Batch, whole: torch.Tensor, mode: str, options: dict[str, Any], factors: torch.Tensor
) -> torch.Tensor:
    """One process, with gradients. Those that torch scales by frequency count other rows, too: so they are scaled here."""
    options = dict(options)
    is_scaled = options.pop("scale_grad_by_freq", False)
    found = F.embedding_bag(batch.ids, whole, batch.offsets, mode=mode, **options)
    (found * factors).sum().backward()
    if is_scaled:
        assert whole.grad is not None
        whole.grad = whole.grad.to_dense() / batch.ids.bincount(minlength=NUM_ROWS).clamp(min=1).unsqueeze(1)
    return found


def check_bags(world: World, mode: str, options: list[dict[str, Any]]) -> int:
    weight, batch, factors = randn(NUM_ROWS, WIDTH), Batch(world), randn(NUM_BAGS, WIDTH)
    num_checked = 0
    for chosen in options:
        whole = weight.clone().requires_grad_()
        expected = look_up_alone(batch, whole, mode, chosen, factors)
        for spec in world.specs(NUM_ROWS, WIDTH):
            with world.fresh_gradients():
                sharded = world.place(weight, spec, requires_grad=True)
                found = F.embedding_bag(batch.own(batch.ids), sharded, batch.own_offsets, mode=mode, **chosen)
                assert not isinstance(found, ShardedTensor)
                close(found.detach(), world.own(expected.detach()))
                world.backward((found * world.own(factors)).sum())
                world.assert_full_gradient(sharded, whole.grad)
                close(sharded.full_tensor().detach(), whole.detach())  # max_norm changes it
                num_checked += 1
    return num_checked


@BACKENDS
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_modes(worlds: Worlds, backend: str, mode: str) -> None:
    options = COMMON if mode == "max" else COMMON + DENSE_OR_SPARSE
    num_places = {"sum": 4, "mean": 3, "max": 2}[mode]
    assert set(worlds.check(backend, num_places, check_bags, mode, options)) == {5 * len(options)}


def check_weights(world: World, sparse: bool) -> int:
    weight, batch, factors = randn(NUM_ROWS, WIDTH), Batch(world), randn(NUM_BAGS, WIDTH)
    whole, weights = weight.clone().requires_grad_(), batch.weights.clone().requires_grad_()
    expected = F.embedding_bag(
        batch.ids, whole, batch.offsets, mode="sum", per_sample_weights=weights, padding_idx=4, sparse=sparse
    )
    (expected * factors).sum().backward()
    num_checked = 0
    for spec in world.specs(NUM_ROWS, WIDTH):
        sharded = world.place(weight, spec, requires_grad=True)
        own = batch.own(batch.weights).clone().requires_grad_()
        found = F.embedding_bag(
            batch.own(batch.ids),
            sharded,
            batch.own_offsets,
            mode="sum",
            per_sample_weights=own,
            padding_idx=4,
            sparse=sparse,
        )
        close(found.detach(), world.own(expected.detach()))
        world.backward((found * world.own(factors)).sum())
        world.assert_full_gradient(sharded, whole.grad)
        close(world.gradient(own), batch.own(weights.grad))  # type: ignore[arg-type]
        num_checked += 1
    return num_checked


@BACKENDS
@pytest.mark.parametrize("sparse", [False, True])
def test_weights_of_samples(worlds: Worlds, backend: str, sparse: bool) -> None:
    assert set(worlds.check(backend, 3, check_weights, sparse)) == {5}


def check_forms_of_input(world: World) -> None:
    weight = randn(NUM_ROWS, WIDTH)
    ids = torch.randint(NUM_ROWS, (7, 4))
    weights = randn(7, 4)
    for spec in world.specs(NUM_ROWS, WIDTH):
        sharded = world.place(weight, spec)
        rows = world.own(ids)
        close(F.embedding_bag(rows, sharded), world.own(F.embedding_bag(ids, weight)))
        found = F.embedding_bag(rows.int(), sharded, mode="max")
        close(found, world.own(F.embedding_bag(ids, weight, mode="max")))
        close(
            F.embedding_bag(rows, sharded, mode="sum", per_sample_weights=world.own(weights)),
            world.own(F.embedding_bag(ids, weight, mode="sum", per_sample_weights=weights)),
        )
        ends = torch.arange(0, rows.numel() + 1, 4)
        found = F.embedding_bag(rows.reshape(-1), sharded, ends, include_last_offset=True)
        close(found, world.own(F.embedding_bag(ids, weight)))
        assert F.embedding_bag(rows[:0], sharded).size() == (0, WIDTH)
        nothing = F.embedding_bag(rows[0, :0], sharded, torch.zeros(3, dtype=torch.int64), mode="max")
        assert torch.equal(nothing, torch.zeros(3, WIDTH, dtype=torch.float64))


@BACKENDS
def test_forms_of_input(worlds: Worlds, backend: str) -> None:
    assert None in worlds.check(backend, 3, check_forms_of_input)


def check_one_idle_rank(world: World) -> None:
    """A rank without bags takes part in what the others do, forward and back."""
    weight = randn(NUM_ROWS, WIDTH)
    sharded = world.shard(weight, world.chunks(), requires_grad=True)
    is_idle = isinstance(world, GroupWorld) and world.rank == 1
    rows = torch.tensor([[1, 5]])[: 0 if is_idle else 1]
    found = F.embedding_bag(rows, sharded, mode="sum")
    world.backward(found.sum())
    num_busy = world.num_places - 1 if isinstance(world, GroupWorld) else 1
    expected = torch.zeros(NUM_ROWS, WIDTH, dtype=torch.float64)
    expected[[1, 5]] = num_busy
    close(world.full_gradient(sharded), expected)


@BACKENDS
def test_a_rank_without_bags(worlds: Worlds, backend: str) -> None:
    assert None in worlds.check(backend, 3, check_one_idle_rank)


def check_one_bad_rank(world: World) -> list[str]:
    """What only one rank does wrong is raised by all of them, and they can go on."""
    sharded = world.shard(randn(NUM_ROWS, WIDTH), world.chunks())
    is_wrong = isinstance(world, GroupWorld) and world.rank == 1
    said = []
    for offsets in ([0, 2, 1], [1, 2, 3], [0, 1, 99]):
        with pytest.raises(RuntimeError) as info:
            F.embedding_bag(torch.arange(4), sharded, torch.tensor(offsets if is_wrong else [0, 1, 2]))
        said.append(str(info.value))
    close(F.embedding_bag(torch.tensor([[1]]), sharded), sharded.full_tensor()[1:2])
    return said


def test_offsets_that_are_wrong_on_one_rank(worlds: Worlds) -> None:
    first, second, third = worlds.check("group", 3, check_one_bad_rank)
    assert first == third
    assert all(text.startswith("the operation on a sharded tensor failed on rank 1, ") for text in first)
    assert all(text.startswith("offsets") for text in second)


def check_module(world: World) -> None:
    module = nn.EmbeddingBag(NUM_ROWS, WIDTH, mode="mean", padding_idx=1, max_norm=0.8, dtype=torch.float64)
    ids = torch.tensor([[1, 2], [3, 10], [0, 1], [7, 7]])
    before = module.weight.detach().clone()
    expected = module(ids).detach()
    module.weight = nn.Parameter(world.shard(before, world.blocks(NUM_ROWS, WIDTH)))
    close(world.join(module(world.own(ids))), expected)


@BACKENDS
def test_module(worlds: Worlds, backend: str) -> None:
    assert None in worlds.check(backend, 3, check_module)


def check_misuse(world: World) -> list[str]:
    sharded = world.shard(randn(NUM_ROWS, WIDTH), world.chunks())
    ids, starts, weights = torch.tensor([1, 2]), torch.tensor([0, 1]), randn(2)
    mistakes: list[tuple[type[Exception], Any]] = [
        (IndexError, lambda: F.embedding_bag(ids + 10, sharded, starts)),
        (NotImplementedError, lambda: F.embedding_bag(ids, sharded, starts, per_sample_weights=weights)),
        (ValueError, lambda: F.embedding_bag(ids, sharded, starts, mode="sum", per_sample_weights=weights[:1])),
        (ValueError, lambda: F.embedding_bag(ids, sharded)),
        (ValueError, lambda: F.embedding_bag(ids.view(1, 2), sharded, starts)),
        (ValueError, lambda: F.embedding_bag(ids.view(1, 1, 2), sharded)),
        (ValueError, lambda: F.embedding_bag(ids, sharded, starts, mode="least")),
        (ValueError, lambda: F.embedding_bag(ids, sharded, starts, mode="max", sparse=True)),
        (ValueError, lambda: F.embedding_bag(ids, sharded, starts, mode="max", scale_grad_by_freq=True)),
        (RuntimeError, lambda: F.embedding_bag(ids, sharded, starts + 1)),
        (RuntimeError, lambda: F.embedding_bag(ids, sharded, starts * 3)),
        (RuntimeError, lambda: F.embedding_bag(ids, sharded, torch.tensor([0, 2, 1]))),
        (RuntimeError, lambda: F.embedding_bag(ids, sharded, starts, padding_idx=NUM_ROWS)),
        (RuntimeError, lambda: F.embedding_bag(weights, sharded, starts)),
    ]
    said = []
    for kind, mistake in mistakes:
        with pytest.raises(kind) as info:
            mistake()
        said.append(str(info.value))
    return said


@BACKENDS
def test_misuse(worlds: Worlds, backend: str) -> None:
    parts = ["12 is not a row", "only supported for mode='sum'", "same shape", "1D Tensor", "has to be None", "dimension 3",
             "sum, mean or max", "sparse", "frequency", "offsets[0]", "offsets[-1]", "decrease", "padding_idx",
             "Long, Int"]  # fmt: skip
    for said in worlds.check(backend, 2, check_misuse):
        for message, part in zip(said, parts, strict=True):
            assert part in message
