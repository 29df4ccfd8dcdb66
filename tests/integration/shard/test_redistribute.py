"""From any layout to any other: parts between ranks, no element twice; specs in both worlds, with gradients."""

from __future__ import annotations

import math
import random

import pytest
import torch

from gradwire.shard import ShardingSpec, redistribute
from gradwire.shard.layout import Box, Layout
from gradwire.shard.redistribute import move, traffic
from gradwire.shard.sharded_tensor import reshard
from shard.groups import Ranks
from shard.worlds import GroupWorld, World, Worlds


@pytest.fixture(scope="module")
def four_ranks(worlds: Worlds) -> Ranks:
    return worlds.ranks


BACKENDS = pytest.mark.parametrize("backend", ["group", "workers"])


def check_all_pairs(world: World) -> int:
    whole = torch.arange(35.0, dtype=torch.float64).view(7, 5)
    weights = torch.randn(7, 5, dtype=torch.float64)
    num_checked = 0
    for old in world.specs(7, 5):
        for new in world.specs(7, 5):
            sharded = world.place(whole, old, requires_grad=True)
            moved = sharded.redistribute(new)
            assert moved.sharding_spec() is new
            assert moved.requires_grad
            full = moved.full_tensor()
            assert torch.equal(full, whole)
            world.backward((full * weights).sum())
            assert torch.equal(world.full_gradient(sharded), weights)
            num_checked += 1
    return num_checked


def check_sharding(world: GroupWorld) -> None:
    others = [torch.bfloat16, torch.complex128, torch.int64, torch.bool]
    for size in ((7, 5), (1, 3), (6, 3, 4), (5,)):
        for turn, spec in enumerate([*world.specs(*size), world.chunks(-1)]):
            for dtype in (torch.float64, others[turn % len(others)]):
                whole = torch.randn(size) > 0 if dtype == torch.bool else (torch.randn(size) * 5).to(dtype)
                compare_with_placed(world, whole, spec, dtype == torch.float64 or dtype.is_complex)


def compare_with_placed(world: GroupWorld, whole: torch.Tensor, spec: ShardingSpec, requires_grad: bool) -> None:
    """What a source sends is what everybody cuts from a copy: the same metadata, elements, layout, memory and spec."""
    sharded, placed = (make(whole, spec, requires_grad) for make in (world.shard, world.place))
    assert sharded.sharding_spec() is placed.sharding_spec() is spec
    assert sharded.metadata() == placed.metadata()
    assert sharded._layout == placed._layout
    assert (sharded.requires_grad, sharded.is_leaf) == (placed.requires_grad, placed.is_leaf) == (requires_grad, True)
    assert torch.equal(sharded.full_tensor(), whole)
    for sent, cut_out in zip(sharded._parts, placed._parts, strict=True):
        assert torch.equal(sent, cut_out)
        assert (sent.dtype, sent.requires_grad) == (cut_out.dtype, cut_out.requires_grad)
        assert sent.is_contiguous()
        assert cut_out.is_contiguous()
        assert sent.untyped_storage().nbytes() == cut_out.untyped_storage().nbytes()


@pytest.mark.parametrize("num_places", [1, 2, 3, 4])
def test_sharding_by_any_spec(worlds: Worlds, num_places: int) -> None:
    assert worlds.check("group", num_places, check_sharding) == [None] * num_places


def check_local_shards(world: World) -> int:
    """PyTorch's functions for a shard alone."""
    whole = torch.arange(35.0).view(7, 5)
    old, new = world.chunks(0), world.uneven(1, 7, 5)
    tensor = world.shard(whole, old).local_tensor()
    for function in (reshard.reshard_local_shard, reshard.reshuffle_local_shard):
        shards, metadata = function(tensor, whole.size(), old, new, None)
        assert metadata == sorted(new.shards, key=lambda item: item.placement.rank())  # type: ignore[union-attr, return-value]
        assert len(shards) == 1
        start, size = shards[0].metadata.shard_offsets[1], shards[0].metadata.shard_sizes[1]
        assert torch.equal(shards[0].tensor, whole[:, start : start + size])
    return len(metadata)


def check_order(world: World) -> list[int]:
    """PyTorch lists the shards by rank after `reshard`, in whatever order they are in the spec."""
    whole = torch.arange(35.0).view(7, 5)
    new = world.uneven(1, 7, 5)
    tensor = world.shard(whole, world.chunks(0))
    assert tensor.reshard(new) is tensor
    assert tensor.sharding_spec() is new
    ranks = [item.placement.rank() for item in tensor.metadata().shards_metadata]  # type: ignore[union-attr]
    assert [item.placement.rank() for item in new.shards] == ranks[::-1]  # type: ignore[union-attr]
    tensor.metadata().shards_metadata.reverse()  # programs sort it as they like
    (shard,) = tensor.local_shards()
    start, size = shard.metadata.shard_offsets[1], shard.metadata.shard_sizes[1]
    assert torch.equal(shard.tensor, whole[:, start : start + size])
    assert torch.equal(tensor.full_tensor(), whole)
    local = tensor.local_tensor()
    assert tensor.reshard(world.uneven(1, 7, 5)).local_tensor() is local  # it is divided like this already
    return ranks


def test_shards_are_in_the_order_of_ranks_after_reshard(worlds: Worlds) -> None:
    assert worlds.check("group", 3, check_order) == [[0, 1, 2]] * 3


def test_shards_alone(worlds: Worlds) -> None:
    assert worlds.check("group", 3, check_local_shards) == [3, 3, 3]


@BACKENDS
@pytest.mark.parametrize("num_places", [2, 4])
def test_any_spec_to_any_other(worlds: Worlds, backend: str, num_places: int) -> None:
    assert set(worlds.check(backend, num_places, check_all_pairs)) == {25}


SIZE = (7, 6)


def cut(seed: int, num_ranks: int, size: tuple[int, ...] = SIZE) -> Layout:
    """The same random layout on every rank: uneven, several boxes or none for some."""
    source = random.Random(seed)
    boxes = [Box((0,) * len(size), size)]
    for _ in range(source.randrange(6)):
        box = boxes.pop(source.randrange(len(boxes)))
        dim = source.randrange(len(size))
        at = source.randint(0, box.sizes[dim])
        first, second, start = list(box.sizes), list(box.sizes), list(box.offsets)
        first[dim], second[dim] = at, box.sizes[dim] - at
        start[dim] += at
        boxes += [Box(box.offsets, tuple(first)), Box(tuple(start), tuple(second))]
    return Layout(tuple(boxes), tuple(source.randrange(num_ranks) for _ in boxes))


def parts_of(whole: torch.Tensor, layout: Layout, rank: int) -> list[torch.Tensor]:
    full = Box((0,) * whole.dim(), tuple(whole.size()))
    return [whole[layout.boxes[number].slices_in(full)] for number in layout.numbers_at(rank)]


def check_moves(rank: int, seeds: list[int], dtype: torch.dtype) -> tuple[int, int, int]:
    """Returns how many bytes this rank sent, how many it had to, and how many moves were compared."""
    whole = torch.arange(math.prod(SIZE)).view(SIZE).to(dtype)
    needed = num_checked = 0
    before = traffic.num_bytes
    for seed in seeds:
        old, new = cut(seed, 4), cut(seed + 1000, 4)
        moved = move(parts_of(whole, old, rank), old, new, None, whole)
        for found, expected in zip(moved, parts_of(whole, new, rank), strict=True):
            assert torch.equal(found, expected)
            num_checked += 1
        for source, target in [(s, t) for s in range(len(old.boxes)) for t in range(len(new.boxes))]:
            common = old.boxes[source].common_with(new.boxes[target])
            if common is not None and old.places[source] == rank != new.places[target]:
                needed += common.num_elements * whole.element_size()
    return traffic.num_bytes - before, needed, num_checked


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex64])
def test_any_layout_to_any_other(four_ranks: Ranks, dtype: torch.dtype) -> None:
    found = four_ranks.run(check_moves, list(range(12)), dtype)
    assert sum(num for _, _, num in found) > 12
    assert [sent for sent, _, _ in found] == [needed for _, needed, _ in found]  # each byte once, and none in vain


def check_pieces(rank: int, seeds: list[int]) -> tuple[int, int, int]:
    """As if everything were much."""
    limits = redistribute.PIECE_BYTES, redistribute._MAX_EXCHANGE_BYTES
    redistribute.PIECE_BYTES, redistribute._MAX_EXCHANGE_BYTES = 16, 0
    try:
        add_up_in_pieces(rank)
        return check_moves(rank, seeds, torch.float32)
    finally:
        redistribute.PIECE_BYTES, redistribute._MAX_EXCHANGE_BYTES = limits


def add_up_in_pieces(rank: int) -> None:
    full = Box((0, 0), SIZE)
    everywhere = Layout((full,) * 4, (0, 1, 2, 3))
    new = cut(7, 4)
    values = torch.arange(math.prod(SIZE), dtype=torch.float32).view(SIZE)
    moved = move([values * (rank + 1)], everywhere, new, None, values, is_sum=True)
    for found, expected in zip(moved, parts_of(values * 10, new, rank), strict=True):
        assert torch.equal(found, expected)


def test_in_pieces(four_ranks: Ranks) -> None:
    found = four_ranks.run(check_pieces, list(range(12)))
    assert sum(num for _, _, num in found) > 12
    assert [sent for sent, _, _ in found] == [needed for _, needed, _ in found]


def scatter_and_gather(rank: int) -> tuple[list[list[float]], int]:
    whole = torch.arange(12.0).view(4, 3)
    full = Box((0, 0), (4, 3))
    rows = Layout(tuple(Box((number, 0), (1, 3)) for number in range(4)), (0, 1, 2, 3))
    mine = move([whole] if rank == 2 else [], Layout((full,), (2,)), rows, None, whole)
    everywhere = Layout((full,) * 4, (0, 1, 2, 3))
    (everything,) = move(mine, rows, everywhere, None, whole)
    assert torch.equal(everything, whole)
    return mine[0].tolist(), len(mine)


def test_scatter_and_gather(four_ranks: Ranks) -> None:
    found = four_ranks.run(scatter_and_gather)
    assert found == [([[3.0 * rank, 3.0 * rank + 1, 3.0 * rank + 2]], 1) for rank in range(4)]


def add_up(rank: int) -> list[float]:
    """What several ranks have of one element adds up where it belongs."""
    full = Box((0,), (4,))
    everywhere = Layout((full,) * 4, (0, 1, 2, 3))
    shards = Layout(tuple(Box((number,), (1,)) for number in range(4)), (3, 2, 1, 0))
    values = torch.arange(4.0) + 10 * rank
    (mine,) = move([values], everywhere, shards, None, values, is_sum=True)
    return mine.tolist()


def test_sums(four_ranks: Ranks) -> None:
    total = sum(torch.arange(4.0) + 10 * rank for rank in range(4))
    assert [found[0] for found in four_ranks.run(add_up)] == list(reversed(total.tolist()))
