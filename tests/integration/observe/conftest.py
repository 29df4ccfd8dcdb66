"""The fork server ends with the tests that needed it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gradwire.cluster._forkserver import close_idle_fork_server


@pytest.fixture(scope="session", autouse=True)
def _fork_server_ends_with_the_session() -> Iterator[None]:
    yield
    close_idle_fork_server()
