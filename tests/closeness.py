"""Whether two tensors are close, as `torch.testing.assert_close` says it, without what that function imports.

Its first call in a process imports torch's DTensor and with it a symbolic algebra system, and some calls a compiler: a
second or two of each worker of each cluster.
"""

from __future__ import annotations

from typing import Any

import torch


def assert_close(found: Any, expected: Any, *, rtol: float | None = None, atol: float | None = None) -> None:
    """Raise what `torch.testing.assert_close` raises for these, if it does.

    It is asked about everything but plain tensors of one kind that are close by tolerances as strict as its own.
    """
    if not (_is_plain(found) and _is_plain(expected) and _is_close(found.detach(), expected.detach(), rtol, atol)):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def _is_plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and value.is_cpu


def _is_close(found: torch.Tensor, expected: torch.Tensor, rtol: float | None, atol: float | None) -> bool:
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    if not (found.is_floating_point() or found.is_complex()) or (rtol is None) != (atol is None):
        return torch.equal(found, expected)
    strictest = 1e-7  # of the tolerances that it has for floating-point numbers of all sizes
    rtol, atol = strictest if rtol is None else rtol, strictest if atol is None else atol
    return torch.allclose(found, expected, rtol=rtol, atol=atol)
