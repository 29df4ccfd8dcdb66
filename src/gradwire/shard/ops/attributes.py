"""Attributes, gradients and conversions to Python numbers of sharded tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradwire._torch import DisableTorchFunctionSubclass, has_compatible_shallow_copy_type
from gradwire.shard.backend import Part
from gradwire.shard.dispatch import implements, unsupported
from gradwire.shard.group_backend import GroupBackend
from gradwire.shard.ops.pointwise import note_gradient, probe
from gradwire.shard.tensor import ShardedTensor, first_here

_T: Any = torch.Tensor


def _of_wrapper(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Ask the object itself: it has the size, dtype and device of the whole."""
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


_ATTRIBUTES = (
    "shape dtype layout device ndim is_cuda is_cpu is_meta is_sparse is_sparse_csr is_quantized is_mkldnn is_nested "
    "is_mps is_xla is_xpu is_ipu is_maia is_vulkan is_mtia is_hpu names itemsize nbytes "
    "_version _base output_nr name _has_symbolic_sizes_strides"
)
for _name in _ATTRIBUTES.split():
    if hasattr(_T, _name):
        implements(getattr(_T, _name).__get__)(_of_wrapper)
implements(
    _T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.stride, _T.is_contiguous, _T.is_floating_point,
    _T.is_complex, _T.is_signed, _T.element_size, _T.__len__, _T.get_device, torch.numel, torch.is_floating_point,
    torch.is_complex, torch.is_signed, _T.is_inference, torch.is_inference, has_compatible_shallow_copy_type,
)(_of_wrapper)  # fmt: skip


@implements(_T.requires_grad.__get__)
def _requires_grad(func: Any, tensor: ShardedTensor) -> bool:
    first = first_here(tensor._parts)
    return first.requires_grad if first is not None else tensor._metadata.tensor_properties.requires_grad


@implements(_T.requires_grad_, _T.requires_grad.__set__)
def _set_requires_grad(func: Any, tensor: ShardedTensor, requires_grad: bool = True) -> ShardedTensor:
    if requires_grad != tensor.requires_grad:
        probe(tensor).requires_grad_(requires_grad)  # raises here what the parts would raise
        tensor._backend.settle()  # what was made of it before has no gradient
        tensor._parts = tensor._backend.run(
            torch.Tensor.requires_grad_, tensor._layout, tensor._parts, requires_grad=requires_grad
        )
        note_gradient(tensor, requires_grad, tensor.is_leaf)
    return tensor


@implements(_T.is_leaf.__get__)
def _is_leaf(func: Any, tensor: ShardedTensor) -> bool:
    first = first_here(tensor._parts)
    return first.is_leaf if first is not None else not tensor._is_result


@implements(_T.grad_fn.__get__)
def _grad_fn(func: Any, tensor: ShardedTensor) -> Any:
    first = first_here(tensor._parts)
    return first.grad_fn if first is not None else None


@implements(_T.__format__)
def _format(func: Any, tensor: ShardedTensor, wanted: str) -> str:
    # In an f-string: the repr; with a format, its single element.
    return format(_item(_T.item, tensor), wanted) if wanted else repr(tensor)


@implements(_T.is_pinned)
def _is_pinned(func: Any, tensor: ShardedTensor, device: Any = None) -> bool:
    return tensor._metadata.tensor_properties.pin_memory


@implements(_T.new_empty, _T.new_full, _T.new_ones, _T.new_tensor, _T.new_zeros)
def _new(func: Any, tensor: ShardedTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Make a plain tensor of the same dtype, on the same device."""
    found: torch.Tensor = func(tensor._like, *args, **kwargs)
    return found


@implements(_T.grad.__get__)
def _grad(func: Any, tensor: ShardedTensor) -> ShardedTensor | None:
    """Return the gradients of this rank's shards; None if there are none, and over RPC, where they are in contexts."""
    parts = _parts_here(tensor)
    if parts is None or all(part.grad is None for part in parts):
        return None
    found: list[Part] = [torch.zeros_like(part) if part.grad is None else part.grad for part in parts]
    return tensor._with_parts(found, tensor.dtype)


@implements(_T.grad.__set__, _T.grad.__delete__)
def _set_grad(func: Any, tensor: ShardedTensor, gradient: Any = None) -> None:
    parts = _parts_here(tensor)
    if gradient is None:
        for part in parts or ():
            part.grad = None
        return
    if not isinstance(gradient, ShardedTensor) or gradient._layout != tensor._layout or parts is None:
        raise unsupported(
            func, "a gradient must be a ShardedTensor of the same layout, on the ranks of a process group"
        )
    for part, value in zip(parts, gradient._parts, strict=True):
        part.grad = value  # type: ignore[assignment]  # of a process group, so it is here


@implements(_T.retain_grad)
def _retain_grad(func: Any, tensor: ShardedTensor) -> None:
    parts = _parts_here(tensor)
    if parts is None:
        raise unsupported(func, "over RPC, gradients are kept in contexts")
    for part in parts:
        part.retain_grad()


def _parts_here(tensor: ShardedTensor) -> list[torch.Tensor] | None:
    """Return this rank's parts; None over RPC."""
    if not isinstance(tensor._backend, GroupBackend):
        return None
    return [part for part in tensor._parts if isinstance(part, torch.Tensor)]


@implements(_T.item, _T.__bool__, _T.__float__, _T.__int__, _T.__complex__, _T.__index__)
def _item(func: Any, tensor: ShardedTensor) -> Any:
    if tensor.numel() != 1:
        raise unsupported(func, f"it has {tensor.numel()} elements, not one")
    return func(tensor.full_tensor().detach())
