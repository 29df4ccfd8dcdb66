"""Asking many workers at once, with something to do here meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

import torch

from gradwire import rpc
from gradwire.checkpoint._index import TensorEntry
from gradwire.checkpoint.objects import Part
from gradwire.checkpoint.owners import SentPart, send, worker_name
from gradwire.errors import CheckpointError
from gradwire.rpc.futures import CallFuture
from gradwire.rref import RRef

T = TypeVar("T")

_POLL_S: Final = 0.1


class Parts:
    """The parts of a save or a load, by the worker that has them."""

    def __init__(self) -> None:
        self.here: list[Part] = []
        self.elsewhere: dict[str, list[Part]] = {}

    def add(self, part: Part) -> tuple[str, int]:
        """Takes a part; returns where its report will be: the worker ("" for this one), and its number there."""
        if isinstance(part.value, RRef) and not part.value.is_owner():
            name, found = part.value.owner_name(), self.elsewhere.setdefault(part.value.owner_name(), [])
        else:
            value = part.value.local_value() if isinstance(part.value, RRef) else part.value
            name, found, part = "", self.here, replace(part, value=value)
        found.append(part)
        return name, len(found) - 1

    def sent(self, worker: str) -> list[SentPart]:
        """The parts of a worker, as they travel."""
        return [send(part) for part in self.elsewhere[worker]]


class Round:
    """One question to many workers, and something to do here meanwhile.

    Args:
        doing: What is being done, for errors: ``saving to /a/b``.
        timeout_s: How long each worker may take.
    """

    def __init__(self, doing: str, timeout_s: float) -> None:
        self._doing = doing
        self._timeout_s = timeout_s
        self._futures: list[tuple[str, CallFuture[Any] | Exception]] = []
        self._settled = threading.Semaphore(0)  # counts answers

    def ask(self, worker: str, function: str, *args: Any, on_done: Callable[[], None] = lambda: None) -> None:
        """Asks a worker; `on_done` is called when it has answered."""
        try:
            with torch.no_grad():  # has no part in any graph
                future = rpc.rpc_async(worker, function, args, timeout=self._timeout_s)
        except Exception as error:
            self._futures.append((worker, error))
            return
        self._futures.append((worker, future))

        def on_answer(_: Any) -> None:
            on_done()
            self._settled.release()

        future.add_done_callback(on_answer)

    def finish(
        self, here: Callable[[], T], on_poll: Callable[[], None] = lambda: None
    ) -> tuple[T, list[tuple[str, Any]]]:
        """Does this worker's part, then waits for the others.

        Args:
            here: This worker's part.
            on_poll: Called now and then while others are waited for.

        Returns:
            What came of this worker's part, and every answer with the worker's name, in the order of the questions.

        Raises:
            CheckpointError: Something went wrong somewhere; everybody has come to an end.
        """
        failures: list[tuple[str, Exception]] = []
        try:
            own = here()
        except Exception as error:
            failures.append((worker_name(), error))
        self._wait_settled(on_poll)
        answers = []
        for worker, future in self._futures:
            try:
                if isinstance(future, Exception):
                    raise future
                answers.append((worker, future.wait()))
            except Exception as error:
                failures.append((worker, error))
        if failures:
            raise self._failed(failures)
        return own, answers

    def _wait_settled(self, on_poll: Callable[[], None]) -> None:
        """Every call ends by its own deadline, so this does, too."""
        for _ in range(sum(not isinstance(future, Exception) for _, future in self._futures)):
            while not self._settled.acquire(timeout=_POLL_S):
                on_poll()
            on_poll()

    def _failed(self, failures: list[tuple[str, Exception]]) -> Exception:
        for _, error in failures:
            if isinstance(error, CheckpointError):
                return error
        worker, error = failures[0]
        more = f" (and on {len(failures) - 1} more)" if len(failures) > 1 else ""
        failed = CheckpointError(f"{self._doing} failed on worker {worker}{more}: {type(error).__name__}: {error}")
        failed.__cause__ = error
        return failed


def groups_of(entries: Mapping[str, TensorEntry], group_bytes: int) -> list[dict[str, TensorEntry]]:
    """Tensors in groups of about that many bytes."""
    groups: list[dict[str, TensorEntry]] = []
    size = group_bytes
    for name, entry in entries.items():
        if size >= group_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = entry
        size += entry.num_bytes
    return groups
