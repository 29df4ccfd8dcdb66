"""What simulated workers send each other, and hear of each other."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.autograd._backward_state import Introduction, Report
from simulation.local_engine import Gradients


@dataclass(frozen=True, slots=True)
class Propagate:
    """Gradients for sends, by message id; None for those that have none. `number` counts what its sender has sent."""

    number: int
    introduction: Introduction | None
    answers: dict[int, Gradients | None]
    via: int | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """To the root: everything here is done."""

    report: Report


@dataclass(frozen=True, slots=True)
class Commit:
    """From the root: the gradients count."""


@dataclass(frozen=True, slots=True)
class Abort:
    """The pass failed."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Not from the sender, but about it: it is gone."""


Message = Propagate | Done | Commit | Abort | Lost
