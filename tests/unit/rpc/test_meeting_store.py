"""What a worker leaves in a store that outlives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed import FileStore

from gradwire.rpc.meeting_store import TorchStore
from gradwire.types import WorkerAddress, WorkerInfo


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[[], TorchStore]]:
    made: list[TorchStore] = []

    def make() -> TorchStore:
        made.append(TorchStore(FileStore(str(tmp_path / "store"), -1), "a file", 20.0, outlives_workers=True))
        return made[-1]

    yield make
    for store in made:
        store.leave()


def address(incarnation: int) -> WorkerAddress:
    return WorkerAddress(WorkerInfo("w0", 0), incarnation, "host", ("unix:/tmp/x",), "")


def test_a_worker_that_leaves_is_not_found_any_more(open_store: Callable[[], TorchStore]) -> None:
    one, other = open_store(), open_store()
    one.publish(address(1 << 60))
    assert other.find("w0") == other.find(0) == address(1 << 60)
    one.leave()
    assert other.find("w0") is None
    assert other.find(0) is None


def test_a_worker_that_leaves_does_not_remove_the_next_of_its_name(open_store: Callable[[], TorchStore]) -> None:
    """Its process is still ending when another one meets in its place."""
    old, new = open_store(), open_store()
    old.publish(address(1))
    new.publish(address(2))
    old.leave()
    assert new.find("w0") == new.find(0) == address(2)
