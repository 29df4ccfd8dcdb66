"""Who has which part of a tensor. Integers and names only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """How many elements it has; 1 without dimensions."""
        return math.prod(self.sizes)

    def common_with(self, other: Box) -> Box | None:
        """What both have; None if that is nothing."""
        offsets, sizes = [], []
        for mine, size, theirs, their_size in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, end = max(mine, theirs), min(mine + size, theirs + their_size)
            if start >= end:
                return None
            offsets.append(start)
            sizes.append(end - start)
        return Box(tuple(offsets), tuple(sizes))

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds `outer`."""
        return tuple(
            slice(offset - start, offset - start + size)
            for offset, size, start in zip(self.offsets, self.sizes, outer.offsets, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Move:
    """A part that goes from one box of the old layout to one of the new, by their numbers."""

    source: int
    target: int
    box: Box


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Two boxes that have an element in common, by their numbers; None if there are none."""
    full = [number for number, box in enumerate(boxes) if box.num_elements]
    if not full or not boxes[full[0]].offsets:
        return (full[0], full[1]) if len(full) > 1 else None
    dim = _most_divided(boxes)
    order = sorted(full, key=lambda number: boxes[number].offsets[dim])
    open_boxes: list[int] = []  # those that reach beyond where the sweep is
    for number in order:
        box = boxes[number]
        open_boxes = [
            item for item in open_boxes if boxes[item].offsets[dim] + boxes[item].sizes[dim] > box.offsets[dim]
        ]
        for other in open_boxes:
            if box.common_with(boxes[other]) is not None:
                return min(number, other), max(number, other)
        open_boxes.append(number)
    return None


def _most_divided(boxes: Sequence[Box]) -> int:
    """The dimension along which boxes differ most: a sweep along it compares the fewest."""
    return max(range(len(boxes[0].offsets)), key=lambda dim: len({box.offsets[dim] for box in boxes}))


def plan_moves(old: Sequence[Box], new: Sequence[Box]) -> Iterator[Move]:
    """What each new box takes from each old one; both layouts cover the same tensor and have no overlaps."""
    if not old or not new:
        return
    if not old[0].offsets:
        yield Move(0, 0, old[0])
        return
    dim = _most_divided([*old, *new])
    sources = sorted(range(len(old)), key=lambda number: old[number].offsets[dim])
    for target, box in enumerate(new):
        end = box.offsets[dim] + box.sizes[dim]
        for source in sources:
            if old[source].offsets[dim] >= end:
                break
            common = old[source].common_with(box)
            if common is not None:
                yield Move(source, target, common)


def cut(box: Box, limit: int) -> Iterator[Box]:
    """Pieces of at most so many elements that make up a box, along its first dimensions, so that memory is read in order."""
    dim = next((number for number, size in enumerate(box.sizes) if size > 1), None)
    if dim is None or box.num_elements <= limit:
        yield box
        return
    step = max(1, limit // math.prod(box.sizes[dim + 1 :]))
    for start in range(0, box.sizes[dim], step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = box.offsets[dim] + start, min(step, box.sizes[dim] - start)
        yield from cut(Box(tuple(offsets), tuple(sizes)), limit)


Place = int | str
"""A rank of a process group, or the name of an RPC worker."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Boxes, and the place that has each.

    Boxes may be empty, and may overlap: as copies of the same elements, or as parts of sums.
    """

    boxes: tuple[Box, ...]
    places: tuple[Place, ...]

    def numbers_at(self, place: Place) -> list[int]:
        """Numbers of the boxes of a place."""
        return [number for number, owner in enumerate(self.places) if owner == place]

    @property
    def has_overlaps(self) -> bool:
        """Whether an element is in several boxes."""
        return find_overlap(self.boxes) is not None

    @property
    def num_dims(self) -> int:
        """Of the tensor."""
        return len(self.boxes[0].sizes)

    def is_whole_along(self, dim: int, length: int) -> bool:
        """Whether no box that is not empty is cut along a dimension of that length."""
        return all(box.sizes[dim] == length for box in self.boxes if box.num_elements)


def whole(size: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(size), tuple(size))


def everywhere(size: Sequence[int], places: Sequence[Place]) -> Layout:
    """All of a tensor at every place."""
    return Layout((whole(size),) * len(places), tuple(places))


def for_everybody(layout: Layout, places: Sequence[Place]) -> Layout:
    """The layout, with an empty box for each place that has none.

    In a process group every rank takes part in every operation, and in the backward of it: so every rank has a tensor of
    each sharded tensor, if only an empty one.
    """
    missing = [place for place in places if place not in layout.places]
    nothing = Box((0,) * layout.num_dims, (0,) * layout.num_dims)
    return Layout(layout.boxes + (nothing,) * len(missing), layout.places + tuple(missing))


def stack_rows(numbers: Sequence[int], size: Sequence[int], places: Sequence[Place]) -> Layout:
    """Consecutive rows: so many for each place, of a tensor with these other dimensions."""
    boxes, start = [], 0
    for number in numbers:
        boxes.append(Box((start, *(0 for _ in size)), (number, *size)))
        start += number
    return Layout(tuple(boxes), tuple(places))
