"""Progress bars on a terminal, or in a notebook with ipywidgets, shown only for operations that take long."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.progress import Progress

_DELAY_S: Final = 1.0


REFRESH_S: Final = 0.2
"""How often to update a bar while waiting for something."""


def count_columns(progress: Any) -> list[Any]:
    """Return the columns of a bar that counts things: ``3/8 0:00:05``."""
    return [progress.MofNCompleteColumn(), progress.TimeElapsedColumn()]


class DelayedBar:
    """A progress bar that its user updates, so that it needs no thread.

    `columns` is called with the module `rich.progress` and returns the columns to the right of the bar. The elapsed time
    counts from the creation of this object, not from the moment at which the bar appears.
    """

    def __init__(
        self,
        description: str,
        columns: Callable[[Any], list[Any]],
        is_delayed: bool = True,
        is_shown: bool = True,
    ) -> None:
        self._description = description
        self._columns = columns
        self._began = time.monotonic()
        self._shown_from = self._began + (_DELAY_S if is_delayed else 0.0) if is_shown else float("inf")
        self._bar: Progress | None = None

    def update(self, completed: int, total: int | None, step: str = "") -> None:
        """Show how much is done, and the current step after the description."""
        if self._bar is None:
            if time.monotonic() < self._shown_from:
                return
            self._shown_from = float("inf")  # checked once: whether there is a terminal does not change
            self._bar = self._make_bar()
        if self._bar is not None:
            description = f"{self._description} ({step})" if step else self._description
            self._bar.update(self._bar.task_ids[0], completed=completed, total=total, description=description)
            self._bar.refresh()

    def __enter__(self) -> DelayedBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _make_bar(self) -> Progress | None:
        # Imported only when a bar may be shown, which most processes never do.
        from rich import progress
        from rich.console import Console

        console = Console(stderr=True)
        # Without ipywidgets, rich would warn on every refresh in a notebook.
        has_widgets = console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
        if not (sys.stderr.isatty() or has_widgets):
            return None
        bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            *self._columns(progress),
            console=console,
            auto_refresh=False,
            get_time=time.monotonic,
            redirect_stdout=sys.stdout.isatty(),  # output to a file or a notebook must stay unchanged
            redirect_stderr=sys.stderr.isatty(),
        )
        task_id = bar.add_task(self._description, total=None)
        bar.tasks[task_id].start_time = self._began
        bar.start()
        return bar
