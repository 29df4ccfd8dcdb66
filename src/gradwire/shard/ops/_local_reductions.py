"""Reductions of one part, where it is: all of the same form, so that they can be sent there by name."""

from __future__ import annotations

from typing import Any

import torch


def sum_part(part: torch.Tensor, dims: list[int], keepdim: bool, dtype: Any = None) -> torch.Tensor:
    """torch.sum."""
    return torch.sum(part, dims, keepdim, dtype=dtype)


def nansum_part(part: torch.Tensor, dims: list[int], keepdim: bool, dtype: Any = None) -> torch.Tensor:
    """torch.nansum."""
    return torch.nansum(part, dims, keepdim, dtype=dtype)


def count_part(part: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """torch.count_nonzero."""
    return torch.sum(part != 0, dims, keepdim)


def mean_part(part: torch.Tensor, dims: list[int], keepdim: bool, dtype: Any = None) -> torch.Tensor:
    """torch.mean."""
    return torch.mean(part, dims, keepdim, dtype=dtype)


def prod_part(part: torch.Tensor, dims: list[int], keepdim: bool, dtype: Any = None) -> torch.Tensor:
    """torch.prod, along several dimensions."""
    for dim in sorted(dims, reverse=True):
        part = torch.prod(part, dim, keepdim, dtype=dtype)
    return part


def max_part(part: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """torch.amax."""
    return torch.amax(part, dims, keepdim)


def min_part(part: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """torch.amin."""
    return torch.amin(part, dims, keepdim)


def any_part(part: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """torch.any."""
    return torch.any(part, dims, keepdim)


def all_part(part: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """torch.all."""
    return torch.all(part, dims, keepdim)


def logsumexp_part(part: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """torch.logsumexp."""
    return torch.logsumexp(part, dims, keepdim)


def norm_part(part: torch.Tensor, dims: list[int], keepdim: bool, ord: Any = 2, dtype: Any = None) -> torch.Tensor:
    """torch.linalg.vector_norm."""
    found: torch.Tensor = torch.linalg.vector_norm(part, ord, dims, keepdim, dtype=dtype)
    return found


def var_part(part: torch.Tensor, dims: list[int], keepdim: bool, correction: Any = 1) -> torch.Tensor:
    """torch.var."""
    return torch.var(part, dims, correction=correction, keepdim=keepdim)


def std_part(part: torch.Tensor, dims: list[int], keepdim: bool, correction: Any = 1) -> torch.Tensor:
    """torch.std."""
    return torch.std(part, dims, correction=correction, keepdim=keepdim)


def picked_part(part: torch.Tensor, dims: list[int], keepdim: bool, name: str, item: int) -> torch.Tensor:
    """Values or indices that torch.max and others return along one dimension."""
    found: torch.Tensor = getattr(torch, name)(part, dims[0], keepdim)[item]
    return found


def index_part(part: torch.Tensor, dims: list[int], keepdim: bool, name: str) -> torch.Tensor:
    """torch.argmax or torch.argmin along one dimension."""
    found: torch.Tensor = getattr(torch, name)(part, dims[0], keepdim)
    return found
