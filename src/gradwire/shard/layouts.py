"""Who has which part of a tensor. Integers and names only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.shard._geometry import Box, find_overlap

Place = int | str
"""A rank of a process group, or the name of an RPC worker."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Boxes, and the place that has each.

    Boxes may be empty, and may overlap: as copies of the same elements, or as parts of sums.
    """

    boxes: tuple[Box, ...]
    places: tuple[Place, ...]

    def of(self, place: Place) -> list[int]:
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
