"""What happens to the gradients of a context on their way into a step: scaled, clamped.

Edits travel as ``(kind, number)`` with whatever needs the gradients next, and are made anew there, out of place: so what
the context holds stays as it is, and a step that is repeated gets the same; once it is done everywhere, they are dropped. A
message of their own to every owner would
cost another round trip for each clipping, and fail on its own: a context of which half is clipped. The price is that
`get_gradients` shows gradients as the pass left them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from gradwire.autograd.gradients import GradientTable
from gradwire.errors import ConfigurationError, DecodeError, OptimizerError

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
            table = {leaf: _clamped(gradient, number) for leaf, gradient in table.items()}
        else:
            raise DecodeError(f"gradients cannot be edited by {kind!r}")
    return table


def _clamped(gradient: torch.Tensor, limit: float) -> torch.Tensor:
    if not gradient.is_sparse:
        return gradient.clamp(-limit, limit)
    whole = gradient.coalesce()  # torch clamps no sparse tensors; entries of one place count together
    return torch.sparse_coo_tensor(
        whole.indices(), whole.values().clamp(-limit, limit), whole.shape, is_coalesced=True, check_invariants=False
    )


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


class EditLog:
    """What is to be done to the gradients of contexts when they are next used."""

    def __init__(self) -> None:
        self._edits: dict[tuple[int, ...], tuple[Edit, ...]] = {}

    def of(self, contexts: tuple[int, ...]) -> tuple[Edit, ...]:
        """The edits for contexts that are used together.

        Raises:
            ConfigurationError: Some of them were edited together with others.
        """
        found = self._edits.get(contexts, ())
        if not found and self._edits:
            for others in self._edits:
                if not set(others).isdisjoint(contexts):
                    raise ConfigurationError(
                        f"gradients of contexts {others} were clipped or unscaled together, so they must be used together, "
                        f"in the same order; not with {contexts}"
                    )
        return found

    def add(self, contexts: tuple[int, ...], edit: Edit) -> None:
        """One more, after those that there are."""
        self._edits[contexts] = (*self.of(contexts), edit)

    def drop(self, contexts: tuple[int, ...]) -> None:
        """They were used: what comes next is as the passes left it."""
        self._edits.pop(contexts, None)

    def forget(self, is_over: Callable[[int], bool]) -> None:
        """Drops the edits of contexts that are over."""
        for contexts in [key for key in self._edits if any(is_over(item) for item in key)]:
            del self._edits[contexts]


def total_norm(norms: Sequence[torch.Tensor], norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
    """The norm of all gradients, of their norms, as `torch.nn.utils.clip_grad_norm_` computes it.

    Raises:
        OptimizerError: It is not finite, and that is an error.
    """
    if not norms:
        return torch.tensor(0.0)
    total: torch.Tensor = torch.linalg.vector_norm(torch.cat([norm.reshape(1) for norm in norms]), norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise OptimizerError(
            f"The total norm of order {norm_type} for gradients is non-finite ({float(total)}), so it cannot be clipped; "
            f"pass error_if_nonfinite=False to scale by it all the same"
        )
    return total


def clip_factor(total: torch.Tensor, max_norm: float) -> float:
    """What gradients are multiplied with, so that their norm is at most that."""
    return float(torch.clamp(max_norm / (total + 1e-6), max=1.0))
