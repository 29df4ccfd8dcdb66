"""One cluster for all tests of a file; a cluster of its own for tests that kill."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest

from gradwire.cluster._template_process import close_idle_template
from gradwire.cluster.api import Cluster
from gradwire.testing import LeakCheck, wait_until


@pytest.fixture(scope="session", autouse=True)
def _template_ends_with_the_session() -> Iterator[None]:
    yield
    close_idle_template()


@pytest.fixture(scope="module", autouse=True)
def leak_check(_own_temporary_folder: None) -> Iterator[LeakCheck]:
    """Once for the file: connections and threads that one test opens serve the next."""
    check = LeakCheck()
    yield check
    gc.collect()
    with contextlib.suppress(TimeoutError):  # the assertion says what is left
        wait_until(lambda: not _leaks(check), 5.0)
    assert _leaks(check) == []


def _leaks(check: LeakCheck) -> list[str]:
    """All but the thread that watches over the time of the test at hand: it is younger than the check."""
    return [leak for leak in check.leaks() if not leak.startswith("thread pytest_timeout")]


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
