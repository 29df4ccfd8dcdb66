"""Boxes of tensors that are broadcast to each other. Integers only.

A tensor of size (5,) or (7, 1) next to one of size (7, 5): every box of the larger one needs a box of the smaller one, and
several may need the same.

    result     |  0  |  1  |        lift       from a box of the smaller tensor to that of the result which it makes up
               |  2  |  3  |        restrict   from a box of the result to what it needs of the smaller tensor
    smaller    | 0,2 | 1,3 |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradwire.shard._geometry import Box
from gradwire.shard.layouts import Layout

Range = tuple[int, int]
"""Offset and length."""


def broadcast(*sizes: Sequence[int]) -> tuple[int, ...]:
    """The size that tensors of these sizes are broadcast to.

    Raises:
        RuntimeError: They do not fit.
    """
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
    """The layout of a tensor of `size` as one of the result that it is broadcast to."""
    if tuple(size) == tuple(result):
        return layout
    num_new = len(result) - len(size)

    def lifted(box: Box) -> Box:
        ranges: list[Range] = [(0, length) for length in result[:num_new]]
        for dim, (offset, length) in enumerate(_ranges(box)):
            is_same = size[dim] == result[num_new + dim]
            ranges.append((offset, length) if is_same else (0, result[num_new + dim] * length))
        return _box(ranges)

    return _map(layout, lifted)


def restrict(layout: Layout, result: Sequence[int], size: Sequence[int]) -> Layout:
    """What each box of a result needs of a tensor of `size` that is broadcast to it."""
    if tuple(size) == tuple(result):
        return layout
    num_new = len(result) - len(size)

    def restricted(box: Box) -> Box:
        ranges = _ranges(box)[num_new:]
        return _box(
            [
                (offset, length) if size[dim] == result[num_new + dim] else (0, min(1, length))
                for dim, (offset, length) in enumerate(ranges)
            ]
        )

    return _map(layout, restricted)


def reduce(layout: Layout, dims: Sequence[int]) -> Layout:
    """What each box makes up of a tensor whose dimensions `dims` were reduced to length 1; nothing if it is empty."""

    def reduced(box: Box) -> Box:
        if not box.num_elements:
            return nothing(len(box.sizes))
        return _box([(0, 1) if dim in dims else item for dim, item in enumerate(_ranges(box))])

    return _map(layout, reduced)


def drop(layout: Layout, dims: Sequence[int]) -> Layout:
    """The layout without some dimensions, along which the tensor has length 1."""
    return _map(layout, lambda box: _box([item for dim, item in enumerate(_ranges(box)) if dim not in dims]))


def stack(layout: Layout) -> Layout:
    """Every box by itself, along a new first dimension."""
    boxes = tuple(_box([(number, min(1, box.num_elements)), *_ranges(box)]) for number, box in enumerate(layout.boxes))
    return Layout(boxes, layout.places)


def chunk(size: Sequence[int], dim: int, places: Sequence[int | str]) -> Layout:
    """Parts of equal length along one dimension, as far as that goes."""
    step = -(-size[dim] // len(places))
    boxes = []
    for number in range(len(places)):
        start = min(number * step, size[dim])
        ranges = [(0, length) for length in size]
        ranges[dim] = (start, min(step, size[dim] - start))
        boxes.append(_box(ranges))
    return Layout(tuple(boxes), tuple(places))


def nothing(num_dims: int) -> Box:
    """An empty box."""
    return Box((0,) * num_dims, (0,) * num_dims)


def _ranges(box: Box) -> list[Range]:
    return list(zip(box.offsets, box.sizes, strict=True))


def _box(ranges: Sequence[Range]) -> Box:
    return Box(tuple(offset for offset, _ in ranges), tuple(length for _, length in ranges))


def _map(layout: Layout, change: Callable[[Box], Box]) -> Layout:
    return Layout(tuple(change(box) for box in layout.boxes), layout.places)
