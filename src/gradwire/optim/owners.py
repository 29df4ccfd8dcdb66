"""The owners of a distributed optimizer's parameters, asked side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from gradwire.errors import DecodeError
from gradwire.optim.local import LocalOptimizer
from gradwire.optim.operations import OPERATE, read_answer
from gradwire.rpc.futures import CallFuture
from gradwire.rref import RRef


@dataclass(slots=True)
class Owner:
    """One worker that has parameters.

    Attributes:
        name: Its name.
        optimizer: What it does for the optimizer.
        is_behind: Whether it may have missed a change of options.
        rank: Its rank.
        is_here: Whether that is the worker that runs this.
    """

    name: str
    optimizer: RRef[LocalOptimizer]
    is_behind: bool = False
    rank: int = field(init=False)
    is_here: bool = field(init=False)

    def __post_init__(self) -> None:
        self.rank, self.is_here = self.optimizer.owner().id, self.optimizer.is_owner()

    def start(self, operation: str, args: Sequence[Any], timeout_s: float) -> CallFuture[Any]:
        """Begins an operation on another worker."""
        return self.optimizer._submit(OPERATE, (operation, *args), timeout_s)

    def run(self, operation: str, args: Sequence[Any], timeout_s: float) -> Any:
        """Does an operation, here or there, and waits for it."""
        if self.is_here:
            return getattr(self.optimizer.local_value(), operation)(*args)
        return self.optimizer._ask(OPERATE, (operation, *args), timeout_s)


@dataclass(frozen=True, slots=True)
class Answers:
    """What came back, by the worker's name."""

    values: dict[str, Any]
    failed: dict[str, Exception]

    def add(self, others: Answers) -> None:
        """Takes in what others have answered."""
        self.values.update(others.values)
        self.failed.update(others.failed)

    def take(self, name: str, future: CallFuture[Any]) -> None:
        """Waits for an answer."""
        try:
            self.values[name] = future.wait()
        except Exception as error:
            self.failed[name] = error

    def read(self, operation: str) -> None:
        """Counts owners that have answered something else as failed."""
        for name, answer in list(self.values.items()):
            try:
                self.values[name] = read_answer(operation, answer)
            except DecodeError as error:
                del self.values[name]
                self.failed[name] = error

    def explain(self) -> str:
        """One line for each failure."""
        return "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in self.failed.items())


def ask_all(
    owners: Iterable[Owner], operation: str, args_for: Callable[[Owner], Sequence[Any]], timeout_s: float
) -> Answers:
    """Asks all owners at the same time, and waits for all.

    The last one is called and waited for in one go, which is quicker than a future; this worker itself, if it is one of
    them, comes last.
    """
    answers = Answers({}, {})
    *others, last = sorted(owners, key=attrgetter("is_here")) or (None,)
    if last is None:
        return answers
    started: list[tuple[Owner, CallFuture[Any]]] = []
    was_enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # these calls have no part in any graph; torch.no_grad() costs ten times as much
    try:
        for owner in others:
            try:
                started.append((owner, owner.start(operation, args_for(owner), timeout_s)))
            except Exception as error:
                answers.failed[owner.name] = error
        try:
            answers.values[last.name] = last.run(operation, args_for(last), timeout_s)
        except Exception as error:
            answers.failed[last.name] = error
        for owner, future in started:
            answers.take(owner.name, future)
        answers.read(operation)
    finally:
        torch._C._set_grad_enabled(was_enabled)
    return answers
