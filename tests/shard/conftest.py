"""Process groups of two and of four ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from gradwire.cluster._template_process import close_idle_template
from gradwire.testing import LeakCheck, wait_until
from shard.groups import Ranks, ranks


@pytest.fixture(scope="session", autouse=True)
def _template_ends_with_the_session() -> Iterator[None]:
    yield
    close_idle_template()


@pytest.fixture(scope="module", autouse=True)
def leak_check(_own_temporary_folder: None) -> Iterator[LeakCheck]:
    """Once for the file, because the ranks serve all of its tests."""
    check = LeakCheck()
    yield check
    with contextlib.suppress(TimeoutError):  # the assertion says what is left
        wait_until(lambda: not _leaks(check), 5.0)
    assert _leaks(check) == []


def _leaks(check: LeakCheck) -> list[str]:
    """All but the thread that watches over the time of the test at hand: it is younger than the check."""
    return [leak for leak in check.leaks() if not leak.startswith("thread pytest_timeout")]


@pytest.fixture(scope="module")
def four_ranks(leak_check: LeakCheck) -> Iterator[Ranks]:
    with ranks(4) as found:
        yield found
