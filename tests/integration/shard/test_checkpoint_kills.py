"""A rank or worker that is killed while sharded tensors are saved leaves the old checkpoint or the new one, whole."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.programs import die_at
from gradwire import checkpoint
from gradwire.cluster.api import Cluster, Worker
from gradwire.errors import CheckpointError, WorkerLost
from gradwire.shard import ChunkShardingSpec
from gradwire.testing import LeakCheck
from shard.groups import _run_rank

CASES = [(1, "half", 1), (0, "files-written", 1), (0, "index-renamed", 2)]
"""Which rank dies, where, and which step the checkpoint is of then."""


@pytest.fixture(scope="module")
def cluster(leak_check: LeakCheck) -> Iterator[Cluster]:
    with Cluster.local(2 * len(CASES) + 1) as found:
        yield found


def full(step: int) -> torch.Tensor:
    return torch.full((6, 4), float(step))


def save_as_rank(rank: int, folder: str, victim: int, point: str) -> str:
    spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    checkpoint.save(folder, {"table": spec.shard(full(1)), "step": 1}, progress=False)
    if rank == victim:
        die_at(point)
    try:
        checkpoint.save(folder, {"table": spec.shard(full(2)), "step": 2}, progress=False)
    except CheckpointError as error:
        return str(error)
    return "saved"


def run_pair(workers: list[Worker], *args: Any) -> list[Any]:
    """On two workers as ranks; what each returned or raised."""
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as store:
        path = str(Path(store) / "store")
        futures = [worker.submit(_run_rank, save_as_rank, n, 2, path, args) for n, worker in enumerate(workers)]
        for future in futures:
            try:
                found.append(future.wait())
            except WorkerLost as error:
                found.append(error)
    return found


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_rank_that_is_killed(cluster: Cluster, tmp_path: Path, number: int) -> None:
    victim, point, expected = CASES[number]
    pair = cluster.workers[2 * number : 2 * number + 2]
    found = run_pair(pair, str(tmp_path), victim, point)
    assert isinstance(found[victim], WorkerLost)
    assert "a rank is gone" in found[1 - victim]
    checkpoint.verify(tmp_path)
    saved = checkpoint.read(tmp_path)
    assert saved["step"] == expected
    assert torch.equal(saved["table"], full(expected))
    summary = checkpoint.save(tmp_path, {"step": 3})  # tidies up
    left = {item.name for item in tmp_path.iterdir() if not item.name.startswith(".")}
    assert left == {"index.json", *(file.name for file in summary.files)}


def test_a_worker_that_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    survivor, victim = cluster.workers[0], cluster.workers[-1]
    spec = ChunkShardingSpec(0, [f"{survivor.name}/cpu", f"{victim.name}/cpu"])
    checkpoint.save(tmp_path, {"table": spec.shard(full(1))}, progress=False)
    table = spec.shard(full(2))
    victim.call(die_at, "half")
    with pytest.raises(CheckpointError, match=f"failed on worker {victim.name}"):
        checkpoint.save(tmp_path, {"table": table}, progress=False)
    assert torch.equal(checkpoint.read(tmp_path)["table"], full(1))
    checkpoint.verify(tmp_path)
