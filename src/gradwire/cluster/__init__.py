"""Start workers and supervise them."""

from __future__ import annotations

from gradwire.cluster.api import Cluster
from gradwire.cluster.monitor import MembershipEvent
from gradwire.cluster.status import ClusterStatus, WorkerStatus
from gradwire.cluster.worker import Worker

__all__ = ["Cluster", "ClusterStatus", "MembershipEvent", "Worker", "WorkerStatus"]
