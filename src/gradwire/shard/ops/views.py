"""Slices, splits and reshapes of sharded tensors: every shard contributes its part of the result, and nothing is moved.

A part of a tensor (`narrow`, `chunk`, `split`) takes from every shard what they have in common, which may be nothing. For
another shape (`view`, `reshape`) dimensions are taken in groups that hold the same elements before and after:

    old   (16, 35, 26)       groups   16 | 35 | 26          a shard with rows 4 to 7 of 16
    new   (4, 4, 35, 26)              4, 4 | 35 | 26        has row 1 of 4, and all 4 in it

A shard stays a box if what it has of each group is one run of elements, and the run a box of the new dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from gradwire.shard.dispatch import implements, unsupported
from gradwire.shard.layout import Box, Layout, Range, find_dim
from gradwire.shard.ops.pointwise import needs_gradient
from gradwire.shard.sharding_spec import ChunkShardingSpec, get_split_size
from gradwire.shard.tensor import ShardedTensor, from_layout

_T: Any = torch.Tensor

Sizes = Sequence[int]


@implements(torch.narrow, _T.narrow)
def _narrow(func: Any, input: ShardedTensor, dim: int, start: Any, length: int) -> ShardedTensor:
    dim, start = find_dim(dim, input.dim()), int(start)
    total = input.size(dim)
    start = start + total if start < 0 else start
    if not (0 <= start <= total and 0 <= length <= total - start):
        raise RuntimeError(f"start ({start}) + length ({length}) exceeds dimension size ({total}).")
    return _take(input, dim, start, length)


@implements(torch.chunk, _T.chunk)
def _chunk(func: Any, input: ShardedTensor, chunks: int, dim: int = 0) -> tuple[ShardedTensor, ...]:
    if chunks <= 0:
        raise RuntimeError(f"chunk expects `chunks` to be greater than 0, got: {chunks}")
    length = input.size(find_dim(dim, input.dim()))
    return _split(func, input, get_split_size(length, chunks) if length else [0] * chunks, dim)


@implements(torch.split, _T.split)
def _split(
    func: Any, tensor: ShardedTensor, split_size_or_sections: Any = None, dim: int = 0, split_size: Any = None
) -> tuple[ShardedTensor, ...]:
    step: int | Sizes = split_size_or_sections if split_size is None else split_size
    dim = find_dim(dim, tensor.dim())
    total = tensor.size(dim)
    if isinstance(step, int):
        if step <= 0 and (step < 0 or total > 0):
            raise RuntimeError(f"split expects split_size to be positive, but got split_size={step}")
        starts = range(0, total, step) if total else range(1)
        lengths: Sizes = [min(step, total - start) for start in starts]
    else:
        lengths = list(step)
        if sum(lengths) != total or any(length < 0 for length in lengths):
            raise RuntimeError(f"split_with_sizes expects split_sizes to sum exactly to {total}, but got {lengths}")
    ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
    return tuple(_take(tensor, dim, end - length, length) for end, length in zip(ends, lengths, strict=True))


def _take(tensor: ShardedTensor, dim: int, start: int, length: int) -> ShardedTensor:
    """Return a slice between two positions along a dimension."""
    backend, layout = tensor._backend, tensor._layout
    boxes, ranges = [], []
    for box in layout.boxes:
        offset, size = box.offsets[dim], box.sizes[dim]
        first = min(max(offset, start), start + length)
        last = max(min(offset + size, start + length), first)
        boxes.append(box.with_range(dim, first - start, last - first))
        ranges.append((min(max(first - offset, 0), size), last - first))
    numbers = backend.box_numbers(layout)
    starts, lengths = [ranges[number][0] for number in numbers], [ranges[number][1] for number in numbers]
    parts = backend.run(torch.narrow, layout, tensor._parts, [dim] * len(numbers), starts, lengths)
    new_size = [length if number == dim else item for number, item in enumerate(tensor.size())]
    made = derive_view(tensor, Layout(tuple(boxes), layout.places), parts, new_size)
    spec = tensor._sharding_spec
    if isinstance(spec, ChunkShardingSpec) and spec.dim % tensor.dim() != dim:
        made._sharding_spec = spec
    return made


@implements(_T.view, _T.reshape, torch.reshape)
def _view(func: Any, input: ShardedTensor, *shape: Any, **named: Any) -> ShardedTensor:
    lengths = [*shape, *named.values()]
    if len(lengths) == 1 and isinstance(lengths[0], list | tuple):
        lengths = list(lengths[0])
    if not all(type(item) is int for item in lengths):
        raise unsupported(func, "pass the sizes of the new dimensions")
    return _reshape(func, input, _fill_in(lengths, input.numel()))


@implements(_T.view_as, _T.reshape_as)
def _view_as(func: Any, tensor: ShardedTensor, other: torch.Tensor) -> ShardedTensor:
    return _reshape(func, tensor, other.size())


@implements(torch.flatten, _T.flatten)
def _flatten(func: Any, input: ShardedTensor, start_dim: int = 0, end_dim: int = -1) -> ShardedTensor:
    size = list(input.size())
    first, last = find_dim(start_dim, len(size)), find_dim(end_dim, len(size))
    if first > last:
        raise RuntimeError("flatten() has invalid args: start_dim cannot come after end_dim")
    return _reshape(func, input, [*size[:first], math.prod(size[first : last + 1]), *size[last + 1 :]])


@implements(torch.unsqueeze, _T.unsqueeze)
def _unsqueeze(func: Any, input: ShardedTensor, dim: int) -> ShardedTensor:
    size = list(input.size())
    size.insert(find_dim(dim, len(size) + 1), 1)
    return _reshape(func, input, size)


@implements(torch.squeeze, _T.squeeze)
def _squeeze(func: Any, input: ShardedTensor, dim: Any = None) -> ShardedTensor:
    size = input.size()
    wanted = range(len(size)) if dim is None else [dim] if isinstance(dim, int) else dim
    dims = {find_dim(item, len(size)) for item in wanted}
    return _reshape(func, input, [length for dim, length in enumerate(size) if dim not in dims or length != 1])


def _fill_in(shape: Sizes, num_elements: int) -> list[int]:
    """Return the shape, with -1 replaced by the length that fits."""
    unknown = [dim for dim, length in enumerate(shape) if length == -1]
    known = math.prod(length for length in shape if length != -1)
    found = list(shape)
    if len(unknown) > 1:
        raise RuntimeError("only one dimension can be inferred")
    if unknown and known > 0:
        found[unknown[0]] = num_elements // known
    if any(length < 0 for length in found) or math.prod(found) != num_elements:
        raise RuntimeError(f"shape '{list(shape)}' is invalid for input of size {num_elements}")
    return found


def _reshape(func: Any, tensor: ShardedTensor, size: Sizes) -> ShardedTensor:
    old, new = list(tensor.size()), list(size)
    if math.prod(old) != math.prod(new):
        raise RuntimeError(f"shape '{new}' is invalid for input of size {math.prod(old)}")
    backend = tensor._backend
    groups = list(_group(old, new))
    boxes = [_regroup(box, groups) for box in tensor._layout.boxes]
    if any(box is None for box in boxes):
        raise unsupported(
            func,
            f"the shards of a tensor of size {old} with {tensor._sharding_spec} are not contiguous boxes of size "
            f"{new}; redistribute() it along another dimension first",
        )
    layout = Layout(tuple(box for box in boxes if box is not None), tensor._layout.places)
    sizes = [list(layout.boxes[number].sizes) for number in backend.box_numbers(layout)]
    run = _T.view if func in (_T.view, _T.view_as) else _T.reshape
    made = derive_view(tensor, layout, backend.run(run, tensor._layout, tensor._parts, sizes), new)
    batch = tensor._batch
    if batch is not None:  # the rows are whose they were, if they still are rows
        rows = [_regroup(box, groups) for box in batch.boxes]
        if all(row is not None for row in rows):
            made._batch = Layout(tuple(row for row in rows if row is not None), batch.places)
    return made


def derive_view(tensor: ShardedTensor, layout: Layout, parts: Sequence[Any], size: Sizes) -> ShardedTensor:
    """Create a tensor from parts computed from those of another one; it requires grad if the other does."""
    return from_layout(tensor._backend, layout, parts, size, tensor._like, needs_gradient(tensor), tensor)


@implements(torch.t, _T.t, _T.T.__get__, _T.mT.__get__)
def _transpose_matrix(func: Any, input: ShardedTensor) -> ShardedTensor:
    if input.dim() != 2:
        raise unsupported(func, f"it has {input.dim()} dimensions, not 2; name the dimensions with transpose")
    return _transpose(func, input, 0, 1)


@implements(torch.transpose, _T.transpose, torch.swapaxes, _T.swapaxes, torch.swapdims, _T.swapdims)
def _transpose(func: Any, input: ShardedTensor, *dims: int, **named: int) -> ShardedTensor:
    """Transpose every part where it is, and its place in the whole."""
    num_dims = input.dim()
    first, second = (find_dim(dim, num_dims) for dim in (*dims, *named.values()))
    order = list(range(num_dims))
    order[first], order[second] = second, first
    layout = input._layout.map(lambda box: Box.from_ranges(box.ranges[dim] for dim in order))
    parts = input._backend.run(torch.transpose, input._layout, input._parts, dim0=first, dim1=second)
    made = derive_view(input, layout, parts, [input.size(dim) for dim in order])
    spec = input._sharding_spec
    if isinstance(spec, ChunkShardingSpec):  # one chunk alone does not tell along which dimension it was cut
        made._sharding_spec = replace(spec, dim=order[spec.dim % num_dims])
    return made


Group = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Dimensions before, and the lengths of those and of the ones after, that hold the same elements."""


def _group(old: Sizes, new: Sizes) -> Iterator[Group]:
    """Yield the smallest runs of dimensions that have as many elements in both shapes."""
    i = j = 0
    while i < len(old) or j < len(new):
        first, start = i, j
        num_old = num_new = 1
        while num_old != num_new or (i == first and j == start):
            if i < len(old) and (num_old <= num_new or j == len(new)):
                num_old, i = num_old * old[i], i + 1
            elif j < len(new):
                num_new, j = num_new * new[j], j + 1
            else:
                break
        yield tuple(range(first, i)), tuple(old[first:i]), tuple(new[start:j])


def _regroup(box: Box, groups: Sequence[Group]) -> Box | None:
    """Return the same elements as a box of the new shape; None if they are not a box."""
    if not box.num_elements:
        return _regroup_nothing(box, groups)
    ranges: list[Range] = []
    for dims, old, new in groups:
        run = _run_of([box.ranges[dim] for dim in dims], old)
        found = None if run is None else _ranges_of(run, new)
        if found is None:
            return None
        ranges += found
    return Box.from_ranges(ranges)


def _regroup_nothing(box: Box, groups: Sequence[Group]) -> Box | None:
    """Return a box that is empty along the first of the dimensions that it was empty along; a number cannot be empty."""
    sizes: list[int] = []
    for dims, _, new in groups:
        is_empty = bool(new) and any(box.sizes[dim] == 0 for dim in dims)
        sizes += [0, *new[1:]] if is_empty else new
    if sizes and 0 not in sizes:  # the dimension is gone
        sizes[0] = 0
    return Box((0,) * len(sizes), tuple(sizes)) if sizes else None


def _run_of(ranges: Sequence[Range], sizes: Sizes) -> Range | None:
    """Return the first element of a box and how many it has, if they lie one after the other."""
    start, number, is_whole = 0, 1, True
    stride = 1
    for (offset, length), size in zip(reversed(ranges), reversed(sizes), strict=True):
        if not is_whole and length != 1:
            return None
        start += offset * stride
        number *= length
        stride *= size
        is_whole = is_whole and length == size
    return start, number


def _ranges_of(run: Range, sizes: Sizes) -> list[Range] | None:
    """Return elements that lie one after the other as the ranges of a box; None if they are not a box."""
    start, number = run
    ranges: list[Range] = []
    for size in reversed(sizes):
        if number % size == 0 and start % size == 0:  # all of this dimension, or of nothing else
            ranges.append((0, size))
            number //= size
        else:
            if start % size + number > size:
                return None
            ranges.append((start % size, number))
            number = 1
        start //= size
    return ranges[::-1] if number == 1 else None
