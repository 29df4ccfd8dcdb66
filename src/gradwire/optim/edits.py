"""What happens to the gradients of a context on their way into a step: scaled, clamped.

Edits travel as ``(kind, number)`` with whatever needs the gradients next, and are made anew there, out of place: so what
the context holds stays as it is, and a step that is repeated gets the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from gradwire.autograd.gradients import GradientTable
from gradwire.errors import DecodeError

Edit = tuple[str, float]
SCALE = "scale"
CLAMP = "clamp"


def edited(table: GradientTable, edits: Sequence[Edit]) -> GradientTable:
    """The gradients after all edits.

    Raises:
        DecodeError: There is no such edit.
    """
    for kind, number in edits:
        if kind == SCALE:
            table = {leaf: gradient * number for leaf, gradient in table.items()}
        elif kind == CLAMP:
            table = {leaf: gradient.clamp(-number, number) for leaf, gradient in table.items()}
        else:
            raise DecodeError(f"gradients cannot be edited by {kind!r}")
    return table


def norm_of(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm of one gradient."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    found: torch.Tensor = torch.linalg.vector_norm(values, norm_type)
    return found


def are_finite(gradients: Iterable[torch.Tensor]) -> bool:
    """Whether there is no infinite number and none that is not a number."""
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        if not bool(torch.isfinite(values).all()):
            return False
    return True
