"""Softmax, layer norm and what else sets the elements of a row in relation to each other.

softmax, log_softmax, normalize   along any dimensions: if they are divided, the largest element and the sum of each row
                                  are found together, which moves two numbers for each row
layer_norm, rms_norm              along dimensions that are whole in every part
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from gradwire.shard.backend import Part
from gradwire.shard.dispatch import Implementation, implements, unsupported
from gradwire.shard.ops.pointwise import align, derive, input_first, probe
from gradwire.shard.ops.reductions import dims_of, is_whole
from gradwire.shard.tensor import ShardedTensor

_T: Any = torch.Tensor


# -- softmax -----------------------------------------------------------------------------------------------------------


def softmax_part(part: torch.Tensor, dim: int, dtype: torch.dtype | None, is_log: bool) -> torch.Tensor:
    """Of a part in which the dimension is whole."""
    return (torch.log_softmax if is_log else torch.softmax)(part, dim, dtype=dtype)


def _softmax(is_log: bool, names: str) -> Implementation:
    @input_first
    def implementation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
        tensor: ShardedTensor = args[0]
        options = {**kwargs, **dict(zip(names.split(), args[1:], strict=False))}
        if options.get("dim") is None:
            raise unsupported(func, "say along which dimension (dim=)")
        (dim,) = dims_of(tensor, options["dim"])
        dtype = options.get("dtype")
        if tensor._layout.is_whole_along(dim, tensor.size(dim)):
            return _along_whole(tensor, dim, dtype, is_log)
        return _along_divided(tensor if dtype is None else tensor.to(dtype), dim, is_log)

    return implementation


def _along_whole(tensor: ShardedTensor, dim: int, dtype: torch.dtype | None, is_log: bool) -> ShardedTensor:
    expected = softmax_part(probe(tensor, 2), dim, dtype, is_log)
    parts = tensor._backend.run(softmax_part, tensor._layout, tensor._parts, dim=dim, dtype=dtype, is_log=is_log)
    return derive(tensor, tensor._layout, parts, tensor.size(), expected)


def _along_divided(tensor: Any, dim: int, is_log: bool) -> ShardedTensor:
    """The largest element of each row is taken off first, so that no exponential is too large."""
    softmax_part(probe(tensor, 2), dim, None, is_log)  # integers have none
    shifted = tensor - tensor.detach().amax(dim, keepdim=True)
    powers = shifted.exp()
    total = powers.sum(dim, keepdim=True)
    found: ShardedTensor = shifted - total.log() if is_log else powers / total
    return found


for _is_log, _name in ((False, "softmax"), (True, "log_softmax")):
    implements(getattr(torch, _name), getattr(_T, _name))(_softmax(_is_log, "dim dtype"))
    implements(getattr(functional, _name))(_softmax(_is_log, "dim _stacklevel dtype"))


@implements(functional.normalize)
@input_first
def _normalize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    options = {**kwargs, **dict(zip(["p", "dim", "eps"], args[1:], strict=False))}
    if options.get("out") is not None:
        raise unsupported(func, "it cannot write to out=")
    norm = torch.linalg.vector_norm(args[0], options.get("p", 2.0), options.get("dim", 1), keepdim=True)
    return args[0] / norm.clamp_min(options.get("eps", 1e-12))


# -- layer norm --------------------------------------------------------------------------------------------------------


def norm_rows(
    part: torch.Tensor, *weights: torch.Tensor | None, name: str, shape: list[int], eps: float | None
) -> torch.Tensor:
    """Layer norm or RMS norm of a part. Also an empty one has to do with the weights: all ranks meet in backward."""
    if part.numel():
        found: torch.Tensor = getattr(functional, name)(part, shape, *weights, eps=eps)
        return found
    return sum((weight.sum() for weight in weights if weight is not None), part + 0)


def _norm_of_rows(num_weights: int, default_eps: float | None) -> Implementation:
    names = ["normalized_shape", *["weight", "bias"][:num_weights], "eps"]

    @input_first
    def implementation(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
        options = {**kwargs, **dict(zip(names, args[1:], strict=False))}
        tensor, shape = args[0], list(options["normalized_shape"])
        weights = [options.get(name) for name in names[1 : 1 + num_weights]]
        eps = options.get("eps", default_eps)
        _check_rows(func, tensor, shape)
        small = [min(2, length) for length in shape]
        expected = func(probe(tensor, 2), small, *(probe(weight, 2) for weight in weights), eps=eps)
        parts = _run_rows(func.__name__, tensor, weights, shape, eps)
        return derive(tensor, tensor._layout, parts, tensor.size(), expected)

    return implementation


def _check_rows(func: Callable[..., Any], tensor: Any, shape: list[int]) -> None:
    if not isinstance(tensor, ShardedTensor):
        raise unsupported(func, "only its weights are sharded, not its input")
    if list(tensor.size())[-len(shape) :] != shape:
        raise RuntimeError(
            f"Given normalized_shape={shape}, expected input with shape [*, {str(shape)[1:]}, got {tensor}"
        )
    if len(shape) < tensor.dim() and not is_whole(tensor, range(tensor.dim() - len(shape), tensor.dim())):
        raise unsupported(func, f"the last {len(shape)} dimensions are divided; redistribute() so that they are whole")
    if len(shape) == tensor.dim():
        raise unsupported(func, "all dimensions are normalized, and the tensor is divided along one of them")


def _run_rows(name: str, tensor: ShardedTensor, weights: list[Any], shape: list[int], eps: float | None) -> list[Part]:
    columns = [align(weight, tensor, tensor._layout, tensor.size()) for weight in weights]
    return tensor._backend.run(norm_rows, tensor._layout, tensor._parts, *columns, name=name, shape=shape, eps=eps)


implements(functional.layer_norm)(_norm_of_rows(2, 1e-5))
implements(functional.rms_norm)(_norm_of_rows(1, None))
