"""The workers and ranks that save or load together: a step succeeds on all of them, or raises an error.

Over RPC workers one of them runs the program and asks the others (`Workers`). In a process group every rank runs it,
and ranks exchange the outcome of each step (`Ranks`). So an error has the same consequences in both: a save takes
effect when the index is renamed, and a load changes nothing before its last step.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from gradwire import _interrupts, errors, rpc
from gradwire.errors import CheckpointError, NotInitialized, WorkerLost
from gradwire.rref import context
from gradwire.shard.group_backend import all_or_none
from gradwire.types import is_class

T = TypeVar("T")

_POLL_S: Final = 0.1


def worker_name() -> str:
    """Return the name of the worker whose call this thread serves, or of this process, for files and messages."""
    try:
        return context.here().agent.info.name
    except NotInitialized:
        return "local"


class Workers:
    """Other workers, which are asked to do something (`doing`, for errors) while this one does its part."""

    def __init__(self, doing: str, timeout_s: float) -> None:
        self._doing = doing
        self._timeout_s = timeout_s

    def ask(
        self,
        calls: Iterable[tuple[str, str, tuple[Any, ...]]],
        here: Callable[[], T],
        on_answer: Callable[[int], None] = lambda _: None,
        on_poll: Callable[[], None] = lambda: None,
    ) -> tuple[T, list[tuple[str, Any]]]:
        """Call workers, do this worker's part (`here`) meanwhile, and wait for all, also if one fails.

        `on_answer` is called with the number of a call that has ended, in another thread; `on_poll` periodically.

        Returns:
            The result of this worker's part, and every answer with the worker's name, in the order of the calls.
        """
        futures: list[tuple[str, Any]] = []
        failures: list[tuple[str, Exception]] = []
        ended: list[int] = []  # appended to by other threads
        has_news = threading.Event()

        def on_done(number: int, _: Any) -> None:
            on_answer(number)
            ended.append(number)
            has_news.set()

        for number, (worker, function, args) in enumerate(calls):
            try:
                with torch.no_grad():  # not part of any graph
                    future = rpc.rpc_async(worker, function, args, timeout=self._timeout_s)
            except Exception as error:
                failures.append((worker, error))
            else:
                future.add_done_callback(functools.partial(on_done, number))
                futures.append((worker, future))
        try:
            own = here()
        except Exception as error:
            failures.insert(0, (worker_name(), error))
        while True:  # every call ends by its own deadline, so this does, too
            has_news.clear()
            on_poll()
            if len(ended) == len(futures):
                break
            _interrupts.wait(has_news, _POLL_S)
        answers = []
        for worker, future in futures:
            try:
                answers.append((worker, future.wait()))
            except Exception as error:
                failures.append((worker, error))
        if not failures:
            return own, answers
        for _, failure in failures:
            if isinstance(failure, CheckpointError):
                raise failure
        worker, failure = failures[0]
        more = f" (and on {len(failures) - 1} more)" if len(failures) > 1 else ""
        text = f"{self._doing} failed on worker {worker}{more}: {type(failure).__name__}: {failure}"
        raise CheckpointError(text) from failure


class Ranks:
    """The ranks of a process group that do something together; without a group, this process alone."""

    def __init__(self, group: Any, doing: str) -> None:
        self.rank = 0 if group is None else dist.get_rank(group)
        self.name = worker_name() if group is None else f"rank{self.rank}"  # in files
        self._group = group
        self._doing = doing

    def first(self, action: Callable[[], T]) -> T:
        """Do something on rank 0, and return the result on all ranks; raises as `all` does."""
        results: list[Any] = self.all(lambda: action() if self.rank == 0 else None)
        found: T = results[0]
        return found

    def each(self, action: Callable[[], T]) -> T:
        """Do something on every rank, and return the result of this one; raises as `all` does."""
        kept: list[T] = []
        self.all(lambda: kept.append(action()))
        return kept[0]

    def all(self, action: Callable[[], T]) -> list[T]:
        """Do something on every rank, and return all results; if it fails on one rank, raise on all of them."""
        if self._group is None:
            return [action()]
        try:
            return all_or_none(self._group, action, self._failed)
        except CheckpointError:
            raise
        except WorkerLost as lost:
            raise CheckpointError(f"{self._doing} failed: a rank is gone or does not answer ({lost})") from lost
        except Exception as error:
            raise self._failed(self.rank, type(error).__name__, str(error)) from error

    def _failed(self, rank: int, name: str, text: str) -> CheckpointError:
        kind = getattr(errors, name, None)
        if is_class(kind) and issubclass(kind, CheckpointError):
            return kind(f"on rank {rank}: {text}")
        return CheckpointError(f"{self._doing} failed on rank {rank}: {name}: {text}")
