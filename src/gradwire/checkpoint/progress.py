"""The progress of a save or load: a bar on a terminal, calls of a user function, or nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gradwire import _interrupts
from gradwire._progress_bar import DelayedBar

ProgressOption = bool | Callable[[int, int], None] | None
"""None: a bar on a terminal. False: none. A function: called with the bytes done and the total bytes."""

_INTERVAL_S: Final = 0.1


class ByteProgress:
    """Counts bytes, and shows them periodically. Its user refreshes it, so that it needs no thread."""

    def __init__(self, description: str, option: ProgressOption) -> None:
        self._callback = option if callable(option) else None
        is_quiet = option is False or self._callback is not None
        self._bar = None if is_quiet else DelayedBar(description, _columns, is_delayed=option is None)
        self._next_at = 0.0
        self._last_told = (-1, -1)
        self._lock = threading.Lock()  # guards num_bytes
        self.num_bytes = 0
        self.total = 0

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._show()
        if self._bar is not None:
            self._bar.stop()

    def advance(self, num_bytes: int) -> None:
        """Count bytes that are done, and show them if a refresh is due.

        Files can be large, so a deferred Ctrl-C is raised here: between two pieces of one.
        """
        self.count(num_bytes)
        self.refresh()
        _interrupts.deliver()

    def count(self, num_bytes: int) -> None:
        """Count bytes from another thread, which must not show anything."""
        with self._lock:
            self.num_bytes += num_bytes

    def refresh(self) -> None:
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + _INTERVAL_S
            self._show()

    def _show(self) -> None:
        done = min(self.num_bytes, self.total)
        if self._callback is not None and (done, self.total) != self._last_told:
            self._last_told = (done, self.total)
            _tell(self._callback, done, self.total)
        if self._bar is not None:
            self._bar.update(done, self.total)


def _columns(progress: Any) -> list[Any]:
    return [
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    ]


@_interrupts.interruptible  # runs the user's function
def _tell(callback: Callable[[int, int], None], num_bytes: int, total: int) -> None:
    callback(num_bytes, total)


class WatchedFiles:
    """Reads how much other workers have written from the sizes of their files, so that no worker has to report it."""

    def __init__(self, paths: list[Path]) -> None:
        self._sizes = dict.fromkeys(paths, 0)

    def num_new(self) -> int:
        grown = 0
        for path, before in self._sizes.items():
            try:
                self._sizes[path] = max(before, os.lstat(path).st_size)
            except OSError:  # not begun yet, or not visible from here
                continue
            grown += self._sizes[path] - before
        return grown
