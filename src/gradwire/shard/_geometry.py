"""Boxes inside a tensor: which overlap, what they leave uncovered, and what has to move where. Integers only.

A shard is a box: offsets and sizes along every dimension. To go from one layout to another, each box of the new one takes
from each box of the old one what they have in common. The old boxes do not overlap, so no element is sent twice; elements
that are where they belong are not sent at all.

    old:  |---- 0 ----|---- 1 ----|            moves:  0 -> a   all of 0
    new:  |------- a -------|- b -|                    1 -> a   the left half of 1
                                                       1 -> b   the right half of 1
"""

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
