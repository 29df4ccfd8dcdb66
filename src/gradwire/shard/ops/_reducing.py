"""Reductions of sharded tensors: of each part where it is, then of what the parts gave.

    the reduced dimensions are whole in every part   each part is reduced; the result stays sharded
    sums (`add_up`)                                  the parts' sums are added: a plain tensor, the same for everybody
    other reductions (`combine`)                     what the parts gave is reduced once more: plain, too
    what cannot be put together from parts           the tensor is divided anew, so that the dimensions are whole
    all dimensions are reduced                       the result is plain

Plain results are replicated: their gradient counts as the same for everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradwire.shard.engines import Part
from gradwire.shard.layouts import Layout, whole
from gradwire.shard.ops import _broadcasting as boxes
from gradwire.shard.ops._operands import align, probe, size_of
from gradwire.shard.tensor import ShardedTensor, from_layout

Local = Callable[..., torch.Tensor]
"""``local(part, dims, keepdim, **options)``; at the top of a module, so that it is found everywhere."""


def dims_of(tensor: torch.Tensor, dim: Any) -> list[int]:
    """The dimensions that somebody named: none stands for all.

    Raises:
        IndexError: There is no such dimension.
    """
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(tensor.dim()))
    named = list(dim) if isinstance(dim, list | tuple) else [dim]
    for item in named:
        if not -tensor.dim() <= item < tensor.dim():
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-tensor.dim()}, {tensor.dim() - 1}], got {item})"
            )
    return sorted({item % tensor.dim() for item in named})


def is_whole(tensor: ShardedTensor, dims: Sequence[int]) -> bool:
    """Whether no part is cut along these dimensions, and others are left."""
    return len(dims) < tensor.dim() and all(tensor._layout.is_whole_along(dim, tensor.size(dim)) for dim in dims)


def outline(local: Local, tensor: torch.Tensor, dims: Sequence[int], options: dict[str, Any]) -> torch.Tensor:
    """The reduction of a small tensor of the same kind: tells dtype and need of a gradient, and raises what is to raise."""
    harmless = {"correction": 0} if "correction" in options else {}  # so few elements would give a warning
    return local(probe(tensor, 2), list(dims), True, **{**options, **harmless})


def reduced_size(tensor: torch.Tensor, dims: Sequence[int], keepdim: bool = True) -> list[int]:
    """What is left of the size of a tensor."""
    size = enumerate(size_of(tensor))
    return [1 if dim in dims else length for dim, length in size if keepdim or dim not in dims]


def reduce_parts(
    local: Local, tensor: ShardedTensor, dims: Sequence[int], keepdim: bool, options: dict[str, Any]
) -> ShardedTensor:
    """The result of a reduction along dimensions that are whole: it stays sharded."""
    expected = outline(local, tensor, dims, options)
    layout = boxes.reduce(tensor._layout, dims)
    layout = layout if keepdim else boxes.drop(layout, dims)
    parts = _run(local, tensor, dims, keepdim, options)
    size, like = reduced_size(tensor, dims, keepdim), tensor._like.to(expected.dtype)
    return from_layout(tensor._engine, layout, parts, size, like, expected.requires_grad)


def add_up(
    local: Local, tensor: ShardedTensor, dims: Sequence[int], keepdim: bool, options: dict[str, Any]
) -> torch.Tensor:
    """The sum of what a reduction gives for each part: a plain tensor."""
    like = tensor._like.to(outline(local, tensor, dims, options).dtype)
    layout = boxes.reduce(tensor._layout, dims)
    parts = _run(local, tensor, dims, True, options)
    total = tensor._engine.replicate(parts, layout, reduced_size(tensor, dims), like, is_sum=True)
    return total if keepdim else _squeeze(total, dims)


def combine(
    local: Local, tensor: ShardedTensor, dims: Sequence[int], keepdim: bool, options: dict[str, Any], neutral: Any
) -> torch.Tensor:
    """What a reduction gives for what it gave for each part: a plain tensor.

    Args:
        local: The reduction.
        tensor: What is reduced.
        dims: Along which dimensions.
        keepdim: Whether they stay, with length 1.
        options: For the reduction.
        neutral: What changes nothing, where a part has nothing to say.
    """
    layout = boxes.stack(boxes.reduce(tensor._layout, dims))
    like = tensor._like.to(outline(local, tensor, dims, options).dtype)
    parts = _run(local, tensor, dims, True, options, is_stacked=True)
    size = (len(layout.boxes), *reduced_size(tensor, dims))
    stacked = tensor._engine.replicate(parts, layout, size, like)
    total = local(torch.where(_covered(layout, size).to(stacked.device), stacked, neutral), [0], False, **options)
    return total if keepdim else _squeeze(total, dims)


def _covered(layout: Layout, size: Sequence[int]) -> torch.Tensor:
    covered = torch.zeros(*size, dtype=torch.bool)
    for box in layout.boxes:
        covered[box.slices_in(whole(size))] = True
    return covered


def _squeeze(tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    return tensor.reshape([length for dim, length in enumerate(tensor.size()) if dim not in dims])


def _run(
    local: Local,
    tensor: ShardedTensor,
    dims: Sequence[int],
    keepdim: bool,
    options: dict[str, Any],
    is_stacked: bool = False,
) -> list[Part]:
    flags = [not box.num_elements for box in tensor._boxes()]
    constants = {"local": local, "dims": list(dims), "keepdim": keepdim, "options": options, "is_stacked": is_stacked}
    return tensor._engine.run(reduce_part, tensor._layout, tensor._parts, flags, **constants)


def reduce_part(
    part: torch.Tensor,
    is_empty: bool,
    local: Local,
    dims: list[int],
    keepdim: bool,
    options: dict[str, Any],
    is_stacked: bool,
) -> torch.Tensor:
    """What one part gives: nothing if it is empty, but even that has its place in the graph."""
    if not is_empty:
        found = local(part, dims, keepdim, **options)
        return found.unsqueeze(0) if is_stacked else found
    dtype = local(part.new_ones([1] * part.dim()), dims, keepdim, **options).dtype
    found = torch.sum(part, dims, keepdim, dtype=dtype)
    found = found[tuple(slice(0, 0) for _ in range(found.dim()))]
    return found.reshape(0, *found.size()) if is_stacked else found


def made_whole(tensor: ShardedTensor, dims: Sequence[int]) -> ShardedTensor | None:
    """The tensor, divided so that these dimensions are whole; None if there is no other to divide it along."""
    if is_whole(tensor, dims):
        return tensor
    kept = [dim for dim in range(tensor.dim()) if dim not in dims]
    if not kept:
        return None
    engine = tensor._engine
    places = list(dict.fromkeys(tensor._layout.places))
    layout = engine.complete(boxes.chunk(tensor.size(), max(kept, key=tensor.size), places))
    parts = engine.move(tensor._parts, tensor._layout, layout, tensor._like)
    requires_grad = tensor.requires_grad and torch.is_grad_enabled()
    return from_layout(engine, layout, parts, tensor.size(), tensor._like, requires_grad)


# -- the largest, of which there may be several ------------------------------------------------------------------------


def share_gradient(tensor: ShardedTensor, extreme: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    """The largest or smallest elements, with their gradient: elements that are equal share it, wherever they are.

    Args:
        tensor: What they are the largest or smallest of.
        extreme: They themselves, without a gradient, with the reduced dimensions.
        dims: The reduced dimensions.
        keepdim: Whether these stay.
    """
    engine, layout, size = tensor._engine, boxes.reduce(tensor._layout, dims), extreme.size()
    column = align(extreme, tensor, tensor._layout, tensor.size())
    with torch.no_grad():
        ties = engine.run(count_equal, tensor._layout, tensor._parts, column, dims=list(dims))
        number = engine.replicate(ties, layout, size, tensor._like, is_sum=True)
    numbers = align(number, tensor, tensor._layout, tensor.size())
    parts = engine.run(zeros_of_equal, tensor._layout, tensor._parts, column, numbers, dims=list(dims))
    found = extreme + engine.replicate(parts, layout, size, tensor._like, is_sum=True)
    return found if keepdim else _squeeze(found, dims)


def count_equal(part: torch.Tensor, extreme: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """How many elements are equal to the extreme ones."""
    found = (part == extreme).sum(dims, keepdim=True).to(part.dtype)
    return found if part.numel() else found[tuple(slice(0, 0) for _ in range(found.dim()))]


def zeros_of_equal(part: torch.Tensor, extreme: torch.Tensor, number: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """Zeros, through which elements that are equal to the extreme ones get their shares of the gradient."""
    found: torch.Tensor = _Zeros.apply(part, (part == extreme).to(part.dtype) / number, dims)  # type: ignore[no-untyped-call]
    return found if part.numel() else found[tuple(slice(0, 0) for _ in range(found.dim()))]


class _Zeros(torch.autograd.Function):
    """Zeros of the reduced size, with the gradient of a weighted sum."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, weights: torch.Tensor, dims: list[int]) -> torch.Tensor:
        ctx.save_for_backward(weights)
        return part.new_zeros([1 if dim in dims else length for dim, length in enumerate(part.size())])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (weights,) = ctx.saved_tensors
        return gradients[0] * weights, None, None
