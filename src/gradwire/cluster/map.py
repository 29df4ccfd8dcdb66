"""`Cluster.map`: one function over many items, spread over the workers, with a progress bar.

Every worker has at most two items at a time: it works on one while the answer to the other travels, and a slow worker
does not collect items which others could have done.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gradwire import _interrupts
from gradwire._progress_bar import REFRESH_S, DelayedBar, count_columns
from gradwire.errors import RpcTimeout

if TYPE_CHECKING:
    from gradwire.cluster.worker import Worker
    from gradwire.rpc.futures import CallFuture


T = TypeVar("T")

_IN_FLIGHT_PER_WORKER = 2


class MapRun(Generic[T]):
    """A `map` in progress. Used by one thread; other threads only put into `_done`."""

    def __init__(
        self, workers: Sequence[Worker], function: Callable[[Any], T], items: Iterable[Any], timeout_s: float | None
    ) -> None:
        self._function = function
        self._items: Iterator[tuple[int, Any]] = enumerate(items)
        self._num_items = len(items) if isinstance(items, Sized) else None
        self._free = deque(worker for _ in range(_IN_FLIGHT_PER_WORKER) for worker in workers)
        self._open: dict[int, tuple[Worker, CallFuture[T]]] = {}
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()  # indices whose call has ended
        self._results: dict[int, T] = {}
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def run(self) -> list[T]:
        """Run all items, or until the first error, which cancels the open calls."""
        bar = DelayedBar(getattr(self._function, "__name__", "map"), _columns)
        try:
            self._submit_all_that_fit()
            while self._open:
                if self._take_one():
                    self._submit_all_that_fit()
                bar.update(len(self._results), self._num_items)
        finally:
            bar.stop()
            for _, call in self._open.values():
                call.cancel()
        return [self._results[index] for index in range(len(self._results))]

    def _submit_all_that_fit(self) -> None:
        while self._free and (item := _next_of(self._items)) is not None:
            index, argument = item
            worker = self._free.popleft()
            call = worker.with_timeout(self._left_s()).submit(self._function, argument)
            self._open[index] = worker, call
            call.add_done_callback(partial(self._on_call_done, index))

    def _on_call_done(self, index: int, call: CallFuture[T]) -> None:
        self._done.put(index)

    def _take_one(self) -> bool:
        left_s = self._left_s()
        try:
            index = _interrupts.get(self._done, REFRESH_S if left_s is None else min(REFRESH_S, left_s))
        except queue.Empty:
            return False
        worker, call = self._open.pop(index)
        self._results[index] = call.wait()
        self._free.append(worker)
        return True

    def _left_s(self) -> float | None:
        if self._deadline is None:
            return None
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            waiting = sorted({worker.name for worker, _ in self._open.values()})
            where = f" on {', '.join(waiting)}" if waiting else ""
            raise RpcTimeout(
                f"map timed out after {self._timeout_s:g} s (items done: {len(self._results)}, in progress: "
                f"{len(self._open)}{where}); pass a larger timeout"
            )
        return left_s


def _columns(progress: Any) -> list[Any]:
    return [*count_columns(progress), progress.TimeRemainingColumn()]


@_interrupts.interruptible
def _next_of(items: Iterator[T]) -> T | None:
    return next(items, None)  # user code, if they are a generator
