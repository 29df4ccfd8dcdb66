"""Tensors as metadata and bytes, and back.

A tensor travels as a `TensorMeta` and the bytes of its dense parts. A strided tensor is one part; a sparse one is made
of two (COO: indices, values) or three (compressed: compressed indices, plain indices, values). Only the elements that
the tensor shows are sent, in row-major order: strides and memory format are not part of a tensor's value, and a row of
a large matrix costs a row. Names of dimensions, hooks and Python attributes stay at home.

    describe(tensor) -> meta, parts      sender; parts are views, so the caller copies before it lets the user go on
    validate(meta)   -> payload bytes    receiver, before it allocates anything
    rebuild(meta, buffers) -> tensor     receiver; the tensor uses the buffers in place

`requires_grad` makes the rebuilt tensor a leaf. What joins it to the graph of its sender is the autograd layer's
business.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from math import prod
from typing import Any, Final

import torch

from gradwire.config import Limits
from gradwire.errors import CannotSend
from gradwire.wire import _sparse
from gradwire.wire._metadata import (
    DEVICE,
    DTYPE_INDEX,
    DTYPES,
    FLAG_COALESCED,
    FLAG_CONJ,
    FLAG_NEG,
    FLAG_PARAMETER,
    FLAG_REQUIRES_GRAD,
    IS_COMPLEX,
    LAYOUTS,
    SHAREABLE_DTYPES,
    iter_parts,
    validate,
)
from gradwire.wire.messages import TensorMeta

__all__ = [
    "DTYPES",
    "FLAG_COALESCED",
    "FLAG_CONJ",
    "FLAG_NEG",
    "FLAG_PARAMETER",
    "FLAG_REQUIRES_GRAD",
    "LAYOUTS",
    "SHAREABLE_DTYPES",
    "address_of",
    "as_bytes",
    "copy_into",
    "describe",
    "iter_parts",
    "rebuild",
    "validate",
]

_BOOL: Final = DTYPE_INDEX[torch.bool]
_STRIDED: Final = torch.strided
_is_wrapped: Final = torch._C._functorch.is_functorch_wrapped_tensor
_memory_at: Final = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype = ctypes.py_object
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_PyBUF_READ: Final = 0x100
_copy_at: Final = ctypes.pythonapi.PyBytes_FromStringAndSize
_copy_at.restype = ctypes.py_object
_copy_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
_COPY_UP_TO: Final = 4096  # a copy is cheaper than a memoryview, and small frames are joined anyway


def describe(tensor: torch.Tensor, limits: Limits) -> tuple[TensorMeta, list[torch.Tensor]]:
    """Say what a tensor is, and name the dense CPU tensors whose bytes it is made of.

    Args:
        tensor: Any strided or sparse tensor or parameter, on any device.
        limits: `Limits.num_dims` is checked, so that a tensor nobody would accept is refused where it is made.

    Returns:
        The metadata, and its parts, depth first: detached, without conj and neg bits, not necessarily contiguous. They
        share memory with `tensor` where that is on the CPU. A tensor on ``meta`` has none.

    Raises:
        CannotSend: The tensor is quantised, nested, of a sub-byte dtype or a foreign subclass, or has too many dims.
    """
    index = DTYPE_INDEX.get(tensor.dtype)
    if (
        index is None
        or type(tensor) is not torch.Tensor
        or tensor.layout is not _STRIDED
        or not tensor.is_cpu
        or tensor.is_neg()
        or tensor.is_nested
        or (IS_COMPLEX[index] and tensor.is_conj())
    ):
        return _describe_any(tensor, limits)
    shape = tuple(tensor.shape)
    if len(shape) > limits.num_dims or _is_wrapped(tensor):
        return _describe_any(tensor, limits)
    if tensor.requires_grad:
        return TensorMeta(index, shape, tensor.nbytes, FLAG_REQUIRES_GRAD), [tensor.detach()]
    return TensorMeta(index, shape, tensor.nbytes), [tensor]


def _describe_any(tensor: torch.Tensor, limits: Limits) -> tuple[TensorMeta, list[torch.Tensor]]:
    _check_sendable(tensor, limits)
    flags = FLAG_PARAMETER if type(tensor) is torch.nn.Parameter else 0
    if tensor.requires_grad:
        flags |= FLAG_REQUIRES_GRAD
    device = "" if tensor.device.type == "cpu" else str(tensor.device)
    plain, dtype, shape = tensor.detach(), DTYPE_INDEX[tensor.dtype], tuple(tensor.shape)
    if plain.layout is not _STRIDED:
        metas, parts = _describe_sparse(plain, limits)
        flags |= FLAG_COALESCED if plain.layout is torch.sparse_coo and plain.is_coalesced() else 0
        return TensorMeta(dtype, shape, 0, flags, LAYOUTS.index(plain.layout), device, metas), parts
    if plain.is_conj():
        plain, flags = plain.conj(), flags | FLAG_CONJ
    if plain.is_neg():
        plain, flags = torch._neg_view(plain), flags | FLAG_NEG
    if plain.is_meta:
        return TensorMeta(dtype, shape, 0, flags, 0, device), []
    plain = plain.cpu()
    return TensorMeta(dtype, shape, plain.nbytes, flags, 0, device), [plain]


def _describe_sparse(plain: torch.Tensor, limits: Limits) -> tuple[tuple[TensorMeta, ...], list[torch.Tensor]]:
    described = [describe(part.cpu(), limits) for part in _sparse.parts_of(plain)]
    return tuple(meta for meta, _ in described), [part for _, parts in described for part in parts]


def _check_sendable(tensor: torch.Tensor, limits: Limits) -> None:
    """Name the reason why a tensor cannot travel, and what to send instead."""
    kind, reason = type(tensor), ""
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        reason = f"it is a {kind.__module__}.{kind.__qualname__}; send a plain tensor, e.g. its local part"
    elif tensor.is_quantized:
        reason = "it is quantised; send tensor.dequantize(), or int_repr() with its scale and zero point"
    elif tensor.is_nested:
        reason = "it is nested; send the list tensor.unbind()"
    elif _is_wrapped(tensor) or torch._is_functional_tensor(tensor):
        reason = "it belongs to a function transform (vmap, grad, functionalize); make the call outside of it"
    elif tensor.layout not in LAYOUTS:
        reason = f"its layout is {tensor.layout}; send tensor.to_dense()"
    elif tensor.dtype not in DTYPE_INDEX:
        reason = f"its dtype is {tensor.dtype}, which has no portable bytes; convert it first"
    elif tensor.dim() > limits.num_dims:
        reason = f"it has {tensor.dim()} dims, and at most {limits.num_dims} are accepted (Limits.num_dims)"
    elif tensor.layout is not _STRIDED and tensor.is_meta:
        reason = 'it is sparse and on the device "meta", so its parts are unknown'
    elif not tensor.is_cpu and not DEVICE.fullmatch(str(tensor.device)):
        reason = f"its device is {tensor.device}; move it to the CPU before the call"
    if reason:
        raise CannotSend(f"this tensor cannot be sent: {reason}")


def as_bytes(part: torch.Tensor) -> tuple[memoryview | bytes, torch.Tensor]:
    """The bytes of a dense part, and the tensor that must be kept alive while they are used.

    No copy is made of a large contiguous part; of any other, the owner is a contiguous copy.

    Raises:
        CannotSend: The part has no memory of its own.
    """
    owner = part if part.is_contiguous() else part.contiguous()
    num_bytes = owner.nbytes
    if num_bytes == 0:
        return memoryview(b""), owner
    try:  # `address_of`, without a call for each tensor
        address = owner.data_ptr()
        if address == 0:  # zeros that were never written down, as forward-mode differentiation makes them
            owner = owner.clone()
            address = owner.data_ptr()
    except RuntimeError as error:
        raise CannotSend(f"this tensor cannot be sent: {error}") from error
    if num_bytes <= _COPY_UP_TO:
        return _copy_at(address, num_bytes), owner
    return _memory_at(address, num_bytes, _PyBUF_READ), owner


def address_of(part: torch.Tensor) -> int:
    """Where the bytes of a contiguous part begin; 0 for zeros that were never written down.

    Raises:
        CannotSend: The part has no memory of its own.
    """
    try:
        return part.data_ptr()
    except RuntimeError as error:
        raise CannotSend(f"this tensor cannot be sent: {error}") from error


def copy_into(part: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a dense part, of whatever strides, into a flat ``uint8`` tensor of exactly its size, in one pass.

    Raises:
        CannotSend: The part has no memory of its own.
    """
    num_bytes = part.nbytes
    if target.nbytes != num_bytes:
        raise ValueError(f"copy_into: the part has {num_bytes} bytes and the target {target.nbytes}")
    if num_bytes:
        try:
            target.view(part.dtype).view(part.shape).copy_(part)
        except RuntimeError as error:
            raise CannotSend(f"this tensor cannot be sent: {error}") from error


def rebuild(meta: TensorMeta, buffers: Iterator[Any]) -> torch.Tensor:
    """Make the tensor that `meta`, checked by `validate`, describes.

    Args:
        meta: What the tensor is.
        buffers: One writable buffer for each dense part; the tensor keeps and uses it.

    Raises:
        DecodeError: The indices of a sparse tensor are not valid.
        CannotSend: The tensor belongs on a device that this worker does not have.
    """
    tensor = _rebuild_any(meta, buffers) if meta.layout or meta.device else _rebuild_dense(meta, next(buffers))
    flags = meta.flags
    if not flags:
        return tensor
    if flags & FLAG_CONJ:
        tensor = tensor.conj()
    if flags & FLAG_NEG:
        tensor = torch._neg_view(tensor)
    if flags & FLAG_PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=bool(flags & FLAG_REQUIRES_GRAD))
    return tensor.requires_grad_() if flags & FLAG_REQUIRES_GRAD else tensor


def _rebuild_dense(meta: TensorMeta, buffer: Any) -> torch.Tensor:
    if not meta.num_bytes:
        return torch.empty(meta.shape, dtype=DTYPES[meta.dtype])
    if meta.dtype == _BOOL:
        # A bool byte other than 0 and 1 is undefined behaviour in the kernels; any set bit means True.
        torch.frombuffer(buffer, dtype=torch.uint8, count=meta.num_bytes).clamp_(max=1)
    shape = meta.shape
    if len(shape) == 1:
        return torch.frombuffer(buffer, dtype=DTYPES[meta.dtype], count=shape[0])
    # resize_ within the storage only changes sizes and strides; unlike view it leaves a tensor that is no view.
    return torch.frombuffer(buffer, dtype=DTYPES[meta.dtype], count=prod(shape)).resize_(shape)


def _rebuild_any(meta: TensorMeta, buffers: Iterator[Any]) -> torch.Tensor:
    if meta.device == "meta":
        return torch.empty(meta.shape, dtype=DTYPES[meta.dtype], device="meta")
    if meta.layout:
        tensor = _sparse.assemble(
            meta, [rebuild(part, buffers) for part in meta.parts], bool(meta.flags & FLAG_COALESCED)
        )
    else:
        tensor = _rebuild_dense(meta, next(buffers))
    if not meta.device:
        return tensor
    try:
        return tensor.to(meta.device)
    except Exception as error:  # each backend has its own way to say that it is not there
        text = f"this worker has no {meta.device}: move the tensor to the CPU before the call"
        raise CannotSend(text) from error
