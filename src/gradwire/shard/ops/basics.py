"""What a sharded tensor is, and copies of it: attributes, detach, clone, requires_grad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from gradwire.shard.dispatch import implements
from gradwire.shard.tensor import ShardedTensor

_T: Any = torch.Tensor


def _of_wrapper(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the object itself can tell: it has the size, dtype and device of the whole."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


_ATTRIBUTES = (
    "shape dtype layout device ndim is_cuda is_cpu is_meta is_sparse is_sparse_csr is_quantized is_mkldnn is_nested "
    "is_mps is_xla is_xpu is_ipu is_maia is_vulkan is_mtia is_hpu names itemsize nbytes"
)
for _name in _ATTRIBUTES.split():
    if hasattr(_T, _name):
        implements(getattr(_T, _name).__get__)(_of_wrapper)
implements(
    _T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.stride, _T.is_contiguous, _T.is_floating_point,
    _T.is_complex, _T.is_signed, _T.element_size, _T.__len__, _T.get_device, torch.numel, torch.is_floating_point,
    torch.is_complex, torch.is_signed,
)(_of_wrapper)  # fmt: skip


@implements(_T.requires_grad.__get__)
def _requires_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tensor: ShardedTensor = args[0]
    first = tensor._parts[0]
    if isinstance(first, torch.Tensor):
        return first.requires_grad
    return tensor._metadata.tensor_properties.requires_grad


@implements(_T.requires_grad_, _T.requires_grad.__set__)
def _set_requires_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    tensor: ShardedTensor = args[0]
    flag = kwargs.get("requires_grad", args[1] if len(args) > 1 else True)
    if flag != tensor.requires_grad:
        tensor._parts = tensor._engine.run(
            torch.Tensor.requires_grad_, tensor._layout, tensor._parts, requires_grad=flag
        )
    metadata = tensor._metadata
    tensor._metadata = replace(metadata, tensor_properties=replace(metadata.tensor_properties, requires_grad=flag))
    return tensor


@implements(_T.is_leaf.__get__)
def _is_leaf(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    first = args[0]._parts[0]
    return first.is_leaf if isinstance(first, torch.Tensor) else not args[0]._is_result


@implements(_T.grad_fn.__get__)
def _grad_fn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = args[0]._parts[0]
    return first.grad_fn if isinstance(first, torch.Tensor) else None


@implements(_T.detach, torch.detach)
def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Shares memory with the original, as always."""
    tensor: ShardedTensor = args[0]
    with torch.no_grad():
        return tensor._with_parts(tensor._engine.run(torch.Tensor.detach, tensor._layout, tensor._parts))


@implements(_T.clone, torch.clone)
def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    tensor: ShardedTensor = args[0]
    return tensor._with_parts(tensor._engine.run(torch.Tensor.clone, tensor._layout, tensor._parts))
