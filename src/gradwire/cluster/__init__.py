"""Start workers and supervise them."""

from __future__ import annotations

from gradwire.cluster._status import ClusterStatus, WorkerStatus
from gradwire.cluster.api import Cluster, Worker

__all__ = ["Cluster", "ClusterStatus", "Worker", "WorkerStatus"]
