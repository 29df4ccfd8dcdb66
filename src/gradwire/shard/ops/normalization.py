"""Softmax, layer norm and other functions that relate the elements of a row to each other.

softmax, log_softmax, normalize   along any dimensions: if they are divided, the largest element and the sum of each row
                                  are found together, which moves two numbers for each row
layer_norm, rms_norm              along dimensions that are whole in every part
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from gradwire.shard.dispatch import implements, unsupported
from gradwire.shard.ops.pointwise import align, derive, probe
from gradwire.shard.ops.reductions import dims_of, is_whole
from gradwire.shard.tensor import ShardedTensor

_T: Any = torch.Tensor


@implements(torch.softmax, _T.softmax, torch.log_softmax, _T.log_softmax)
def _softmax(func: Any, input: Any, dim: int | None = None, dtype: torch.dtype | None = None) -> ShardedTensor:
    if dim is None:
        raise unsupported(func, "pass the dimension (dim=)")
    (dim,) = dims_of(input, dim)
    is_log = func.__name__ == "log_softmax"
    if input._layout.is_whole_along(dim, input.size(dim)):
        expected = softmax_part(probe(input, 2), dim, dtype, is_log)
        parts = input._backend.run(softmax_part, input._layout, input._parts, dim=dim, dtype=dtype, is_log=is_log)
        return derive(input, input._layout, parts, input.size(), expected)
    tensor = input if dtype is None else input.to(dtype)
    softmax_part(probe(tensor, 2), dim, None, is_log)  # integers have none
    # The largest element of each row is subtracted first, so that no exponential overflows.
    shifted = tensor - tensor.detach().amax(dim, keepdim=True)
    powers = shifted.exp()
    total = powers.sum(dim, keepdim=True)
    found: ShardedTensor = shifted - total.log() if is_log else powers / total
    return found


@implements(functional.softmax, functional.log_softmax)
def _functional_softmax(func: Any, input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return _softmax(func, input, dim, dtype)


def softmax_part(part: torch.Tensor, dim: int, dtype: torch.dtype | None, is_log: bool) -> torch.Tensor:
    """Compute the softmax of a part in which the dimension is whole."""
    return (torch.log_softmax if is_log else torch.softmax)(part, dim, dtype=dtype)


@implements(functional.normalize)
def _normalize(func: Any, input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12) -> Any:
    return input / torch.linalg.vector_norm(input, p, dim, keepdim=True).clamp_min(eps)


@implements(functional.layer_norm)
def _layer_norm(
    func: Any, input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> ShardedTensor:
    return _norm_rows(func, input, list(normalized_shape), [weight, bias], eps)


@implements(functional.rms_norm)
def _rms_norm(
    func: Any, input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> ShardedTensor:
    return _norm_rows(func, input, list(normalized_shape), [weight], eps)


def _norm_rows(
    func: Callable[..., Any], tensor: Any, shape: list[int], weights: list[Any], eps: float | None
) -> ShardedTensor:
    if not isinstance(tensor, ShardedTensor):
        raise unsupported(func, "only its weights are sharded, not its input")
    if list(tensor.size())[-len(shape) :] != shape:
        raise RuntimeError(
            f"Given normalized_shape={shape}, expected input with shape [*, {str(shape)[1:]}, got {tensor}"
        )
    if len(shape) < tensor.dim() and not is_whole(tensor, range(tensor.dim() - len(shape), tensor.dim())):
        raise unsupported(
            func, f"the last {len(shape)} dimensions are sharded; redistribute() it along another dimension first"
        )
    if len(shape) == tensor.dim():
        raise unsupported(func, "all dimensions are normalized, and the tensor is sharded along one of them")
    small = [min(2, length) for length in shape]
    expected = func(probe(tensor, 2), small, *(probe(weight, 2) for weight in weights), eps=eps)
    layout, size = tensor._layout, tensor.size()
    columns = [align(weight, tensor, layout, size) for weight in weights]
    parts = tensor._backend.run(norm_part, layout, tensor._parts, *columns, name=func.__name__, shape=shape, eps=eps)
    return derive(tensor, layout, parts, size, expected)


def norm_part(
    part: torch.Tensor, *weights: torch.Tensor | None, name: str, shape: list[int], eps: float | None
) -> torch.Tensor:
    """Normalize a part. An empty one depends on the weights, too: all ranks take part in backward."""
    if part.numel():
        found: torch.Tensor = getattr(functional, name)(part, shape, *weights, eps=eps)
        return found
    return sum((weight.sum() for weight in weights if weight is not None), part + 0)
