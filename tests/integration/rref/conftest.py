"""Workers to refer to. After each test no reference is left anywhere."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from gradwire.cluster._forkserver import close_idle_fork_server
from gradwire.cluster.api import Cluster
from gradwire.rref import context
from rpc.fixtures import make_puppets, meeting, nursery, workers
from rref.tasks import wait_clean

__all__ = ["make_puppets", "meeting", "nursery", "workers"]


@pytest.fixture(scope="session", autouse=True)
def _template_ends_with_the_session() -> Iterator[None]:
    yield
    close_idle_fork_server()


@pytest.fixture
def asks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver asks for references of which it has heard nothing after a moment, not after seconds."""
    monkeypatch.setattr(context, "_ASK_S", 0.5)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Three workers of its own; with the driver four."""
    with Cluster.local(3) as cluster:
        yield cluster
        gc.collect()
        wait_clean([worker.name for worker in cluster.workers if worker.is_alive])
