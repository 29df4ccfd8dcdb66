"""Fixtures for folders whose tests share a cluster: leaks are looked for once for each file, not after each test.

A folder's ``conftest.py`` imports `leak_check` and `template_ends_with_the_session`, and names them in ``__all__``.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest

from gradwire.cluster._forkserver import borrow_fork_server, close_idle_fork_server, return_fork_server
from gradwire.testing import LeakCheck, wait_until


@pytest.fixture(scope="session", autouse=True)
def template_ends_with_the_session() -> Iterator[None]:
    """Later clusters start in milliseconds because the template stays; it must not outlive the tests."""
    yield
    close_idle_fork_server()


@pytest.fixture(scope="module", autouse=True)
def template_is_prepared(request: pytest.FixtureRequest, template_ends_with_the_session: None) -> Iterator[None]:
    """Import once in the template what each worker would: pytest, and what a test's module names in `WORKERS_IMPORT`."""
    modules = getattr(request.module, "WORKERS_IMPORT", [])
    return_fork_server(borrow_fork_server(60.0, ["pytest", *modules]))
    yield
    if modules:  # workers of other files must not have them
        close_idle_fork_server()


@pytest.fixture(scope="module", autouse=True)
def leak_check(_own_temporary_folder: None) -> Iterator[LeakCheck]:
    """Once for the file: connections and threads that one test opens serve the next."""
    check = LeakCheck()
    yield check
    gc.collect()
    with contextlib.suppress(TimeoutError):  # the assertion says what is left
        wait_until(lambda: not _leaks(check), 20.0)
    left = _leaks(check)
    assert left == [], left


def _leaks(check: LeakCheck) -> list[str]:
    """All but the thread that watches over the time of the test at hand: it is younger than the check."""
    return [leak for leak in check.leaks() if not leak.startswith("thread pytest_timeout")]
