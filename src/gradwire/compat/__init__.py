"""Drop-in replacement for `torch.distributed.rpc`: programs written for it run on gradwire unchanged.

import gradwire.compat

gradwire.compat.install()     # before or after the imports of torch.distributed
...                           # torch.distributed.rpc, .autograd, .optim.DistributedOptimizer, .nn.RemoteModule: gradwire's
gradwire.compat.uninstall()

``python -m gradwire.compat script.py`` does the same for a whole program.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import threading
from collections.abc import Iterator

from gradwire._torch import distributed_rpc
from gradwire.rpc.agent import Agent, attachments

__all__ = ["install", "installed", "is_installed", "uninstall"]

_installed: contextlib.ExitStack | None = None  # undoes what was changed
_depth = 0
_lock = threading.Lock()  # guards _installed and _depth


def install() -> None:
    """Replace torch's functions and classes with gradwire's, in imported modules and in those that are imported later.

    Workers need not be running. Each call needs its own `uninstall`; only the first one has an effect.

    Raises:
        RuntimeError: This process is a worker of torch's own rpc; shut that down first.
    """
    global _installed, _depth
    with _lock:
        if _installed is None:
            tables = importlib.import_module("gradwire.compat.tables")  # imports the parts of gradwire behind the names
            with contextlib.ExitStack() as changes:
                changes.callback(tables.make_patch().undo)
                changes.callback(_FailurePrinter().close)
                attachments.append(_note_rank)
                changes.callback(attachments.remove, _note_rank)
                _installed = changes.pop_all()
        _depth += 1


def uninstall() -> None:
    """Restore torch's functions and classes when called as often as `install`. Without `install`, do nothing."""
    global _installed, _depth
    with _lock:
        _depth = max(0, _depth - 1)
        if _depth == 0 and _installed is not None:
            _installed.close()
            _installed = None


def is_installed() -> bool:
    """Return whether gradwire replaces torch's functions and classes now."""
    return _installed is not None


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Install for a `with` block."""
    install()
    try:
        yield
    finally:
        uninstall()


def _note_rank(agent: Agent) -> None:
    """Set the rank in torch's profiler before the worker serves: an event whose rank changes cannot be read."""
    distributed_rpc()._set_profiler_node_id(agent.info.id)


class _FailurePrinter(logging.Handler):
    """Prints exceptions of functions that other workers call, as torch does, to the current stderr."""

    def __init__(self) -> None:
        super().__init__()
        self._logger = logging.getLogger("gradwire.failures")
        self._before = self._logger.level, self._logger.propagate
        self._logger.addHandler(self)
        self._logger.setLevel(logging.DEBUG)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)

    def close(self) -> None:
        self._logger.removeHandler(self)
        level, self._logger.propagate = self._before
        self._logger.setLevel(level)
        super().close()
