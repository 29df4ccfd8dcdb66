"""`linear`, `matmul`, `addmm` and `bmm`, and transposing, without which there is no ``x @ weight.t()``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from gradwire.shard._geometry import Box
from gradwire.shard.dispatch import implements, unsupported
from gradwire.shard.layouts import Layout
from gradwire.shard.ops.products import multiply
from gradwire.shard.sharding_spec import ChunkShardingSpec
from gradwire.shard.tensor import ShardedTensor, from_layout

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
    engine, layout = leader._engine, leader._layout
    if isinstance(other, ShardedTensor) and other._engine != engine:
        raise unsupported(func, "All distributed tensors should use the same ProcessGroup if used together in an op")
    boxes = tuple(_product_box(box, size, is_input) for box in layout.boxes)
    needed = tuple(_box_of(_range(box, 0), (0, other.size(1)), (0, other.size(2))) for box in layout.boxes)
    target = Layout(needed, layout.places)
    if isinstance(other, ShardedTensor):
        others = engine.move(other._parts, other._layout, target, other._like)
    else:
        others = engine.divide(other, target)
    lefts, rights = (leader._parts, others) if is_input else (others, leader._parts)
    sizes = [list(boxes[number].sizes) for number in engine.numbers(layout)]
    parts = engine.run(bmm_part, layout, lefts, rights, sizes, length=input.size(2))
    requires_grad = torch.is_grad_enabled() and (input.requires_grad or mat2.requires_grad)
    made = from_layout(engine, Layout(boxes, layout.places), parts, size, leader._like, requires_grad)
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
    parts = tensor._engine.run(torch.transpose, tensor._layout, tensor._parts, dim0=first, dim1=second)
    requires_grad = tensor.requires_grad and torch.is_grad_enabled()
    layout = Layout(boxes, tensor._layout.places)
    made = from_layout(tensor._engine, layout, parts, reorder(tuple(tensor.size())), tensor._like, requires_grad)
    spec = tensor._sharding_spec
    if isinstance(spec, ChunkShardingSpec):  # one chunk alone does not tell along which dimension it was cut
        made._sharding_spec = replace(spec, dim=order[spec.dim % num_dims])
    return made
