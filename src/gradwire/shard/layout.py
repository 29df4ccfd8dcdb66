"""Boxes of tensors and layouts: which place holds which part. Integers and names only.

Operations derive the layouts of their operands and results here: broadcast, reduced, stacked, chunked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

Place = int | str
"""A rank of a process group, or the name of an RPC worker."""

Range = tuple[int, int]
"""Offset and length along one dimension."""


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def from_ranges(cls, ranges: Iterable[Range]) -> Box:
        pairs = list(ranges)
        return cls(tuple(offset for offset, _ in pairs), tuple(length for _, length in pairs))

    @property
    def ranges(self) -> list[Range]:
        return list(zip(self.offsets, self.sizes, strict=True))

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)  # 1 without dimensions

    def with_range(self, dim: int, offset: int, length: int) -> Box:
        ranges = self.ranges
        ranges[dim] = offset, length
        return Box.from_ranges(ranges)

    def common_with(self, other: Box) -> Box | None:
        """Return the intersection; None if it is empty."""
        offsets, sizes = [], []
        for mine, size, theirs, their_size in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, end = max(mine, theirs), min(mine + size, theirs + their_size)
            if start >= end:
                return None
            offsets.append(start)
            sizes.append(end - start)
        return Box(tuple(offsets), tuple(sizes))

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Return where this box lies in a tensor that holds `outer`."""
        return tuple(
            slice(offset - start, offset - start + size)
            for offset, size, start in zip(self.offsets, self.sizes, outer.offsets, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """Boxes, and the place that holds each.

    Boxes may be empty, and may overlap: as copies of the same elements, or as parts of sums.
    """

    boxes: tuple[Box, ...]
    places: tuple[Place, ...]

    def numbers_at(self, place: Place) -> list[int]:
        return [number for number, owner in enumerate(self.places) if owner == place]

    def map(self, change: Callable[[Box], Box]) -> Layout:
        return Layout(tuple(change(box) for box in self.boxes), self.places)

    def is_whole_along(self, dim: int, length: int) -> bool:
        """Return whether no box with elements is cut along a dimension of that length."""
        return all(box.sizes[dim] == length for box in self.boxes if box.num_elements)


def whole(size: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return Box((0,) * len(size), tuple(size))


def nothing(num_dims: int) -> Box:
    """Return an empty box."""
    return Box((0,) * num_dims, (0,) * num_dims)


def everywhere(size: Sequence[int], places: Sequence[Place]) -> Layout:
    """Return the layout with the whole tensor at every place."""
    return Layout((whole(size),) * len(places), tuple(places))


def stack_rows(numbers: Sequence[int], size: Sequence[int], places: Sequence[Place]) -> Layout:
    """Return consecutive rows: so many for each place, of a tensor with these other dimensions."""
    boxes, start = [], 0
    for number in numbers:
        boxes.append(Box((start, *(0 for _ in size)), (number, *size)))
        start += number
    return Layout(tuple(boxes), tuple(places))


def chunk(size: Sequence[int], dim: int, places: Sequence[Place]) -> Layout:
    """Return chunks of equal length along one dimension, the last ones shorter or empty."""
    total = size[dim]
    step = -(-total // len(places))
    starts = [min(number * step, total) for number in range(len(places))]
    boxes = (whole(size).with_range(dim, start, min(step, total - start)) for start in starts)
    return Layout(tuple(boxes), tuple(places))


def find_dim(dim: int, num_dims: int) -> int:
    """Return a dimension that may count from the end, counted from the start."""
    bound = max(num_dims, 1)
    if not -bound <= dim < bound:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-bound}, {bound - 1}], but got {dim})")
    return dim % bound


def broadcast(*sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the size that tensors of these sizes are broadcast to."""
    num_dims = max(map(len, sizes))
    result = [1] * num_dims
    for size in sizes:
        for dim, length in enumerate(size, num_dims - len(size)):
            if result[dim] == 1:
                result[dim] = length
            elif length not in (1, result[dim]):
                raise RuntimeError(
                    f"The size of tensor a ({result[dim]}) must match the size of tensor b ({length}) at non-singleton "
                    f"dimension {dim}"
                )
    return tuple(result)


def lift(layout: Layout, size: Sequence[int], result: Sequence[int]) -> Layout:
    """Return the layout of a tensor of `size` as a layout of the result that it is broadcast to."""
    if tuple(size) == tuple(result):
        return layout
    num_new = len(result) - len(size)

    def lifted(box: Box) -> Box:
        ranges = [(0, length) for length in result[:num_new]]
        for (offset, length), own, target in zip(box.ranges, size, result[num_new:], strict=True):
            ranges.append((offset, length) if own == target else (0, target * length))
        return Box.from_ranges(ranges)

    return layout.map(lifted)


def restrict(layout: Layout, result: Sequence[int], size: Sequence[int]) -> Layout:
    """Return what each box of a result needs of a tensor of `size` that is broadcast to it."""
    if tuple(size) == tuple(result):
        return layout
    num_new = len(result) - len(size)

    def restricted(box: Box) -> Box:
        return Box.from_ranges(
            (offset, length) if own == target else (0, min(1, length))
            for (offset, length), own, target in zip(box.ranges[num_new:], size, result[num_new:], strict=True)
        )

    return layout.map(restricted)


def reduce(layout: Layout, dims: Sequence[int]) -> Layout:
    """Return what each box makes up of a tensor whose dimensions `dims` were reduced to length 1."""

    def reduced(box: Box) -> Box:
        if not box.num_elements:
            return nothing(len(box.sizes))
        return Box.from_ranges((0, 1) if dim in dims else item for dim, item in enumerate(box.ranges))

    return layout.map(reduced)


def drop(layout: Layout, dims: Sequence[int]) -> Layout:
    """Return the layout without some dimensions, along which the tensor has length 1."""
    return layout.map(lambda box: Box.from_ranges(item for dim, item in enumerate(box.ranges) if dim not in dims))


def stack(layout: Layout) -> Layout:
    """Return the layout with every box by itself along a new first dimension."""
    boxes = enumerate(layout.boxes)
    stacked = (Box.from_ranges([(number, min(1, box.num_elements)), *box.ranges]) for number, box in boxes)
    return Layout(tuple(stacked), layout.places)


@dataclass(frozen=True, slots=True)
class Move:
    """A part that goes from one box of the old layout to one of the new, by number."""

    source: int
    target: int
    box: Box


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return the numbers of two boxes that have an element in common; None if there are none."""
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
    """Return the dimension along which boxes differ most: a sweep along it compares the fewest."""
    return max(range(len(boxes[0].offsets)), key=lambda dim: len({box.offsets[dim] for box in boxes}))


def plan_moves(old: Sequence[Box], new: Sequence[Box]) -> Iterator[Move]:
    """Yield what each new box takes from each old one; both layouts cover the same tensor without overlaps."""
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
    """Yield pieces of at most `limit` elements, cut along the first dimensions, so that memory is read in order."""
    dim = next((number for number, size in enumerate(box.sizes) if size > 1), None)
    if dim is None or box.num_elements <= limit:
        yield box
        return
    step = max(1, limit // math.prod(box.sizes[dim + 1 :]))
    for start in range(0, box.sizes[dim], step):
        piece = box.with_range(dim, box.offsets[dim] + start, min(step, box.sizes[dim] - start))
        yield from cut(piece, limit)
