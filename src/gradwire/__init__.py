"""gradwire: call functions in other processes and on other machines, and differentiate through those calls."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from gradwire.versions import GRADWIRE_VERSION

# The command line imports the parts that a command needs: `gradwire --help` does without torch.
if TYPE_CHECKING or "gradwire_command" not in sys.modules:
    from gradwire import autograd, config, errors, observe, rpc, runtime
    from gradwire.types import WorkerInfo

if TYPE_CHECKING:
    from gradwire import checkpoint, nn, optim, shard, telemetry
    from gradwire.cluster import Cluster
    from gradwire.cluster.log_level import set_log_level

__version__ = GRADWIRE_VERSION

__all__ = [
    "Cluster",
    "WorkerInfo",
    "__version__",
    "autograd",
    "checkpoint",
    "config",
    "errors",
    "nn",
    "observe",
    "optim",
    "rpc",
    "runtime",
    "set_log_level",
    "shard",
    "telemetry",
]

_HOMES = {
    "Cluster": "gradwire.cluster",
    "WorkerInfo": "gradwire.types",
    "set_log_level": "gradwire.cluster.log_level",
}
_PACKAGES = {*__all__, "cluster", "rref"} - {*_HOMES, "__version__"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"gradwire.{name}")
    raise AttributeError(f"module 'gradwire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
