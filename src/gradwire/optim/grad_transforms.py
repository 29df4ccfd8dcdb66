"""Changes to the gradients of a context on their way into a step: scaling, clamping.

Edits travel as ``(kind, number)`` with the next operation that needs the gradients, and are applied there out of place: the
gradients in the context do not change, and a repeated step gets the same result; once it has succeeded everywhere, the
edits are dropped. A separate message to every owner would cost another round trip for each clipping, and could fail by
itself, which would leave a context clipped on some owners only. The price is that `get_gradients` shows gradients as
the pass left them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

from gradwire.errors import ConfigurationError, DecodeError
from gradwire.params.grads import GradientTable, clamped

SCALE: Final = "scale"
CLAMP: Final = "clamp"
Edit = tuple[Literal["scale", "clamp"], float]


def edited(table: GradientTable, edits: Sequence[Edit]) -> GradientTable:
    for kind, number in edits:
        if kind == SCALE:
            table = {leaf: gradient * number for leaf, gradient in table.items()}
        elif kind == CLAMP:
            table = {leaf: clamped(gradient, number) for leaf, gradient in table.items()}
        else:
            raise DecodeError(f"unknown edit of gradients: {kind!r}")
    return table


class EditLog:
    """Edits to apply to the gradients of contexts when they are next used."""

    def __init__(self, is_over: Callable[[int], bool]) -> None:
        self._is_over = is_over
        self._edits: dict[tuple[int, ...], tuple[Edit, ...]] = {}

    def of(self, contexts: tuple[int, ...]) -> tuple[Edit, ...]:
        """Return the edits for contexts that are used together."""
        if not self._edits:
            return ()
        for known in list(self._edits):  # other threads edit gradients of their own contexts meanwhile
            if any(self._is_over(item) for item in known):
                self._edits.pop(known, None)
        found = self._edits.get(contexts, ())
        others = next((known for known in list(self._edits) if not set(known).isdisjoint(contexts)), None)
        if not found and others:
            raise ConfigurationError(
                f"gradients of contexts {others} were clipped or unscaled together, so they must be used together, "
                f"in the same order; not with {contexts}"
            )
        return found

    def add(self, contexts: tuple[int, ...], edit: Edit) -> None:
        """Append an edit; scaling by one is ignored."""
        if edit != (SCALE, 1.0):
            self._edits[contexts] = (*self.of(contexts), edit)

    def drop(self, contexts: tuple[int, ...]) -> None:
        """Forget the edits of contexts after they were used."""
        self._edits.pop(contexts, None)
