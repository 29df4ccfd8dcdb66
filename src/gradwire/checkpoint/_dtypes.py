"""Which dtypes a checkpoint can hold, and what they are called in safetensors files.

safetensors has no complex numbers of 128 and of 32 bits: such a tensor is kept as its real and imaginary parts, in one more
dimension of size 2. The index has the tensor's own dtype and shape.
"""

from __future__ import annotations

from math import prod
from typing import Final

import torch

_STORED_NAMES: Final = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "complex128": "F64",
    "complex32": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
_IN_TWO_PARTS: Final = (torch.complex128, torch.complex32)

DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in _STORED_NAMES if hasattr(torch, name)}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def stored_name(dtype: torch.dtype) -> str:
    """What safetensors calls the dtype that a tensor's bytes are kept as."""
    return _STORED_NAMES[NAMES[dtype]]


def stored_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a tensor has in its file."""
    return (*shape, 2) if dtype in _IN_TWO_PARTS else shape


def num_bytes_of(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """How many bytes a tensor takes in its file."""
    return dtype.itemsize * prod(shape)


def alignment_of(dtype: torch.dtype) -> int:
    """What the place of a tensor in its file must be a multiple of."""
    return dtype.itemsize
