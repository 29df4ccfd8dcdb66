"""After every test of this folder the fork server has no worker left; the usual check does not look that far."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from cluster.processes import children_of
from gradwire.cluster import _forkserver
from gradwire.cluster._forkserver import close_idle_fork_server
from gradwire.testing import wait_until
from rpc.fixtures import free_port

__all__ = ["free_port"]


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    yield
    # The fork server reaps them when it comes to run.
    wait_until(lambda: not [worker for server in children_of(os.getpid()) for worker in children_of(server)], 10.0)


@pytest.fixture
def fresh_fork_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fork servers import torch, as in a user's program: for tests of the time that this takes, or of their sudden end.

    Where one is a fork and takes the place of one that was killed, this process could inherit the workers of that one.
    """
    monkeypatch.setattr(_forkserver, "subprocess", subprocess)


@pytest.fixture(scope="session", autouse=True)
def _fork_server_ends_with_the_session() -> Iterator[None]:
    yield
    close_idle_fork_server()
