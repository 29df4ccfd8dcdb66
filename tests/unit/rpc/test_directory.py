"""Who is in the cluster."""

from __future__ import annotations

import pytest

from gradwire.errors import IdentityTaken, UnknownWorker
from gradwire.rpc.peers import StaticDirectory
from gradwire.types import WorkerAddress, WorkerInfo


def make_address(name: str, rank: int, incarnation: int = 1) -> WorkerAddress:
    return WorkerAddress(WorkerInfo(name, rank), incarnation, "host", (f"inproc://{name}/{incarnation}",))


def test_workers_are_found_by_name_and_rank() -> None:
    directory = StaticDirectory([make_address("b", 1), make_address("a", 0)])
    assert directory.find("a") == directory.find(0) == make_address("a", 0)
    assert [info.name for info in directory.infos()] == ["a", "b"]
    assert directory.is_fixed
    assert directory.refresh("a") is None


@pytest.mark.parametrize("worker", ["c", 2, -1])
def test_an_unknown_worker_is_named_with_those_there_are(worker: str | int) -> None:
    directory = StaticDirectory([make_address("a", 0), make_address("b", 1)])
    with pytest.raises(UnknownWorker, match=rf"no worker {worker!r} .* it has: a, b"):
        directory.find(worker)


def test_only_a_newer_incarnation_replaces() -> None:
    directory = StaticDirectory([make_address("a", 0, incarnation=5)])
    directory.update(make_address("a", 0, incarnation=4))
    assert directory.find("a").incarnation == 5
    directory.update(make_address("a", 0, incarnation=6))
    assert directory.find("a").incarnation == directory.find(0).incarnation == 6


@pytest.mark.parametrize(("name", "rank"), [("z", 0), ("a", 1), ("a", 7), ("b", 0)])
def test_names_and_ranks_stay_together(name: str, rank: int) -> None:
    directory = StaticDirectory([make_address("a", 0), make_address("b", 1)])
    with pytest.raises(IdentityTaken, match=f"{name} of rank {rank}; every rank needs a name of its own"):
        directory.update(make_address(name, rank, incarnation=9))
    assert directory.find(0) == directory.find("a") == make_address("a", 0)
    assert directory.find(1) == directory.find("b") == make_address("b", 1)
    assert len(directory.infos()) == 2
