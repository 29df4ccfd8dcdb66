"""Parts of tensors between real ranks: from any layout to any other, no element twice."""

from __future__ import annotations

import math
import random

import pytest
import torch

from gradwire.shard import redistribute as moving
from gradwire.shard.layout import Box, Layout
from gradwire.shard.redistribute import move, traffic
from shard.groups import Ranks

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
    limits = moving.PIECE_BYTES, moving._MAX_EXCHANGE_BYTES
    moving.PIECE_BYTES, moving._MAX_EXCHANGE_BYTES = 16, 0
    try:
        add_up_in_pieces(rank)
        return check_moves(rank, seeds, torch.float32)
    finally:
        moving.PIECE_BYTES, moving._MAX_EXCHANGE_BYTES = limits


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
