"""Boxes and layouts: overlaps are found, moves cover every element once, layouts of operands and results."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.shard.layout import (
    Box,
    Layout,
    broadcast,
    chunk,
    cut,
    drop,
    find_overlap,
    lift,
    plan_moves,
    reduce,
    restrict,
    stack,
    stack_rows,
)


def elements(box: Box) -> set[tuple[int, ...]]:
    spans = [range(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True)]
    return set(itertools.product(*spans))


@st.composite
def layouts(draw: st.DrawFn, sizes: tuple[int, ...]) -> list[Box]:
    """A tensor, cut again and again at random; in random order, with empty boxes among them."""
    boxes = [Box((0,) * len(sizes), sizes)]
    for _ in range(draw(st.integers(0, 5))):
        number = draw(st.integers(0, len(boxes) - 1))
        box = boxes.pop(number)
        dim = draw(st.integers(0, len(sizes) - 1))
        at = draw(st.integers(0, box.sizes[dim]))
        left, right = list(box.sizes), list(box.sizes)
        left[dim], right[dim] = at, box.sizes[dim] - at
        start = list(box.offsets)
        start[dim] += at
        boxes += [Box(box.offsets, tuple(left)), Box(tuple(start), tuple(right))]
    return draw(st.permutations(boxes))


sizes = st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple)
pairs = sizes.flatmap(lambda item: st.tuples(st.just(item), layouts(item), layouts(item)))


@given(pairs)
def test_every_element_moves_once(case: tuple[tuple[int, ...], list[Box], list[Box]]) -> None:
    size, old, new = case
    moved: Counter[tuple[int, ...]] = Counter()
    for move in plan_moves(old, new):
        found = elements(move.box)
        assert found
        assert found <= elements(old[move.source]) & elements(new[move.target])
        moved.update(found)
    assert moved == Counter(elements(Box((0,) * len(size), size)))


@given(pairs)
def test_layouts_do_not_overlap(case: tuple[tuple[int, ...], list[Box], list[Box]]) -> None:
    assert find_overlap(case[1]) is None


boxes = st.tuples(st.tuples(*[st.integers(0, 4)] * 2), st.tuples(*[st.integers(0, 3)] * 2)).map(lambda item: Box(*item))


@given(st.lists(boxes, max_size=6))
def test_overlaps_are_found(found: list[Box]) -> None:
    clashes = {
        (first, second)
        for first, second in itertools.combinations(range(len(found)), 2)
        if elements(found[first]) & elements(found[second])
    }
    pair = find_overlap(found)
    assert pair in clashes if clashes else pair is None


@given(boxes, boxes)
def test_common_parts(first: Box, second: Box) -> None:
    common = first.common_with(second)
    assert (elements(common) if common else set()) == elements(first) & elements(second)


def test_without_dimensions() -> None:
    point = Box((), ())
    assert point.num_elements == 1
    assert find_overlap([point]) is None
    assert find_overlap([point, point]) == (0, 1)
    assert [move.box for move in plan_moves([point], [point])] == [point]


def test_slices() -> None:
    outer, inner = Box((2, 4), (4, 4)), Box((3, 4), (2, 1))
    assert inner.slices_in(outer) == (slice(1, 3), slice(0, 1))


@pytest.mark.parametrize("num_shards", [1, 2, 64])
def test_what_stays_is_one_move_of_its_own(num_shards: int) -> None:
    layout = [Box((4 * number,), (4,)) for number in range(num_shards)]
    assert [(move.source, move.target) for move in plan_moves(layout, layout)] == [(n, n) for n in range(num_shards)]


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
    found = restrict(ROWS, (7, 3), size)
    assert ranges(found) == expected
    assert found.places == ROWS.places


def test_sizes() -> None:
    assert broadcast((7, 1), (3,), (), (1, 3)) == (7, 3)
    assert broadcast((0, 3), (1, 1)) == (0, 3)
    with pytest.raises(RuntimeError, match=r"tensor a \(7\) must match the size of tensor b \(6\).*dimension 0"):
        broadcast((7, 3), (6, 1))


def test_what_boxes_of_a_smaller_tensor_make_up() -> None:
    columns = Layout((Box((0,), (1,)), Box((1,), (2,))), (0, 1))
    assert ranges(lift(columns, (3,), (7, 3))) == [[(0, 7), (0, 1)], [(0, 7), (1, 2)]]
    single = Layout((Box((0, 0), (1, 3)), Box((0, 0), (0, 0))), (0, 1))
    assert ranges(lift(single, (1, 3), (7, 3))) == [[(0, 7), (0, 3)], [(0, 0), (0, 0)]]
    assert lift(ROWS, (7, 3), (7, 3)) is ROWS


@pytest.mark.parametrize(("size", "dim", "num_places"), [*itertools.product([(7, 3), (2, 5)], [0, 1], [1, 2, 4])])
def test_chunks_make_up_the_tensor_and_do_not_overlap(size: tuple[int, int], dim: int, num_places: int) -> None:
    layout = chunk(size, dim, range(num_places))
    assert sum(box.num_elements for box in layout.boxes) == size[0] * size[1]
    assert find_overlap(layout.boxes) is None
    assert layout.is_whole_along(1 - dim, size[1 - dim])


def test_reduced_boxes() -> None:
    reduced = reduce(ROWS, [1])
    assert ranges(reduced) == [[(0, 2), (0, 1)], [(0, 0), (0, 0)], [(2, 5), (0, 1)]]
    assert ranges(drop(reduced, [1])) == [[(0, 2)], [(0, 0)], [(2, 5)]]
    assert ranges(reduce(ROWS, [0, 1]))[2] == [(0, 1), (0, 1)]
    stacked = stack(reduce(ROWS, [0]))
    assert ranges(stacked) == [[(0, 1), (0, 1), (0, 3)], [(1, 0), (0, 0), (0, 0)], [(2, 1), (0, 1), (0, 3)]]
    assert find_overlap(stacked.boxes) is None


@given(st.lists(st.integers(0, 5), max_size=4), st.integers(1, 30))
def test_pieces_make_up_the_box(sizes: list[int], limit: int) -> None:
    box = Box(tuple(range(len(sizes))), tuple(sizes))
    pieces = list(cut(box, limit))
    assert all(piece.num_elements <= limit for piece in pieces) or box.num_elements == 0
    assert sum(piece.num_elements for piece in pieces) == box.num_elements
    assert find_overlap(pieces) is None
    assert all(not piece.num_elements or piece.common_with(box) == piece for piece in pieces)
