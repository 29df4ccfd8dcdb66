"""Tools for tests of programs that use gradwire: workers in one process, waiting, leaks, and the contracts of
transports and clusters.

with gradwire.testing.LeakCheck(), gradwire.testing.local_agents(2) as (first, second):
    assert first.call(second.info, operator.add, (1, 2)) == 3
"""

from __future__ import annotations

from gradwire.testing.agents import local_agents, wait_until
from gradwire.testing.clusters import CLUSTER_CHECKS, check_cluster
from gradwire.testing.leaks import LeakCheck, LeakFound
from gradwire.testing.transports import TRANSPORT_CHECKS, ConnectionPair, TransportCheck, check_transport

__all__ = [
    "CLUSTER_CHECKS",
    "TRANSPORT_CHECKS",
    "ConnectionPair",
    "LeakCheck",
    "LeakFound",
    "TransportCheck",
    "check_cluster",
    "check_transport",
    "local_agents",
    "wait_until",
]
