"""A progress bar that only shows itself where it helps: on a terminal or in a notebook with ipywidgets, after a second."""

from __future__ import annotations

import importlib.util
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


_DELAY_S = 1.0


class DelayedProgress:
    """Counts finished items. Refreshed by its user, so that it needs no thread."""

    def __init__(self, description: str, total: int | None) -> None:
        self._description = description
        self._total = total
        self._num_done = 0
        self._shown_from = time.monotonic() + _DELAY_S
        self._bar: Progress | None = None

    def __enter__(self) -> DelayedProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self) -> None:
        """One more item is done."""
        self._num_done += 1

    def refresh(self) -> None:
        """Shows where things stand, if it is time to."""
        if self._bar is None:
            if time.monotonic() < self._shown_from:
                return
            self._shown_from = float("inf")  # asked once: whether there is someone to look does not change
            self._bar = self._make_bar()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._num_done)
            self._bar.refresh()

    def _make_bar(self) -> Progress | None:
        # Imported when a bar may be shown, which in most processes is never.
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True)
        # Without ipywidgets, rich would warn in a notebook with every refresh.
        has_widgets = console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
        if not (sys.stderr.isatty() or has_widgets):
            return None
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        bar = Progress(
            *columns,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),  # into a file or a notebook it must go on to be written as it is
            redirect_stderr=sys.stderr.isatty(),
        )
        bar.add_task(self._description, total=self._total)
        bar.start()
        return bar
