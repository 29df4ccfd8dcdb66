"""One cluster for all tests of a file; a cluster of its own for tests that kill."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gradwire.cluster.api import Cluster
from gradwire.testing import LeakCheck
from per_file import leak_check, template_ends_with_the_session, template_is_prepared

__all__ = ["leak_check", "template_ends_with_the_session", "template_is_prepared"]


@pytest.fixture(scope="module")
def cluster(leak_check: LeakCheck) -> Iterator[Cluster]:
    """Three workers; with the driver four."""
    with Cluster.local(3) as cluster:
        yield cluster


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    """Two workers of its own, for tests that lose one."""
    with Cluster.local(2) as cluster:
        yield cluster
