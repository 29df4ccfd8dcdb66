"""`linear`, `matmul`, `mm`, `addmm` and `bmm`: products of blocks, each where one of its operands is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from gradwire.shard.backend import Backend, Part
from gradwire.shard.dispatch import implements, unsupported
from gradwire.shard.layout import Box, Layout, chunk
from gradwire.shard.ops.embedding import MAX_DIMS, join_rows
from gradwire.shard.ops.pointwise import check_same_group, needs_gradient, take_parts
from gradwire.shard.sharding_spec import ChunkShardingSpec
from gradwire.shard.tensor import ShardedTensor, first_here, from_layout

_T: Any = torch.Tensor


@implements(F.linear)
def _linear(func: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not isinstance(input, ShardedTensor) and not isinstance(weight, ShardedTensor):
        raise unsupported(func, "only the bias is sharded; shard the weight, too, or gather the bias")
    return multiply(func, input, weight, bias, is_transposed=True)


@implements(torch.matmul, _T.matmul, _T.__matmul__)
def _matmul(func: Any, input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return multiply(func, input, other)


@implements(_T.__rmatmul__)
def _matmul_reversed(func: Any, right: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    return multiply(func, left, right)


@implements(torch.mm, _T.mm)
def _mm(func: Any, input: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    if input.dim() != 2 or mat2.dim() != 2:
        raise RuntimeError(f"mm needs two matrices: self must be a matrix, got {input.dim()}-D and {mat2.dim()}-D")
    return multiply(func, input, mat2)


@implements(torch.addmm, _T.addmm)
def _addmm(
    func: Any, input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    if not isinstance(mat1, ShardedTensor) and not isinstance(mat2, ShardedTensor):
        raise unsupported(func, "neither matrix is sharded")
    if alpha != 1:
        mat1 = mat1 * alpha
    if beta == 0:  # torch does not look at the input then
        return multiply(func, mat1, mat2)
    added = input if beta == 1 else input * beta
    if added.dim() == 1:
        return multiply(func, mat1, mat2, added)
    return multiply(func, mat1, mat2) + added


@dataclass
class _Blocks:
    """Pairs of blocks at the same places, and the layout of their products."""

    backend: Backend
    lefts: list[Part]
    rights: list[Part]
    is_transposed: bool  # whether the rights are [o, k], not [k, o]
    layout: Layout  # of the products
    size: tuple[int, ...]  # of the result
    batch: Layout | None  # of the result, if it is known whose rows these are
    is_sum: bool  # whether the products are parts of sums
    like: torch.Tensor  # tells dtype and device, where references do not
    requires_grad: bool
    leader: ShardedTensor  # beside whose parts the products are made

    def products(self, biases: Sequence[Part | None]) -> list[Part]:
        parts = self.backend.run(
            product, self.layout, self.lefts, self.rights, biases, is_transposed=self.is_transposed
        )
        first = first_here(parts)
        if first is not None:  # where autocast is on, products have another dtype than operands
            self.like = first.new_empty(0)
        return parts

    def to_sharded(self, parts: Sequence[Part], layout: Layout) -> ShardedTensor:
        leader = self.leader if layout is self.layout else None
        made = from_layout(self.backend, layout, parts, self.size, self.like, self.requires_grad, leader)
        made._batch = self.batch
        return made


def product(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, is_transposed: bool) -> torch.Tensor:
    return F.linear(left, right if is_transposed else right.t(), bias)


def add_bias(total: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Add a bias to a sum of products, where they are; with autocast the bias has another dtype."""
    return total + bias.to(total.dtype)


def multiply(
    func: Callable[..., Any],
    left: torch.Tensor,
    right: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_transposed: bool = False,
) -> torch.Tensor:
    """Return ``left @ right + bias``, for at least one operand that is sharded.

    The left one may have any number of dimensions. With `is_transposed` the right one is [out, in], as the weight of
    `linear` is; else it is [in, out].
    """
    if right.dim() != 2:
        raise unsupported(func, f"the right operand has {right.dim()} dimensions, not 2")
    problem = _find_problem(func, left, right)
    if isinstance(left, ShardedTensor):
        if problem is not None:
            raise problem
        if isinstance(right, ShardedTensor):
            return _add_bias(func, _at_right(left, right, is_transposed, left._batch), bias)
        return _add_bias(func, _at_left(left, right, is_transposed), bias)
    # Every participant's own rows on the left, or a vector, which counts as one row.
    assert isinstance(right, ShardedTensor)
    rows, batch = join_rows(left.unsqueeze(0) if left.dim() == 1 else left, right._backend, problem)
    found = _add_bias(func, _at_right(rows, right, is_transposed, batch), bias)
    if left.dim() > 1:
        return found
    if isinstance(found, ShardedTensor):
        raise unsupported(func, "the result would be sharded by rows, and a vector has none; pass x.unsqueeze(0)")
    return found.squeeze(0)


def _find_problem(func: Any, left: torch.Tensor, right: torch.Tensor) -> RuntimeError | None:
    """Return why there is no product; if the left operand holds a rank's own rows, this may differ between ranks."""
    if not 1 <= left.dim() <= MAX_DIMS:
        return unsupported(func, f"the left operand has {left.dim()} dimensions, not 1 to {MAX_DIMS}")
    if isinstance(left, ShardedTensor) and isinstance(right, ShardedTensor) and left._backend != right._backend:
        return unsupported(func, "the operands are in different process groups")
    if left.dtype != right.dtype and not torch.is_autocast_enabled(left.device.type):
        return RuntimeError(f"mat1 and mat2 must have the same dtype, but got {left.dtype} and {right.dtype}")
    return None


def _length_and_width(left: torch.Tensor, right: torch.Tensor, is_transposed: bool) -> tuple[int, int]:
    """Return the lengths of the dimension that is summed over, and of the last one of the result."""
    length, width = reversed(right.size()) if is_transposed else right.size()
    if left.size(-1) != length:
        rows = left.numel() // max(1, left.size(-1))
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({rows}x{left.size(-1)} and {length}x{width})")
    return length, width


def _at_right(left: torch.Tensor, right: ShardedTensor, is_transposed: bool, batch: Layout | None) -> _Blocks:
    """Move the needed blocks of the left operand to the places of the right one."""
    backend, layout = right._backend, right._layout
    along, across = (1, 0) if is_transposed else (0, 1)  # dimensions of the right operand
    length, width = _length_and_width(left, right, is_transposed)
    if batch is None:
        rows: tuple[int, ...] = left.size()[:-1]
    else:  # those of all participants
        rows = (sum(box.sizes[0] for box in batch.boxes), *batch.boxes[0].sizes[1:-1])

    def columns(dim: int) -> Layout:
        """Return all rows, with the last dimension cut as each block is along one of its dimensions."""
        return layout.map(lambda box: Box.from_ranges([*((0, item) for item in rows), box.ranges[dim]]))

    if isinstance(left, ShardedTensor):
        lefts = backend.move(left._parts, left._layout, columns(along), left._like)
    else:
        assert batch is not None  # plain rows have owners
        lefts = backend.spread(left, batch, columns(along))
    return _Blocks(
        backend=backend,
        lefts=lefts,
        rights=right._parts,
        is_transposed=is_transposed,
        layout=columns(across),
        size=(*rows, width),
        batch=batch and _with_width(batch, width),
        is_sum=_is_divided_along(right, along)
        or any(box.sizes[across] and box.sizes[along] != length for box in layout.boxes),
        like=right._like,
        requires_grad=needs_gradient(left, right),
        leader=right,
    )


def _is_divided_along(right: ShardedTensor, dim: int) -> bool:
    """Return whether products are parts of sums according to the spec, even with a single place."""
    spec = right.sharding_spec()
    if right.size(dim) == 0:
        return True
    if isinstance(spec, ChunkShardingSpec):
        return spec.dim % 2 == dim
    return sum(1 for box in right._layout.boxes if box.num_elements) == 1


def _with_width(layout: Layout, width: int) -> Layout:
    return layout.map(lambda box: box.with_range(-1, 0, width))


def _at_left(left: ShardedTensor, right: torch.Tensor, is_transposed: bool) -> _Blocks:
    """Move the needed blocks of a plain right operand to the places of the left one."""
    length, width = _length_and_width(left, right, is_transposed)

    def facing(box: Box) -> Box:
        """Return the box of the right operand that a block of the left one needs."""
        return Box.from_ranges([(0, width), box.ranges[-1]] if is_transposed else [box.ranges[-1], (0, width)])

    return _Blocks(
        backend=left._backend,
        lefts=left._parts,
        rights=left._backend.divide(right, left._layout.map(facing)),
        is_transposed=is_transposed,
        layout=_with_width(left._layout, width),
        size=(*left.size()[:-1], width),
        batch=left._batch and _with_width(left._batch, width),
        is_sum=length == 0 or any(0 not in box.sizes[:-1] and box.sizes[-1] != length for box in left._layout.boxes),
        like=left._like,
        requires_grad=needs_gradient(left, right),
        leader=left,
    )


def _add_bias(func: Any, blocks: _Blocks, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is not None:
        blocks.requires_grad = blocks.requires_grad or needs_gradient(bias)
        if isinstance(bias, ShardedTensor) and (bias._backend != blocks.backend or bias.size() != blocks.size[-1:]):
            raise unsupported(func, f"the bias has size {list(bias.size())}, or is in another process group")
    if not blocks.is_sum:
        return blocks.to_sharded(blocks.products(_bias_parts(blocks, bias, blocks.layout)), blocks.layout)
    # The products add up: to every participant's own rows, or to equal shares of rows, one for each place.
    backend = blocks.backend
    products = blocks.products([None] * len(blocks.lefts))
    target = blocks.batch or backend.complete(chunk(blocks.size, 0, list(dict.fromkeys(blocks.layout.places))))
    sums = backend.move(products, blocks.layout, target, blocks.like, is_sum=True)
    if bias is not None:
        sums = backend.run(add_bias, target, sums, _bias_parts(blocks, bias, target))
    if blocks.batch is None:
        return blocks.to_sharded(sums, target)
    (own,) = sums
    assert isinstance(own, torch.Tensor)
    return own


def _bias_parts(blocks: _Blocks, bias: torch.Tensor | None, layout: Layout) -> Sequence[Part | None]:
    """Return the part of the bias that each part of a result needs."""
    if bias is None:
        return [None] * len(blocks.backend.box_numbers(layout))
    needed = layout.map(lambda box: Box.from_ranges(box.ranges[-1:]))
    whole = bias if isinstance(bias, ShardedTensor) else bias.expand(blocks.size[-1])
    return take_parts(blocks.backend, whole, needed)


@implements(torch.bmm, _T.bmm)
def _bmm(func: Any, input: torch.Tensor, mat2: torch.Tensor) -> ShardedTensor:
    """Multiply pairs of matrices. A plain operand is the same everywhere.

    The operand that is not cut along the dimension that is summed over stays, and the other one comes to it.
    """
    left, right = (torch.empty(item.size(), dtype=item.dtype, device="meta") for item in (input, mat2))
    size = torch.bmm(left, right).size()  # raises here what the parts would raise
    is_input = _is_whole(input, 2)
    leader, other = (input, mat2) if is_input else (mat2, input)
    if not isinstance(leader, ShardedTensor) or not (is_input or _is_whole(mat2, 1)):
        raise unsupported(func, "it is sharded along the dimension that is summed over; redistribute() it first")
    check_same_group(func, leader, other)
    backend, layout = leader._backend, leader._layout
    changed = 2 if is_input else 1  # along this dimension a product has all, as the other operand has along both
    products = layout.map(lambda box: box.with_range(changed, 0, size[changed]))
    needed = layout.map(lambda box: Box.from_ranges([box.ranges[0], (0, other.size(1)), (0, other.size(2))]))
    others = take_parts(backend, other, needed)
    lefts, rights = (leader._parts, others) if is_input else (others, leader._parts)
    sizes = [list(products.boxes[number].sizes) for number in backend.box_numbers(layout)]
    parts = backend.run(bmm_part, layout, lefts, rights, sizes, length=input.size(2))
    made = from_layout(backend, products, parts, size, leader._like, needs_gradient(input, mat2), leader)
    if isinstance(leader._sharding_spec, ChunkShardingSpec):
        made._sharding_spec = leader._sharding_spec
    return made


def bmm_part(left: torch.Tensor, right: torch.Tensor, size: list[int], length: int) -> torch.Tensor:
    """Multiply parts, which may be empty: those of ranks that have no shard do not have the lengths of the others."""
    batch, rows, columns = size
    return torch.bmm(left.reshape(batch, rows, length), right.reshape(batch, length, columns))


def _is_whole(tensor: torch.Tensor, dim: int) -> bool:
    return isinstance(tensor, ShardedTensor) and tensor._layout.is_whole_along(dim, tensor.size(dim))
