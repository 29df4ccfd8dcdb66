"""The fork server ends with the tests that needed it; and traces that have every event, on a busy machine, too."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from gradwire.cluster._forkserver import close_idle_fork_server
from gradwire.cluster.api import Cluster
from observe import tasks


@pytest.fixture(scope="session", autouse=True)
def _fork_server_ends_with_the_session() -> Iterator[None]:
    yield
    close_idle_fork_server()


@pytest.fixture
def waits_for_late_events(cluster: Cluster) -> Iterator[None]:
    """Make all processes wait longer at the end of a trace: a thread that has sent a message may tell of it late."""
    places = [tasks.set_settle_s, *(functools.partial(worker.call, tasks.set_settle_s) for worker in cluster.workers)]
    before = [set_there(0.5) for set_there in places]
    yield
    for set_there, seconds in zip(places, before, strict=True):
        set_there(seconds)
