"""Sparse tensors: which dense parts they are made of, what must hold between them, and how to put them together.

Torch checks the indices themselves (range, order, duplicates) when it is asked to; a tensor with wrong indices that is
not checked reads outside of its memory later.
"""

from __future__ import annotations

from typing import Final

import torch

from gradwire.errors import DecodeError
from gradwire.wire.messages import TensorMeta

LAYOUTS: Final = (
    torch.strided,
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)

_BY_ROWS: Final = (torch.sparse_csr, torch.sparse_bsr)


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Indices, then values."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in _BY_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def check_parts(meta: TensorMeta, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check number, dtypes and ranks of the parts; torch checks the rest when it assembles them.

    Raises:
        DecodeError: They do not belong together.
    """
    is_coo = LAYOUTS[meta.layout] is torch.sparse_coo
    if len(meta.parts) != (2 if is_coo else 3):
        raise DecodeError(f"a tensor of {LAYOUTS[meta.layout]} made of {len(meta.parts)} parts")
    if any(part.layout or part.device or part.parts for part in meta.parts):
        raise DecodeError("a sparse tensor is made of dense parts on the CPU")
    if any(part.slot is not None for part in meta.parts):
        # Its sender could change the indices after they were checked.
        raise DecodeError("the parts of a sparse tensor cannot be in shared memory")
    *indices, values = meta.parts
    allowed = (torch.int64,) if is_coo else (torch.int64, torch.int32)
    if any(not 0 <= part.dtype < len(dtypes) or dtypes[part.dtype] not in allowed or part.flags for part in indices):
        raise DecodeError("the indices of a sparse tensor must be plain integers")
    if values.dtype != meta.dtype or values.flags & ~_VALUE_FLAGS:
        raise DecodeError("the values of a sparse tensor must have its dtype")
    if is_coo:
        _check_coo(meta, indices[0], values)
    else:
        _check_compressed(meta, indices, values)


_VALUE_FLAGS: Final = 2 | 4  # conj and neg


def _check_coo(meta: TensorMeta, indices: TensorMeta, values: TensorMeta) -> None:
    if len(indices.shape) != 2 or not values.shape or values.shape[0] != indices.shape[1]:
        raise DecodeError(f"sparse COO: indices {indices.shape} do not fit values {values.shape}")
    sparse_dims = indices.shape[0]
    if not 0 <= sparse_dims <= len(meta.shape) or values.shape[1:] != meta.shape[sparse_dims:]:
        raise DecodeError(f"sparse COO: indices {indices.shape}, values {values.shape} do not fit shape {meta.shape}")


def _check_compressed(meta: TensorMeta, indices: list[TensorMeta], values: TensorMeta) -> None:
    compressed, plain = indices
    if compressed.dtype != plain.dtype or len(compressed.shape) != len(plain.shape) or not plain.shape:
        raise DecodeError("the two index tensors of a compressed sparse tensor must be alike")
    if len(meta.shape) < 2 or compressed.shape[:-1] != plain.shape[:-1]:
        raise DecodeError(f"compressed sparse: indices {compressed.shape}, {plain.shape} for shape {meta.shape}")
    if values.shape[: len(plain.shape)] != plain.shape:
        raise DecodeError(f"compressed sparse: indices {plain.shape} do not fit values {values.shape}")


def assemble(meta: TensorMeta, parts: list[torch.Tensor], is_coalesced: bool) -> torch.Tensor:
    """Put the parts together.

    Raises:
        DecodeError: Indices out of range, unsorted or repeated where they must not be, or sizes that do not fit.
    """
    try:
        try:
            return _assemble(meta, parts, is_coalesced)
        except Warning:  # torch says once that these layouts are young; this process makes errors of warnings
            return _assemble(meta, parts, is_coalesced)
    except (RuntimeError, ValueError, IndexError) as error:
        raise DecodeError(f"not a valid tensor of {LAYOUTS[meta.layout]}: {str(error)[:500]}") from error


def _assemble(meta: TensorMeta, parts: list[torch.Tensor], is_coalesced: bool) -> torch.Tensor:
    layout = LAYOUTS[meta.layout]
    if layout is torch.sparse_coo:
        coalesced = is_coalesced or None  # None: nothing is said about it
        indices, values = parts
        return torch.sparse_coo_tensor(indices, values, meta.shape, check_invariants=True, is_coalesced=coalesced)
    compressed, plain, values = parts
    return torch.sparse_compressed_tensor(compressed, plain, values, meta.shape, layout=layout, check_invariants=True)
