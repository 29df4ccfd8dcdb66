"""Start workers and supervise them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradwire.cluster.api import Cluster
    from gradwire.cluster.cluster_metrics import ClusterMetrics
    from gradwire.cluster.monitor import MembershipEvent
    from gradwire.cluster.status import CallStatus, ClusterStatus, PassStatus, WorkerStatus
    from gradwire.cluster.trace import Trace, WorkerTrace
    from gradwire.cluster.worker import Worker

__all__ = [
    "CallStatus",
    "Cluster",
    "ClusterMetrics",
    "ClusterStatus",
    "MembershipEvent",
    "PassStatus",
    "Trace",
    "Worker",
    "WorkerStatus",
    "WorkerTrace",
]

# Imported on first use: the command line shows the status of clusters, for which it does not need torch.
_HOMES = {
    "CallStatus": "status",
    "Cluster": "api",
    "ClusterMetrics": "cluster_metrics",
    "ClusterStatus": "status",
    "MembershipEvent": "monitor",
    "PassStatus": "status",
    "Trace": "trace",
    "Worker": "worker",
    "WorkerStatus": "status",
    "WorkerTrace": "trace",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"gradwire.cluster.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'gradwire.cluster' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
