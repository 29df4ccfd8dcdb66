"""What functions raise is printed where they ran, as torch does, too; the caller gets it anyway."""

from __future__ import annotations

import logging
import sys

_logger = logging.getLogger("gradwire.failures")


class _ToStderr(logging.Handler):
    """Writes to whatever stderr is at the moment."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one failure with its traceback."""
        print(self.format(record), file=sys.stderr, flush=True)


_handler = _ToStderr()
_before: list[tuple[int, bool]] = []  # level and propagation of the logger, if it prints now


def start() -> None:
    """Begins to print."""
    if not _before:
        _before.append((_logger.level, _logger.propagate))
        _logger.addHandler(_handler)
        _logger.setLevel(logging.DEBUG)
        _logger.propagate = False


def stop() -> None:
    """Leaves the logger as it was."""
    if _before:
        _logger.removeHandler(_handler)
        level, _logger.propagate = _before.pop()
        _logger.setLevel(level)
