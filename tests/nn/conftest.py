"""One cluster for all tests of a file. After each test no context and no reference is left on any worker."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest

from gradwire.cluster._template_process import close_idle_template
from gradwire.cluster.api import Cluster
from gradwire.testing import LeakCheck, wait_until
from nn.models import num_left


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
