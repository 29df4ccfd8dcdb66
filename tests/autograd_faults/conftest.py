"""A cluster of its own for every test: starting one takes milliseconds once the first was there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gradwire.cluster._forkserver import close_idle_fork_server
from gradwire.cluster.api import Cluster
from rpc.fixtures import make_puppets, meeting, nursery, workers

__all__ = ["make_puppets", "meeting", "nursery", "workers"]


@pytest.fixture(scope="session", autouse=True)
def _template_ends_with_the_session() -> Iterator[None]:
    yield
    close_idle_fork_server()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Three workers; with the driver four."""
    with Cluster.local(3) as cluster:
        yield cluster
