"""`linear`, `matmul` and `addmm`, and transposing, without which there is no ``x @ weight.t()``."""

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
    if isinstance(tensor._spec, ChunkShardingSpec):  # of one chunk nobody could tell along which dimension it was cut
        made._spec = replace(tensor._spec, dim=order[tensor._spec.dim % num_dims])
    return made
