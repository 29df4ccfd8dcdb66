"""One cluster for all tests of a file. After each test no context and no reference is left on any worker."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from gradwire.cluster.api import Cluster
from gradwire.testing import LeakCheck, wait_until
from nn.models import num_left
from per_file import leak_check, template_ends_with_the_session, template_is_prepared

__all__ = ["leak_check", "template_ends_with_the_session", "template_is_prepared"]


@pytest.fixture(scope="module")
def shared_cluster(leak_check: LeakCheck) -> Iterator[Cluster]:
    """Two workers; with the driver three."""
    with Cluster.local(2) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """Two workers, with nothing left on them afterwards."""
    yield shared_cluster
    gc.collect()
    wait_until(lambda: not num_left(shared_cluster.workers), 10.0, "that contexts and references are freed")
