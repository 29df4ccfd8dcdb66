"""Convert tensors to metadata and bytes, and back.

A tensor is sent as a `TensorMeta` and the bytes of its dense parts. A strided tensor is one part; a sparse one is made
of two (COO: indices, values) or three (compressed: compressed indices, plain indices, values). Only the elements that
the tensor shows are sent, in row-major order: strides and memory format are not part of a tensor's value, and a row of
a large matrix costs a row. Names of dimensions, hooks and Python attributes are not sent.

    describe(tensor) -> meta, parts      sender; parts are views, so the caller copies them before it returns
    as_bytes(part)   -> bytes            sender; or copy_into(part, target), for shared memory; or `device_copies`
    validate(meta)   -> payload bytes    receiver, before it allocates anything
    rebuild(meta, buffers) -> tensor     receiver; the tensor uses the buffers in place

`requires_grad` makes the rebuilt tensor a leaf. The autograd layer joins it to the graph of its sender.
"""

from __future__ import annotations

import ctypes
from collections.abc import Container, Iterator
from math import prod
from typing import Any, Final

import torch

from gradwire import _torch
from gradwire.config import Limits
from gradwire.errors import CannotSend, DecodeError, LimitExceeded
from gradwire.types import Trust
from gradwire.wire.devices import DeviceNames, check_name, name_of, place
from gradwire.wire.messages import TensorMeta

# The order is the protocol: a number names a dtype or layout on every worker, so new ones go to the end.
# fmt: off
DTYPES: Final = (
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
)
LAYOUTS: Final = (
    torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc,
)
# fmt: on
FLAG_REQUIRES_GRAD: Final = 1
FLAG_CONJ: Final = 2
FLAG_NEG: Final = 4
FLAG_COALESCED: Final = 8
FLAG_PARAMETER: Final = 16

_DTYPE_INDEX: Final = {dtype: index for index, dtype in enumerate(DTYPES)}
_BOOL: Final = _DTYPE_INDEX[torch.bool]
_ITEMSIZES: Final = tuple(dtype.itemsize for dtype in DTYPES)
_DIFFERENTIABLE: Final = tuple(dtype.is_floating_point or dtype.is_complex for dtype in DTYPES)
_IS_COMPLEX: Final = tuple(dtype.is_complex for dtype in DTYPES)
_BY_ROWS: Final = (torch.sparse_csr, torch.sparse_bsr)
_STRIDED: Final = torch.strided
_TENSOR: Final = torch.Tensor
_frombuffer: Final = torch.frombuffer
_is_wrapped: Final = _torch.is_functorch_wrapped_tensor
_INT64_MAX: Final = 2**63 - 1

SHAREABLE_DTYPES: Final[dict[Trust, frozenset[int]]] = {
    "code": frozenset(range(len(DTYPES))) - {_BOOL},
    "data": frozenset(index for index, is_value in enumerate(_DIFFERENTIABLE) if is_value),
}
"""Dtypes, by number, whose tensors may lie in shared memory, which the sender can still write to.

What is checked must be in private memory: bools, where a byte must be 0 or 1, and the indices of sparse tensors. Any kernel
that takes integers may check them first and use them as indices later, so a sender that is not trusted may not change those.
"""


# Sending


def describe(
    tensor: torch.Tensor, limits: Limits, devices: DeviceNames | None = None
) -> tuple[TensorMeta, list[torch.Tensor]]:
    """Return a tensor's metadata, and the dense tensors whose bytes it is made of.

    `devices` names the receiver's device for each device here; without it they have the same names.

    These are depth first, detached, without conj and neg bits, not necessarily contiguous, on the device of `tensor`, and
    share its memory; `gradwire.wire.device_copies` reads those that are not on the CPU. A tensor on ``meta`` has none. The
    limit on dims is checked here, so that a tensor that every worker refuses is refused where it is made.
    """
    index = _DTYPE_INDEX.get(tensor.dtype)
    if (
        index is None
        or (devices and devices.get("cpu") != "cpu")
        or type(tensor) is not _TENSOR
        or tensor.layout is not _STRIDED
        or not tensor.is_cpu
        or tensor.is_neg()
        or tensor.is_nested
        or (_IS_COMPLEX[index] and tensor.is_conj())
    ):
        return _describe_any(tensor, limits, devices)
    shape = tuple(tensor.shape)
    if len(shape) > limits.num_dims or _is_wrapped(tensor):
        return _describe_any(tensor, limits, devices)
    if tensor.requires_grad:
        return TensorMeta(index, shape, tensor.nbytes, FLAG_REQUIRES_GRAD), [tensor.detach()]
    return TensorMeta(index, shape, tensor.nbytes), [tensor]


def _describe_any(
    tensor: torch.Tensor, limits: Limits, devices: DeviceNames | None
) -> tuple[TensorMeta, list[torch.Tensor]]:
    _check_sendable(tensor, limits)
    flags = FLAG_PARAMETER if type(tensor) is torch.nn.Parameter else 0
    if tensor.requires_grad:
        flags |= FLAG_REQUIRES_GRAD
    device = name_of(tensor.device, devices)
    plain = tensor.detach()
    if plain.layout is not _STRIDED:
        described = [_describe_dense(part, 0, "") for part in sparse_parts(plain)]
        metas, parts = tuple(meta for meta, _ in described), [part for _, parts in described for part in parts]
        flags |= FLAG_COALESCED if plain.layout is torch.sparse_coo and plain.is_coalesced() else 0
        dtype, layout = _DTYPE_INDEX[plain.dtype], LAYOUTS.index(plain.layout)
        return TensorMeta(dtype, tuple(plain.shape), 0, flags, layout, device, metas), parts
    return _describe_dense(plain, flags, device)


def _describe_dense(plain: torch.Tensor, flags: int, device: str) -> tuple[TensorMeta, list[torch.Tensor]]:
    dtype, shape = _DTYPE_INDEX[plain.dtype], tuple(plain.shape)
    if plain.is_conj():
        plain, flags = plain.conj(), flags | FLAG_CONJ
    if plain.is_neg():
        plain, flags = _torch.neg_view(plain), flags | FLAG_NEG
    if plain.is_meta:
        return TensorMeta(dtype, shape, 0, flags, 0, device), []
    return TensorMeta(dtype, shape, plain.nbytes, flags, 0, device), [plain]


def _check_sendable(tensor: torch.Tensor, limits: Limits) -> None:
    """Raise an error that says why a tensor cannot be sent, and what to send instead."""
    kind, reason = type(tensor), ""
    if kind is not _TENSOR and kind is not torch.nn.Parameter:
        reason = f"it is a {kind.__module__}.{kind.__qualname__}; send a plain tensor, e.g. its local part"
    elif tensor.is_quantized:
        reason = "it is quantized; send tensor.dequantize(), or int_repr() with its scale and zero point"
    elif tensor.is_nested:
        reason = "it is nested; send the list tensor.unbind()"
    elif _is_wrapped(tensor) or _torch.is_functional_tensor(tensor):
        reason = "it belongs to a function transform (vmap, grad, functionalize); make the call outside it"
    elif tensor.layout not in LAYOUTS:
        reason = f"its layout is {tensor.layout}; send tensor.to_dense()"
    elif tensor.dtype not in _DTYPE_INDEX:
        reason = f"its dtype is {tensor.dtype}, which has no portable byte format; convert it first"
    elif tensor.dim() > limits.num_dims:
        reason = f"it has {tensor.dim()} dims; at most {limits.num_dims} are accepted (Limits.num_dims)"
    elif tensor.layout is not _STRIDED and tensor.is_meta:
        reason = 'it is sparse and on the device "meta", so its parts are unknown'
    if reason:
        raise CannotSend(f"this tensor cannot be sent: {reason}")


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors that a sparse one is made of."""
    if tensor.layout is torch.sparse_coo:
        return _torch.coo_indices(tensor), _torch.coo_values(tensor)
    if tensor.layout in _BY_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


_memory_at: Final = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype = ctypes.py_object
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_PyBUF_READ: Final = 0x100
_copy_at: Final = ctypes.pythonapi.PyBytes_FromStringAndSize
_copy_at.restype = ctypes.py_object
_copy_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
_COPY_UP_TO: Final = 4096  # a copy is cheaper than a memoryview, and small frames are joined anyway


def as_bytes(part: torch.Tensor) -> tuple[memoryview | bytes, torch.Tensor]:
    """Return the bytes of a dense part, and the tensor that must be kept alive while they are used.

    A large contiguous part is not copied; of any other, the owner is a contiguous copy.
    """
    owner = part if part.is_contiguous() else part.contiguous()
    num_bytes = owner.nbytes
    if num_bytes == 0:
        return b"", owner
    try:
        address = owner.data_ptr()
        if address == 0:  # zeros that were never written down, as forward-mode differentiation makes them
            owner = owner.clone()
            address = owner.data_ptr()
    except RuntimeError as error:
        raise CannotSend(f"this tensor cannot be sent: {error}") from error
    if num_bytes <= _COPY_UP_TO:
        return _copy_at(address, num_bytes), owner
    return _memory_at(address, num_bytes, _PyBUF_READ), owner


def view_bytes(owner: torch.Tensor) -> memoryview | bytes:
    """Return the bytes of a contiguous tensor of the CPU, not copied; keep it alive while they are used."""
    return _memory_at(owner.data_ptr(), owner.nbytes, _PyBUF_READ) if owner.nbytes else b""


def address_of(part: torch.Tensor) -> int:
    """Return the address of a contiguous part's bytes; 0 for zeros that are not materialized."""
    try:
        return part.data_ptr()
    except RuntimeError as error:
        raise CannotSend(f"this tensor cannot be sent: {error}") from error


def copy_into(part: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a dense part, of whatever strides, into a flat ``uint8`` tensor of exactly its size, in one pass."""
    num_bytes = part.nbytes
    if target.nbytes != num_bytes:
        raise ValueError(f"copy_into: the part has {num_bytes} bytes and the target {target.nbytes}")
    if num_bytes:
        try:
            target.view(part.dtype).view(part.shape).copy_(part)
        except RuntimeError as error:
            raise CannotSend(f"this tensor cannot be sent: {error}") from error


# Receiving


def iter_parts(meta: TensorMeta) -> Iterator[TensorMeta]:
    """Iterate over the metadata of the dense parts, in the order of `describe`."""
    if meta.layout:
        yield from meta.parts
    elif meta.device != "meta":
        yield meta


def validate(meta: TensorMeta, limits: Limits, shared_dtypes: Container[int] = ()) -> int:
    """Validate metadata received from another worker, before anything is allocated for it.

    The ranges of single fields were checked when it was decoded. Returns how many bytes of the payload belong to this
    tensor; bytes in shared-memory slots do not count.
    """
    index, shape = meta.dtype, meta.shape
    if index >= len(_ITEMSIZES):
        raise DecodeError(f"unknown dtype number {index}")
    if len(shape) > limits.num_dims:
        raise LimitExceeded(f"a tensor has {len(shape)} dims; at most {limits.num_dims} are accepted")
    num_bytes = prod(shape) * _ITEMSIZES[index]
    # torch multiplies strides with every zero read as one, so that is the product that must not overflow.
    if not 0 < num_bytes <= _INT64_MAX and prod(max(size, 1) for size in shape) * _ITEMSIZES[index] > _INT64_MAX:
        raise DecodeError(f"the sizes of a tensor overflow 63 bits: {shape}")
    if meta.flags:
        _check_flags(meta)
    if meta.device:
        check_name(meta.device)
    if meta.layout:
        if meta.slot is not None or meta.num_bytes:
            raise DecodeError("a sparse tensor must not have bytes of its own besides those of its parts")
        _check_sparse(meta)
        return sum(validate(part, limits) for part in meta.parts)
    if meta.parts:
        raise DecodeError("a dense tensor must not have parts")
    if meta.device == "meta":
        num_bytes = 0
    if meta.num_bytes != num_bytes:
        raise DecodeError(f"a tensor of shape {shape} and {DTYPES[index]} has {num_bytes} bytes, not {meta.num_bytes}")
    if meta.slot is None:
        return num_bytes
    if index not in shared_dtypes:  # or the connection has no shared memory
        raise DecodeError(f"a tensor of {DTYPES[index]} is in shared memory, which this connection does not allow")
    if not 0 < num_bytes <= meta.slot.capacity:
        raise DecodeError(f"{num_bytes} bytes do not fit slot {meta.slot.slot_id} of {meta.slot.capacity} bytes")
    return 0


def _check_flags(meta: TensorMeta) -> None:
    flags = meta.flags
    if flags & FLAG_REQUIRES_GRAD and not _DIFFERENTIABLE[meta.dtype]:
        raise DecodeError(f"a tensor of {DTYPES[meta.dtype]} cannot require a gradient")
    if flags & FLAG_CONJ and not _IS_COMPLEX[meta.dtype]:
        raise DecodeError(f"a tensor of {DTYPES[meta.dtype]} cannot be conjugated")
    if flags & FLAG_COALESCED and LAYOUTS[meta.layout] is not torch.sparse_coo:
        raise DecodeError("only a sparse COO tensor can be coalesced")
    if flags & (FLAG_CONJ | FLAG_NEG) and meta.layout:
        raise DecodeError("the conj and neg bits of a sparse tensor belong to its values")


def _check_sparse(meta: TensorMeta) -> None:
    """Check number, dtypes and ranks of the parts; torch checks the rest when it assembles them."""
    is_coo = LAYOUTS[meta.layout] is torch.sparse_coo
    if len(meta.parts) != (2 if is_coo else 3):
        raise DecodeError(f"a tensor of {LAYOUTS[meta.layout]} cannot have {len(meta.parts)} parts")
    if any(part.layout or part.device or part.parts for part in meta.parts):
        raise DecodeError("the parts of a sparse tensor must be dense and on the CPU")
    if any(part.slot is not None for part in meta.parts):  # its sender could change the indices after the check
        raise DecodeError("the parts of a sparse tensor cannot be in shared memory")
    *indices, values = meta.parts
    allowed = [_DTYPE_INDEX[torch.int64]] if is_coo else [_DTYPE_INDEX[torch.int64], _DTYPE_INDEX[torch.int32]]
    if any(part.dtype not in allowed or part.flags for part in indices):
        raise DecodeError("the indices of a sparse tensor must be plain integers")
    if values.dtype != meta.dtype or values.flags & ~(FLAG_CONJ | FLAG_NEG):
        raise DecodeError("the values of a sparse tensor must have its dtype")
    sizes = [part.shape for part in meta.parts]
    if not (_fits_coo if is_coo else _fits_compressed)(meta.shape, *sizes):
        raise DecodeError(f"parts of sizes {sizes} do not make a tensor of {LAYOUTS[meta.layout]} and {meta.shape}")
    if not is_coo and indices[0].dtype != indices[1].dtype:
        raise DecodeError("the two index tensors of a compressed sparse tensor must have the same dtype")


def _fits_coo(shape: tuple[int, ...], indices: tuple[int, ...], values: tuple[int, ...]) -> bool:
    if len(indices) != 2 or not values or values[0] != indices[1]:
        return False
    return indices[0] <= len(shape) and values[1:] == shape[indices[0] :]


def _fits_compressed(
    shape: tuple[int, ...], compressed: tuple[int, ...], plain: tuple[int, ...], values: tuple[int, ...]
) -> bool:
    if len(shape) < 2 or not plain or len(compressed) != len(plain) or compressed[:-1] != plain[:-1]:
        return False
    return values[: len(plain)] == plain


def rebuild(meta: TensorMeta, buffers: Iterator[Any], devices: DeviceNames | None = None) -> torch.Tensor:
    """Make the tensor that `meta`, checked by `validate`, describes; it keeps the buffers, one for each dense part.

    `devices` names the device here for each device of the sender; without it they have the same names. A tensor on a device
    may still be on its way there, from the buffers: see `device_copies.wait_arrived`.

    Raises:
        NoSuchDevice: This process has no such device.
    """
    dtype, shape, num_bytes, device, flags = meta.dtype, meta.shape, meta.num_bytes, meta.device, meta.flags
    if meta.layout:
        tensor = _assemble_sparse(meta, [rebuild(part, buffers) for part in meta.parts])
    elif num_bytes:
        buffer = next(buffers)
        if dtype == _BOOL:
            # A bool byte other than 0 and 1 is undefined behaviour in the kernels; any set bit means True.
            _frombuffer(buffer, dtype=torch.uint8, count=num_bytes).clamp_(max=1)
        tensor = _frombuffer(buffer, dtype=DTYPES[dtype], count=num_bytes // _ITEMSIZES[dtype])
        if len(shape) != 1:
            # resize_ within the storage only changes sizes and strides; unlike view it does not return a view.
            tensor.resize_(shape)
    else:  # nothing to use in place, but an empty part has its buffer
        tensor = torch.empty(shape, dtype=DTYPES[dtype], device="meta" if device == "meta" else None)
        if device != "meta":
            next(buffers)
    if (device or (devices and devices.get("cpu") != "cpu")) and not tensor.is_meta:
        tensor = place(tensor, device, devices)
    if not flags:
        return tensor
    if flags & FLAG_CONJ:
        tensor = tensor.conj()
    if flags & FLAG_NEG:
        tensor = _torch.neg_view(tensor)
    if flags & FLAG_PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=bool(flags & FLAG_REQUIRES_GRAD))
    return tensor.requires_grad_() if flags & FLAG_REQUIRES_GRAD else tensor


def _assemble_sparse(meta: TensorMeta, parts: list[torch.Tensor]) -> torch.Tensor:
    try:
        try:
            return _assemble(meta, parts)
        except Warning:  # torch says once that these layouts are young; this process makes errors of warnings
            return _assemble(meta, parts)
    except (RuntimeError, ValueError, IndexError) as error:
        raise DecodeError(f"not a valid tensor of {LAYOUTS[meta.layout]}: {str(error)[:500]}") from error


def _assemble(meta: TensorMeta, parts: list[torch.Tensor]) -> torch.Tensor:
    layout = LAYOUTS[meta.layout]
    if layout is torch.sparse_coo:
        indices, values = parts
        coalesced = bool(meta.flags & FLAG_COALESCED) or None  # None: nothing is said about it
        return torch.sparse_coo_tensor(indices, values, meta.shape, check_invariants=True, is_coalesced=coalesced)
    compressed, plain, values = parts
    return torch.sparse_compressed_tensor(compressed, plain, values, meta.shape, layout=layout, check_invariants=True)
