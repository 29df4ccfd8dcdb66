"""`Cluster.map`: one function over many items, spread over the workers, with a progress bar.

Every worker has at most two items at a time: it works on one while the answer to the other travels, and a slow worker
does not collect items which others could have done.
"""

from __future__ import annotations

import importlib.util
import queue
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gradwire import _interrupts
from gradwire.errors import RpcTimeout

if TYPE_CHECKING:
    from rich.progress import Progress

    from gradwire.cluster.api import Worker
    from gradwire.rpc.futures import CallFuture


T = TypeVar("T")

_IN_FLIGHT_PER_WORKER = 2
_REFRESH_S = 0.2
_PROGRESS_DELAY_S = 1.0


class MapRun(Generic[T]):
    """One `map` under way. Used by one thread; other threads only put into `_done`."""

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
        """Run to the end, or to the first error, which cancels what is open."""
        try:
            with DelayedProgress(getattr(self._function, "__name__", "map"), self._num_items) as progress:
                self._submit_all_that_fit()
                while self._open:
                    if self._take_one():
                        progress.advance()
                        self._submit_all_that_fit()
                    progress.refresh()
        finally:
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
            index = _interrupts.get(self._done, _REFRESH_S if left_s is None else min(_REFRESH_S, left_s))
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
            raise RpcTimeout(
                f"map was given {self._timeout_s:g} s; {len(self._results)} items are done and {len(self._open)} "
                f"are open on {', '.join(waiting)}"
            )
        return left_s


@_interrupts.interruptible
def _next_of(items: Iterator[T]) -> T | None:
    return next(items, None)  # user code, if they are a generator


class DelayedProgress:
    """A bar that counts finished items: on a terminal or in a notebook with ipywidgets, and only after a second.

    Its user refreshes it, so that it needs no thread.
    """

    def __init__(self, description: str, total: int | None) -> None:
        self._description = description
        self._total = total
        self._num_done = 0
        self._shown_from = time.monotonic() + _PROGRESS_DELAY_S
        self._bar: Progress | None = None

    def __enter__(self) -> DelayedProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self) -> None:
        self._num_done += 1

    def refresh(self) -> None:
        if self._bar is None:
            if time.monotonic() < self._shown_from:
                return
            self._shown_from = float("inf")  # asked once: whether there is a terminal does not change
            self._bar = self._make_bar()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._num_done)
            self._bar.refresh()

    def _make_bar(self) -> Progress | None:
        # Imported when a bar may be shown, which in most processes is never.
        from rich import progress
        from rich.console import Console

        console = Console(stderr=True)
        # Without ipywidgets, rich would warn in a notebook with every refresh.
        has_widgets = console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
        if not (sys.stderr.isatty() or has_widgets):
            return None
        bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),  # into a file or a notebook it must go on to be written as it is
            redirect_stderr=sys.stderr.isatty(),
        )
        bar.add_task(self._description, total=self._total)
        bar.start()
        return bar
