"""One cluster for all tests of a file. After each test no context is left anywhere; after the last one nothing else is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autograd.worlds import num_contexts
from gradwire.cluster.api import Cluster
from gradwire.testing import LeakCheck, wait_until
from per_file import leak_check, template_ends_with_the_session

__all__ = ["leak_check", "template_ends_with_the_session"]


@pytest.fixture(scope="module")
def shared_cluster(leak_check: LeakCheck) -> Iterator[Cluster]:
    """Three workers; with the driver four."""
    with Cluster.local(3) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """Three workers, and no context left on any of them afterwards."""
    yield shared_cluster
    wait_until(lambda: not num_contexts(shared_cluster.workers), 10.0, "that every context is released")
