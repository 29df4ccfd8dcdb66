"""Boxes of tensors that are broadcast to each other."""

from __future__ import annotations

import itertools

import pytest

from gradwire.shard import layout as boxes
from gradwire.shard.layout import Box, Layout, find_overlap, stack_rows

ROWS = stack_rows([2, 0, 5], [3], [0, 1, 2])  # of a tensor of 7 rows and 3 columns


def ranges(layout: Layout) -> list[list[tuple[int, int]]]:
    return [list(zip(box.offsets, box.sizes, strict=True)) for box in layout.boxes]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((7, 3), [[(0, 2), (0, 3)], [(2, 0), (0, 3)], [(2, 5), (0, 3)]]),
        ((3,), [[(0, 3)], [(0, 3)], [(0, 3)]]),
        ((7, 1), [[(0, 2), (0, 1)], [(2, 0), (0, 1)], [(2, 5), (0, 1)]]),
        ((1, 3), [[(0, 1), (0, 3)], [(0, 0), (0, 3)], [(0, 1), (0, 3)]]),
        ((), [[], [], []]),
    ],
)
def test_what_boxes_need_of_a_smaller_tensor(size: tuple[int, ...], expected: list[list[tuple[int, int]]]) -> None:
    found = boxes.restrict(ROWS, (7, 3), size)
    assert ranges(found) == expected
    assert found.places == ROWS.places


def test_sizes() -> None:
    assert boxes.broadcast((7, 1), (3,), (), (1, 3)) == (7, 3)
    assert boxes.broadcast((0, 3), (1, 1)) == (0, 3)
    with pytest.raises(RuntimeError, match=r"tensor a \(7\) must match the size of tensor b \(6\).*dimension 0"):
        boxes.broadcast((7, 3), (6, 1))


def test_what_boxes_of_a_smaller_tensor_make_up() -> None:
    columns = Layout((Box((0,), (1,)), Box((1,), (2,))), (0, 1))
    assert ranges(boxes.lift(columns, (3,), (7, 3))) == [[(0, 7), (0, 1)], [(0, 7), (1, 2)]]
    single = Layout((Box((0, 0), (1, 3)), Box((0, 0), (0, 0))), (0, 1))
    assert ranges(boxes.lift(single, (1, 3), (7, 3))) == [[(0, 7), (0, 3)], [(0, 0), (0, 0)]]
    assert boxes.lift(ROWS, (7, 3), (7, 3)) is ROWS


@pytest.mark.parametrize(("size", "dim", "num_places"), [*itertools.product([(7, 3), (2, 5)], [0, 1], [1, 2, 4])])
def test_chunks_make_up_the_tensor_and_do_not_overlap(size: tuple[int, int], dim: int, num_places: int) -> None:
    layout = boxes.chunk(size, dim, range(num_places))
    assert sum(box.num_elements for box in layout.boxes) == size[0] * size[1]
    assert find_overlap(layout.boxes) is None
    assert layout.is_whole_along(1 - dim, size[1 - dim])


def test_reduced_boxes() -> None:
    reduced = boxes.reduce(ROWS, [1])
    assert ranges(reduced) == [[(0, 2), (0, 1)], [(0, 0), (0, 0)], [(2, 5), (0, 1)]]
    assert ranges(boxes.drop(reduced, [1])) == [[(0, 2)], [(0, 0)], [(2, 5)]]
    assert ranges(boxes.reduce(ROWS, [0, 1]))[2] == [(0, 1), (0, 1)]
    stacked = boxes.stack(boxes.reduce(ROWS, [0]))
    assert ranges(stacked) == [[(0, 1), (0, 1), (0, 3)], [(1, 0), (0, 0), (0, 0)], [(2, 1), (0, 1), (0, 3)]]
    assert find_overlap(stacked.boxes) is None
