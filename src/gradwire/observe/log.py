"""Logging: all of gradwire logs to ``gradwire.<package>.<module>``, and each record has its worker and autograd context.

Besides the usual attributes, records have ``worker`` (empty in a process that is not a worker) and ``context_id`` (0 outside
of a context), for formatters and filters of the program.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Final, Literal

from gradwire.errors import ConfigurationError

ROOT: Final = "gradwire"

LogLevel = Literal["debug", "info", "warning", "error", "critical"]

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


class _Surroundings(threading.local):
    worker = ""  # that this thread serves; empty for threads of the program


thread: Final = _Surroundings()
process_worker = ""
"""The worker of this process, for its other threads."""

current_context_id: Callable[[], int] = lambda: 0  # noqa: E731
"""Replaced by `gradwire.autograd`, which this layer does not know."""


class _Marker(logging.Filter):
    """Adds worker and context to each record of a logger."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.worker = thread.worker or process_worker
        record.context_id = current_context_id()
        return True


_marker: Final = _Marker()


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module of gradwire."""
    logger = logging.getLogger(name)
    logger.addFilter(
        _marker
    )  # once, however often it is asked for; filters of a parent do not see records of its children
    return logger


get_logger(ROOT)


class WorkerFormatter(logging.Formatter):
    """``WARNING gradwire.rpc.server: message``, with the context if there is one, and the worker if it is wanted."""

    def __init__(self, *, shows_worker: bool = True) -> None:
        super().__init__()
        self._shows_worker = shows_worker

    def formatMessage(self, record: logging.LogRecord) -> str:
        worker, context_id = getattr(record, "worker", ""), getattr(record, "context_id", 0)
        where = f"{worker} " if worker and self._shows_worker else ""
        context = f" (context {context_id})" if context_id else ""
        return f"{where}{record.levelname} {record.name}{context}: {record.message}"


class _Output(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints records to the current stderr, unless the program has handlers of its own."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> object:
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


output: Final = _Output()


def print_records(*, shows_worker: bool = True) -> None:
    """Print records of this process with their worker and context, while the program has not configured logging."""
    output.setFormatter(WorkerFormatter(shows_worker=shows_worker))
    logging.getLogger(ROOT).addHandler(output)


def read_level(level: LogLevel | int) -> int:
    """Return the number of a level.

    Raises:
        ConfigurationError: There is no such level.
    """
    if isinstance(level, int) and not isinstance(level, bool) and 1 <= level <= 50:
        return level
    found = _LEVELS.get(level.lower()) if isinstance(level, str) else None
    if found is None:
        raise ConfigurationError(
            f"a log level must be one of {', '.join(_LEVELS)}, or a number from 1 to 50, not {level!r}"
        )
    return found


def set_process_level(level: int) -> None:
    """Set the level of all loggers of gradwire in this process, and make sure that records can be seen."""
    logger = logging.getLogger(ROOT)
    logger.setLevel(level)
    if output not in logger.handlers:
        print_records()
