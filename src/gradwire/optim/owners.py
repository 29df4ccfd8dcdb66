"""The owners of a distributed optimizer's parameters, asked side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.optim.local import OPERATE, LocalOptimizer
from gradwire.rpc.futures import CallFuture
from gradwire.rref import RRef


@dataclass(slots=True)
class Owner:
    """One worker that has parameters.

    Attributes:
        name: Its name.
        optimizer: What it does for the optimizer.
        is_behind: Whether it may have missed a change of options.
    """

    name: str
    optimizer: RRef[LocalOptimizer]
    is_behind: bool = False

    @property
    def is_here(self) -> bool:
        """Whether that is the worker that runs this."""
        return self.optimizer.is_owner()

    def start(self, operation: str, args: Sequence[Any], timeout_s: float) -> CallFuture[Any] | None:
        """Begins an operation; None for the worker that runs this, where it is run by `finish`."""
        if self.is_here:
            return None
        return self.optimizer._submit(OPERATE, (operation, *args), timeout_s)

    def finish(self, future: CallFuture[Any] | None, operation: str, args: Sequence[Any]) -> Any:
        """What came of it."""
        if future is not None:
            return future.wait()
        return getattr(self.optimizer.local_value(), operation)(*args)


@dataclass(frozen=True, slots=True)
class Answers:
    """What came back, by the worker's name."""

    values: dict[str, Any]
    failed: dict[str, Exception]

    def add(self, others: Answers) -> None:
        """Takes in what others have answered."""
        self.values.update(others.values)
        self.failed.update(others.failed)

    def explain(self) -> str:
        """One line for each failure."""
        return "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in self.failed.items())


def ask_all(
    owners: Iterable[Owner], operation: str, args_for: Callable[[Owner], Sequence[Any]], timeout_s: float
) -> Answers:
    """Asks all owners at the same time, and waits for all."""
    answers = Answers({}, {})
    started: list[tuple[Owner, Sequence[Any], CallFuture[Any] | None]] = []
    with torch.no_grad():  # these calls have no part in any graph
        for owner in owners:
            try:
                args = args_for(owner)
                started.append((owner, args, owner.start(operation, args, timeout_s)))
            except Exception as error:
                answers.failed[owner.name] = error
        started.sort(key=lambda item: item[2] is not None)  # this worker's own part is done while the others do theirs
        for owner, args, future in started:
            try:
                answers.values[owner.name] = owner.finish(future, operation, args)
            except Exception as error:
                answers.failed[owner.name] = error
    return answers
