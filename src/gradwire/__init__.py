"""gradwire: call functions on other processes and machines, and differentiate through those calls."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gradwire import autograd, config, errors, rpc, runtime
from gradwire.types import WorkerInfo
from gradwire.versions import GRADWIRE_VERSION

if TYPE_CHECKING:
    from gradwire import checkpoint, nn, optim, shard
    from gradwire.cluster import Cluster

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
    "optim",
    "rpc",
    "runtime",
    "shard",
]


def __getattr__(name: str) -> Any:
    if name == "Cluster":
        return importlib.import_module("gradwire.cluster").Cluster
    if name == "cluster" or name in runtime.DEFERRED:
        return importlib.import_module(f"gradwire.{name}")
    raise AttributeError(f"module 'gradwire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
