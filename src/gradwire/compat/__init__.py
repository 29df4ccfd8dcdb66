"""torch's names on gradwire: programs written for `torch.distributed.rpc` run unchanged.

import gradwire.compat

gradwire.compat.install()     # before or after the imports of torch.distributed
...                           # torch.distributed.rpc, .autograd, .optim.DistributedOptimizer, .nn.RemoteModule: gradwire's
gradwire.compat.uninstall()

``python -m gradwire.compat script.py`` does the same for a whole program.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator

from gradwire.compat import start as _printing
from gradwire.compat.patching import Patch

__all__ = ["install", "installed", "is_installed", "uninstall"]

_patch: Patch | None = None
_depth = 0
_lock = threading.Lock()  # guards _patch and _depth


def install() -> None:
    """Makes torch's names mean gradwire's, in modules that are imported already and in those that are later.

    Workers need not be running. Calling it again does nothing, except that `uninstall` must be called as often.

    Raises:
        RuntimeError: This process is a worker of torch's own rpc; shut that down first.
    """
    global _patch, _depth
    with _lock:
        if _patch is None:
            tables = importlib.import_module("gradwire.compat.tables")  # imports the parts of gradwire behind the names
            _patch = tables.make_patch()
            _printing.start()
        _depth += 1


def uninstall() -> None:
    """Gives torch its names back, once it was called as often as `install`. Without `install`, does nothing."""
    global _patch, _depth
    with _lock:
        _depth = max(0, _depth - 1)
        if _depth == 0 and _patch is not None:
            _printing.stop()
            _patch.undo()
            _patch = None


def is_installed() -> bool:
    """Whether torch's names mean gradwire's now."""
    return _patch is not None


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """`install` for a block."""
    install()
    try:
        yield
    finally:
        uninstall()
