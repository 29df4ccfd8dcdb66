"""Start workers and supervise them."""

from __future__ import annotations

from gradwire.cluster.api import Cluster, Worker
from gradwire.cluster.status import ClusterStatus, WorkerStatus

__all__ = ["Cluster", "ClusterStatus", "Worker", "WorkerStatus"]
