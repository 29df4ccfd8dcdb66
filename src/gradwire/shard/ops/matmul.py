"""`linear`, `matmul`, `addmm` and `bmm`, and transposing, without which there is no ``x @ weight.t()``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from gradwire.shard.backend import Backend, Part
from gradwire.shard.dispatch import implements, unsupported
from gradwire.shard.layout import Box, Layout, Place, stack_rows
from gradwire.shard.ops.embedding import MAX_DIMS, join_rows
from gradwire.shard.sharding_spec import ChunkShardingSpec
from gradwire.shard.tensor import ShardedTensor, first_here, from_layout

Size = tuple[int, ...]


@dataclass(frozen=True)
class _Blocks:
    """Pairs of blocks that are at the same places, and what their products are.

    Attributes:
        backend: How functions get there.
        lefts: Blocks of the left operand.
        rights: Blocks of the right one.
        is_transposed: Whether those are [o, k], not [k, o].
        layout: Of the products.
        size: Of the result.
        batch: Of the result, if it is known whose rows these are.
        is_sum: Whether the products are parts of sums.
        like: Tells dtype and device, where nobody can tell without asking.
        requires_grad: Whether an operand does.
    """

    backend: Backend
    lefts: list[Part]
    rights: list[Part]
    is_transposed: bool
    layout: Layout
    size: Size
    batch: Layout | None
    is_sum: bool
    like: torch.Tensor
    requires_grad: bool

    def products(self, biases: Sequence[Part | None]) -> list[Part]:
        return self.backend.run(product, self.layout, self.lefts, self.rights, biases, is_transposed=self.is_transposed)

    def to_sharded(self, parts: Sequence[Part], layout: Layout) -> ShardedTensor:
        made = from_layout(self.backend, layout, parts, self.size, self._like(parts), self.requires_grad)
        made._batch = self.batch
        return made

    def _like(self, parts: Sequence[Part]) -> torch.Tensor:
        """Where autocast is on, products have another dtype than operands."""
        first = first_here(parts)
        return first.new_empty(0) if first is not None else self.like


def product(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, is_transposed: bool) -> torch.Tensor:
    """The product of two blocks, where they are."""
    return F.linear(left, right if is_transposed else right.t(), bias)


def add_bias(total: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A sum of products and the bias, where they are; with autocast the bias has another dtype."""
    return total + bias.to(total.dtype)


def multiply(
    func: Callable[..., Any], left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, is_transposed: bool
) -> torch.Tensor:
    """``left @ right + bias``, for at least one operand that is sharded.

    Args:
        func: The function of torch that asks for it.
        left: Any number of dimensions.
        right: Two.
        bias: One, or none.
        is_transposed: Whether `right` is [out, in], as the weight of `linear` is; else it is [in, out].

    Raises:
        RuntimeError: The sizes or dtypes do not fit each other, or nobody has said how to do this.
    """
    if right.dim() != 2:
        raise unsupported(func, f"the right operand has {right.dim()} dimensions, not 2")
    problem = _find_problem(func, left, right)
    if isinstance(left, ShardedTensor):
        if problem is not None:
            raise problem
        return _add_bias(func, _meet(left, right, is_transposed), bias)
    return _multiply_own(func, left, right, bias, is_transposed, problem)


def _find_problem(func: Any, left: torch.Tensor, right: torch.Tensor) -> RuntimeError | None:
    """Why there is no product; if the left operand is one's own, perhaps only here."""
    if not 1 <= left.dim() <= MAX_DIMS:
        return unsupported(func, f"the left operand has {left.dim()} dimensions, not 1 to {MAX_DIMS}")
    if isinstance(left, ShardedTensor) and isinstance(right, ShardedTensor) and left._backend != right._backend:
        return unsupported(func, "the operands are in different process groups")
    if left.dtype != right.dtype and not torch.is_autocast_enabled(left.device.type):
        return RuntimeError(f"mat1 and mat2 must have the same dtype, but got {left.dtype} and {right.dtype}")
    return None


def _multiply_own(
    func: Any, left: torch.Tensor, right: Any, bias: torch.Tensor | None, is_transposed: bool, problem: Any
) -> torch.Tensor:
    """With everybody's own rows on the left, or a vector, which counts as one row."""
    rows, batch = join_rows(left.unsqueeze(0) if left.dim() == 1 else left, right._backend, problem)
    found = _add_bias(func, _at_right(rows, right, is_transposed, batch), bias)
    if left.dim() > 1:
        return found
    if isinstance(found, ShardedTensor):
        raise unsupported(func, "the result would be divided, and a vector is not rows; pass x.unsqueeze(0)")
    return found.squeeze(0)


def _check_sizes(left: torch.Tensor, right: torch.Tensor, is_transposed: bool) -> None:
    length, width = _length_and_width(right, is_transposed)
    if left.size(-1) != length:
        rows = left.numel() // max(1, left.size(-1))
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({rows}x{left.size(-1)} and {length}x{width})")


def _length_and_width(right: torch.Tensor, is_transposed: bool) -> tuple[int, int]:
    rows, columns = right.size()
    return (columns, rows) if is_transposed else (rows, columns)


def _meet(left: ShardedTensor, right: torch.Tensor, is_transposed: bool) -> _Blocks:
    if isinstance(right, ShardedTensor):
        return _at_right(left, right, is_transposed, left._batch)
    return _at_left(left, right, is_transposed)


# -- where the right operand is ----------------------------------------------------------------------------------------


def _at_right(left: torch.Tensor, right: ShardedTensor, is_transposed: bool, batch: Layout | None) -> _Blocks:
    backend = right._backend
    along, across = (1, 0) if is_transposed else (0, 1)  # dimensions of the right operand
    length, width = _length_and_width(right, is_transposed)
    _check_sizes(left, right, is_transposed)
    rows: Size = left.size()[:-1] if batch is None else _rows_of(batch)
    needed = _columns(right._layout, along, rows)
    lefts = (
        backend.move(left._parts, left._layout, needed, left._like)
        if isinstance(left, ShardedTensor)
        else backend.spread(left, _required(batch), needed)
    )
    boxes = right._layout.boxes
    return _Blocks(
        backend=backend,
        lefts=lefts,
        rights=right._parts,
        is_transposed=is_transposed,
        layout=_columns(right._layout, across, rows),
        size=(*rows, width),
        batch=batch and _with_width(batch, width),
        is_sum=_is_divided_along(right, along)
        or any(box.sizes[across] and box.sizes[along] != length for box in boxes),
        like=right._like,
        requires_grad=_do_require_grad(left, right),
    )


def _is_divided_along(right: ShardedTensor, dim: int) -> bool:
    """Whether the spec means products to be parts of sums, however many places there are: also if there is only one."""
    spec = right.sharding_spec()
    if right.size(dim) == 0:
        return True
    if isinstance(spec, ChunkShardingSpec):
        return spec.dim % 2 == dim
    return sum(1 for box in right._layout.boxes if box.num_elements) == 1


def _required(batch: Layout | None) -> Layout:
    assert batch is not None  # plain rows are somebody's
    return batch


def _rows_of(batch: Layout) -> Size:
    """The size of everybody's rows together, without the last dimension."""
    return (sum(box.sizes[0] for box in batch.boxes), *batch.boxes[0].sizes[1:-1])


def _columns(layout: Layout, dim: int, rows: Size) -> Layout:
    """All rows, and of the last dimension what each block has along one of its own."""
    boxes = (Box((*(0 for _ in rows), box.offsets[dim]), (*rows, box.sizes[dim])) for box in layout.boxes)
    return Layout(tuple(boxes), layout.places)


def _with_width(layout: Layout, width: int) -> Layout:
    boxes = (Box((*box.offsets[:-1], 0), (*box.sizes[:-1], width)) for box in layout.boxes)
    return Layout(tuple(boxes), layout.places)


# -- where the left operand is -----------------------------------------------------------------------------------------


def _at_left(left: ShardedTensor, right: torch.Tensor, is_transposed: bool) -> _Blocks:
    _check_sizes(left, right, is_transposed)
    length, width = _length_and_width(right, is_transposed)
    boxes = left._layout.boxes
    needed = Layout(tuple(_facing(box, width, is_transposed) for box in boxes), left._layout.places)
    return _Blocks(
        backend=left._backend,
        lefts=left._parts,
        rights=left._backend.divide(right, needed),
        is_transposed=is_transposed,
        layout=_with_width(left._layout, width),
        size=(*left.size()[:-1], width),
        batch=left._batch and _with_width(left._batch, width),
        is_sum=length == 0 or any(0 not in box.sizes[:-1] and box.sizes[-1] != length for box in boxes),
        like=left._like,
        requires_grad=_do_require_grad(left, right),
    )


def _facing(box: Box, width: int, is_transposed: bool) -> Box:
    """What a block of the left operand takes of the right one."""
    start, size = box.offsets[-1], box.sizes[-1]
    return Box((0, start), (width, size)) if is_transposed else Box((start, 0), (size, width))


def _do_require_grad(*operands: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(item.requires_grad for item in operands)


# -- the result --------------------------------------------------------------------------------------------------------


def _add_bias(func: Any, blocks: _Blocks, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is not None:
        blocks = replace(blocks, requires_grad=blocks.requires_grad or _do_require_grad(bias))
        if isinstance(bias, ShardedTensor) and (bias._backend != blocks.backend or bias.size() != blocks.size[-1:]):
            raise unsupported(func, f"the bias has size {list(bias.size())}, or is in another process group")
    if blocks.is_sum:
        return _add_up(blocks, bias)
    return blocks.to_sharded(blocks.products(_bias_parts(blocks, bias, blocks.layout)), blocks.layout)


def _add_up(blocks: _Blocks, bias: torch.Tensor | None) -> torch.Tensor:
    """The sums of products: everybody's own rows, or each place's share of them."""
    backend = blocks.backend
    products = blocks.products([None] * len(blocks.lefts))
    target = blocks.batch or backend.complete(_shares(blocks.size, blocks.layout.places))
    sums = backend.move(products, blocks.layout, target, blocks._like(products), is_sum=True)
    if bias is not None:
        sums = backend.run(add_bias, target, sums, _bias_parts(blocks, bias, target))
    if blocks.batch is None:
        return blocks.to_sharded(sums, target)
    (own,) = sums
    assert isinstance(own, torch.Tensor)
    return own


def _shares(size: Size, places: Sequence[Place]) -> Layout:
    """Equal chunks of rows, each place once."""
    unique = list(dict.fromkeys(places))
    share = -(-size[0] // len(unique))
    starts = [min(number * share, size[0]) for number in range(len(unique) + 1)]
    numbers = [end - start for start, end in itertools.pairwise(starts)]
    return stack_rows(numbers, size[1:], unique)


def _bias_parts(blocks: _Blocks, bias: torch.Tensor | None, layout: Layout) -> Sequence[Part | None]:
    """What parts of a result need of the bias."""
    backend = blocks.backend
    if bias is None:
        return [None] * len(backend.box_numbers(layout))
    needed = Layout(tuple(Box(box.offsets[-1:], box.sizes[-1:]) for box in layout.boxes), layout.places)
    if isinstance(bias, ShardedTensor):
        return backend.move(bias._parts, bias._layout, needed, bias._like)
    return backend.divide(bias.expand(blocks.size[-1]), needed)


_T: Any = torch.Tensor


@implements(F.linear)
def _linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return _do_linear(func, *args, **kwargs)


def _do_linear(func: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not isinstance(input, ShardedTensor) and not isinstance(weight, ShardedTensor):
        raise unsupported(func, "only the bias is sharded; shard the weight, too, or gather the bias")
    return multiply(func, input, weight, bias, is_transposed=True)


@implements(torch.matmul, _T.matmul, _T.__matmul__)
def _matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return _do_matmul(func, *args, **kwargs)


def _do_matmul(func: Any, input: torch.Tensor, other: torch.Tensor, *, out: Any = None) -> torch.Tensor:
    _refuse_out(func, out)
    return multiply(func, input, other, None, is_transposed=False)


@implements(_T.__rmatmul__)
def _matmul_reversed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    right, left = args
    return multiply(func, left, right, None, is_transposed=False)


@implements(torch.mm, _T.mm)
def _mm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return _do_mm(func, *args, **kwargs)


def _do_mm(func: Any, input: torch.Tensor, mat2: torch.Tensor, *, out: Any = None) -> torch.Tensor:
    _refuse_out(func, out)
    if input.dim() != 2 or mat2.dim() != 2:
        raise RuntimeError(f"mm needs two matrices: self must be a matrix, got {input.dim()}-D and {mat2.dim()}-D")
    return multiply(func, input, mat2, None, is_transposed=False)


@implements(torch.addmm, _T.addmm)
def _addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return _do_addmm(func, *args, **kwargs)


def _do_addmm(
    func: Any,
    input: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Any = None,
) -> torch.Tensor:
    _refuse_out(func, out)
    if not isinstance(mat1, ShardedTensor) and not isinstance(mat2, ShardedTensor):
        raise unsupported(func, "neither matrix is sharded")
    if alpha != 1:
        mat1 = mat1 * alpha
    if beta == 0:  # torch does not look at the input then
        return multiply(func, mat1, mat2, None, is_transposed=False)
    added = input if beta == 1 else input * beta
    if added.dim() == 1:
        return multiply(func, mat1, mat2, added, is_transposed=False)
    return multiply(func, mat1, mat2, None, is_transposed=False) + added


def _refuse_out(func: Any, out: Any) -> None:
    if out is not None:
        raise unsupported(func, "with out=")


@implements(torch.bmm, _T.bmm)
def _bmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return _do_bmm(func, *args, **kwargs)


def _do_bmm(func: Any, input: torch.Tensor, mat2: torch.Tensor, *, out: Any = None) -> ShardedTensor:
    """Many products at once. A plain operand is the same everywhere.

    The operand that is not cut along the dimension that is summed over stays, and the other one comes to it.
    """
    _refuse_out(func, out)
    left, right = (torch.empty(item.size(), dtype=item.dtype, device="meta") for item in (input, mat2))
    size = torch.bmm(left, right).size()  # raises here what the parts would raise
    is_input = _is_whole(input, 2)
    leader, other = (input, mat2) if is_input else (mat2, input)
    if not isinstance(leader, ShardedTensor) or not (is_input or _is_whole(mat2, 1)):
        raise unsupported(func, "it is cut along the dimension that is summed over; redistribute() it first")
    backend, layout = leader._backend, leader._layout
    if isinstance(other, ShardedTensor) and other._backend != backend:
        raise unsupported(func, "All distributed tensors should use the same ProcessGroup if used together in an op")
    boxes = tuple(_product_box(box, size, is_input) for box in layout.boxes)
    needed = tuple(_box_of(_range(box, 0), (0, other.size(1)), (0, other.size(2))) for box in layout.boxes)
    target = Layout(needed, layout.places)
    if isinstance(other, ShardedTensor):
        others = backend.move(other._parts, other._layout, target, other._like)
    else:
        others = backend.divide(other, target)
    lefts, rights = (leader._parts, others) if is_input else (others, leader._parts)
    sizes = [list(boxes[number].sizes) for number in backend.box_numbers(layout)]
    parts = backend.run(bmm_part, layout, lefts, rights, sizes, length=input.size(2))
    requires_grad = torch.is_grad_enabled() and (input.requires_grad or mat2.requires_grad)
    made = from_layout(backend, Layout(boxes, layout.places), parts, size, leader._like, requires_grad)
    if isinstance(leader._sharding_spec, ChunkShardingSpec):
        made._sharding_spec = leader._sharding_spec
    return made


def bmm_part(left: torch.Tensor, right: torch.Tensor, size: list[int], length: int) -> torch.Tensor:
    """Of parts, which may be empty: those of ranks that have no shard do not have the lengths of the others."""
    batch, rows, columns = size
    return torch.bmm(left.reshape(batch, rows, length), right.reshape(batch, length, columns))


def _is_whole(tensor: torch.Tensor, dim: int) -> bool:
    return isinstance(tensor, ShardedTensor) and tensor._layout.is_whole_along(dim, tensor.size(dim))


def _product_box(box: Box, size: torch.Size, is_left: bool) -> Box:
    """What a part of the left operand gives of the products, or one of the right."""
    if is_left:
        return _box_of(_range(box, 0), _range(box, 1), (0, size[2]))
    return _box_of(_range(box, 0), (0, size[1]), _range(box, 2))


def _range(box: Box, dim: int) -> tuple[int, int]:
    return box.offsets[dim], box.sizes[dim]


def _box_of(*ranges: tuple[int, int]) -> Box:
    return Box(tuple(offset for offset, _ in ranges), tuple(length for _, length in ranges))


# -- transposing -------------------------------------------------------------------------------------------------------


@implements(torch.transpose, _T.transpose, torch.swapaxes, _T.swapaxes, torch.swapdims, _T.swapdims)
def _transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    tensor, first, second = (*args, *kwargs.values())
    return _swap(tensor, first, second)


@implements(torch.t, _T.t, _T.T.__get__, _T.mT.__get__)
def _transpose_matrix(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    tensor: ShardedTensor = (*args, *kwargs.values())[0]
    if tensor.dim() != 2:
        raise unsupported(func, f"it has {tensor.dim()} dimensions, not 2; say which with transpose")
    return _swap(tensor, 0, 1)


def _swap(tensor: ShardedTensor, first: int, second: int) -> ShardedTensor:
    """Every part is transposed where it is, and so is its place in the whole."""
    num_dims = tensor.dim()
    for dim in (first, second):
        if not -num_dims <= dim < num_dims:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-num_dims}, {num_dims - 1}], but got {dim})"
            )
    first, second = first % num_dims, second % num_dims
    order = list(range(num_dims))
    order[first], order[second] = second, first

    def reorder(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[dim] for dim in order)

    boxes = tuple(Box(reorder(box.offsets), reorder(box.sizes)) for box in tensor._layout.boxes)
    parts = tensor._backend.run(torch.transpose, tensor._layout, tensor._parts, dim0=first, dim1=second)
    requires_grad = tensor.requires_grad and torch.is_grad_enabled()
    layout = Layout(boxes, tensor._layout.places)
    made = from_layout(tensor._backend, layout, parts, reorder(tuple(tensor.size())), tensor._like, requires_grad)
    spec = tensor._sharding_spec
    if isinstance(spec, ChunkShardingSpec):  # one chunk alone does not tell along which dimension it was cut
        made._sharding_spec = replace(spec, dim=order[spec.dim % num_dims])
    return made
