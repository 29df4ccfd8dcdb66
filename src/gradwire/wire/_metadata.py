"""What the metadata of a tensor may say: dtypes, layouts, flags, devices, and the checks of foreign metadata."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Final

import torch

from gradwire.config import Limits
from gradwire.errors import DecodeError, LimitExceeded
from gradwire.types import Trust
from gradwire.wire import _sparse
from gradwire.wire.messages import TensorMeta

# The order is the protocol: a number below names a dtype on every worker, so new ones go to the end.
# fmt: off
_DTYPE_NAMES: Final = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
)
# fmt: on


def _known_dtypes() -> tuple[torch.dtype, ...]:
    """Dtypes of this torch, up to the first it lacks: leaving one out of the middle would rename the others."""
    found = [getattr(torch, name, None) for name in _DTYPE_NAMES]
    return tuple(found[: found.index(None)] if None in found else found)  # type: ignore[arg-type]


DTYPES: Final = _known_dtypes()
LAYOUTS: Final = _sparse.LAYOUTS
FLAG_REQUIRES_GRAD: Final = 1
FLAG_CONJ: Final = 2
FLAG_NEG: Final = 4
FLAG_COALESCED: Final = 8
FLAG_PARAMETER: Final = 16

_ALL_FLAGS: Final = 31
DTYPE_INDEX: Final = {dtype: index for index, dtype in enumerate(DTYPES)}
_ITEMSIZES: Final = tuple(dtype.itemsize for dtype in DTYPES)
_DIFFERENTIABLE: Final = tuple(dtype.is_floating_point or dtype.is_complex for dtype in DTYPES)
IS_COMPLEX: Final = tuple(dtype.is_complex for dtype in DTYPES)
_INT64_MAX: Final = 2**63 - 1
SHAREABLE_DTYPES: Final[dict[Trust, frozenset[int]]] = {
    "code": frozenset(range(len(DTYPES))) - {DTYPE_INDEX[torch.bool]},
    "data": frozenset(index for index, is_value in enumerate(_DIFFERENTIABLE) if is_value),
}
"""Dtypes, by number, whose tensors may lie in shared memory, which the sender can still write to.

What is checked must be in private memory: bools, where a byte must be 0 or 1, and the indices of sparse tensors. Any kernel
that takes integers may check them first and use them as indices later, so a sender that is not trusted may not change those.
"""
_EXTENSION: Final = re.escape(torch._C._get_privateuse1_backend_name())  # the one backend that may be added to torch
DEVICE: Final = re.compile(rf"(?:cuda|xpu|mps|mtia|hpu|xla|ipu|meta|{_EXTENSION})(?::[0-9]{{1,3}})?")


def validate(meta: TensorMeta, limits: Limits) -> int:
    """Check metadata that came from another worker, before anything is allocated for it.

    Returns:
        How many bytes of the payload belong to this tensor; bytes in shared-memory slots do not count.

    Raises:
        DecodeError: The metadata contradicts itself or names something unknown.
        LimitExceeded: It has too many dims.
    """
    index, shape = meta.dtype, meta.shape
    if not 0 <= index < len(_ITEMSIZES):
        raise DecodeError(f"unknown dtype number {index}")
    if len(shape) > limits.num_dims:
        raise LimitExceeded(f"a tensor of {len(shape)} dims; at most {limits.num_dims} are accepted")
    num_bytes = prod(shape) * _ITEMSIZES[index]
    if shape and (num_bytes <= 0 or num_bytes > _INT64_MAX or min(shape) < 0):
        _check_sizes(shape, _ITEMSIZES[index])
    if meta.flags:
        _check_flags(meta)
    if meta.layout or meta.device or meta.parts:
        return _validate_any(meta, num_bytes, limits)
    if meta.num_bytes != num_bytes:
        raise DecodeError(f"a tensor of shape {shape} and {DTYPES[index]} has {num_bytes} bytes, not {meta.num_bytes}")
    if meta.slot is None:
        return num_bytes
    _check_slot(meta)
    return 0


def _check_sizes(shape: tuple[int, ...], itemsize: int) -> None:
    if min(shape) < 0:
        raise DecodeError(f"a tensor of negative size: {shape}")
    # Torch multiplies strides with every zero read as one, so that is the product that must not overflow.
    if prod(max(size, 1) for size in shape) * itemsize > _INT64_MAX:
        raise DecodeError(f"the sizes of a tensor overflow 63 bits: {shape}")


def _check_flags(meta: TensorMeta) -> None:
    flags = meta.flags
    if not 0 <= flags <= _ALL_FLAGS:
        raise DecodeError(f"unknown tensor flags {flags}")
    if flags & FLAG_REQUIRES_GRAD and not _DIFFERENTIABLE[meta.dtype]:
        raise DecodeError(f"a tensor of {DTYPES[meta.dtype]} cannot require a gradient")
    if flags & FLAG_CONJ and not IS_COMPLEX[meta.dtype]:
        raise DecodeError(f"a tensor of {DTYPES[meta.dtype]} cannot be conjugated")
    if flags & FLAG_COALESCED and LAYOUTS[meta.layout : meta.layout + 1] != (torch.sparse_coo,):
        raise DecodeError("only a sparse COO tensor can be coalesced")
    if flags & (FLAG_CONJ | FLAG_NEG) and meta.layout:
        raise DecodeError("the conj and neg bits of a sparse tensor belong to its values")


def _check_slot(meta: TensorMeta) -> None:
    slot = meta.slot
    if slot is None:
        return
    if not 0 <= slot.slot_id <= _INT64_MAX or not 0 < meta.num_bytes <= slot.capacity <= _INT64_MAX:
        raise DecodeError(f"{meta.num_bytes} bytes in slot {slot.slot_id} of {slot.capacity} bytes")


def _validate_any(meta: TensorMeta, num_bytes: int, limits: Limits) -> int:
    """The same as `validate` for sparse tensors and those of other devices."""
    if not 0 <= meta.layout < len(LAYOUTS):
        raise DecodeError(f"unknown layout number {meta.layout}")
    if meta.device and not DEVICE.fullmatch(meta.device):
        raise DecodeError(f"unknown device {meta.device[:64]!r}")
    is_hollow = meta.device == "meta" or meta.layout != 0
    if is_hollow and meta.slot is not None:
        raise DecodeError("only a dense part can be in shared memory")
    if meta.num_bytes != (0 if is_hollow else num_bytes):
        raise DecodeError(f"a tensor of shape {meta.shape} and layout {meta.layout} with {meta.num_bytes} bytes")
    if meta.layout:
        _sparse.check_parts(meta, DTYPES)
        return sum(validate(part, limits) for part in meta.parts)
    if meta.parts:
        raise DecodeError("a dense tensor is not made of parts")
    _check_slot(meta)
    return 0 if meta.slot is not None else meta.num_bytes


def iter_parts(meta: TensorMeta) -> Iterator[TensorMeta]:
    """The metadata of the dense parts, in the order of `describe`."""
    if meta.layout:
        yield from meta.parts
    elif meta.device != "meta":
        yield meta
