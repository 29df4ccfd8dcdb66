"""Boxes: overlaps are found, and a change of layout moves every element once."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.shard.layout import Box, find_overlap, plan_moves


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
