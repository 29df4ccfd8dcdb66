"""gradwire: call functions on other processes and machines, and differentiate through those calls."""

from __future__ import annotations

from gradwire import autograd, checkpoint, config, errors, nn, optim, rpc, runtime, shard
from gradwire.cluster import Cluster
from gradwire.types import WorkerInfo

__version__ = "0.1.0.dev0"

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
