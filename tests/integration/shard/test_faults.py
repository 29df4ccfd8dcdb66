"""A worker or a rank that has shards is gone, or stops: an error by the deadline that says who, and the others work on."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gradwire as gw
from cluster.processes import is_there
from gradwire.cluster.api import Cluster
from gradwire.errors import BackwardFailed, ConfigurationError, WorkerLost
from gradwire.shard import ChunkShardingSpec
from gradwire.testing import LeakCheck, wait_until
from shard.groups import join_group

PROMPT_S = 5.0
"""Far below the 60 s of a call: the end of a process is noticed, not waited for."""


@pytest.fixture
def cluster(leak_check: LeakCheck) -> Iterator[Cluster]:
    with Cluster.local(3) as cluster:
        yield cluster


def rows(*workers: int) -> ChunkShardingSpec:
    return ChunkShardingSpec(0, [f"worker{number}/cpu" for number in workers])


def kill(cluster: Cluster, number: int) -> None:
    pid = cluster.workers[number].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_there(pid), 10.0, "the end of the worker")


def check_works(*workers: int) -> None:
    """Forward and backward on these workers are equal to one process."""
    whole = torch.randn(7, 3, dtype=torch.float64)
    sharded = rows(*workers).shard(whole).requires_grad_(True)
    with gw.autograd.context() as ctx:
        total = (sharded.full_tensor() * whole).sum()
        ctx.backward(total)
        assert torch.equal(total, (whole * whole).sum())


def test_worker_that_died_before_the_operation(cluster: Cluster) -> None:
    sharded = rows(0, 1, 2).shard(torch.arange(12.0).view(6, 2))
    kill(cluster, 1)
    started = time.monotonic()
    with pytest.raises(WorkerLost, match="worker1"):
        sharded.full_tensor()
    with pytest.raises(WorkerLost, match="worker1"):
        sharded.redistribute(rows(0, 2)).full_tensor()  # worker0 and worker2 ask worker1, and pass on what they get
    assert time.monotonic() - started < PROMPT_S
    check_works(0, 2)


def test_worker_that_dies_before_backward(cluster: Cluster) -> None:
    sharded = rows(0, 1, 2).shard(torch.arange(12.0).view(6, 2)).requires_grad_(True)
    started = time.monotonic()
    with gw.autograd.context() as ctx:
        loss = sharded.full_tensor().square().sum()
        kill(cluster, 2)
        with pytest.raises(BackwardFailed, match="worker2"):
            ctx.backward(loss)
    assert time.monotonic() - started < PROMPT_S
    check_works(0, 1)


def test_worker_that_is_asked_to_hold_shards_and_is_gone(cluster: Cluster) -> None:
    kill(cluster, 0)
    with pytest.raises(WorkerLost, match="worker0"):
        rows(0, 1).shard(torch.ones(4)).full_tensor()
    check_works(1, 2)


def run_rank(rank: int, store: str, backward: bool, size: int) -> str:
    """Two of three ranks reach the operation; the third is killed before it does."""
    join_group(rank, 3, store, timedelta(seconds=20))
    try:
        rows = ChunkShardingSpec(0, [f"rank:{number}/cpu" for number in range(3)])
        columns = ChunkShardingSpec(1, [f"rank:{number}/cpu" for number in range(3)])
        sharded = rows.shard(torch.ones(size, 3)).requires_grad_(True)
        loss = sharded.redistribute(columns).local_tensor().sum() if backward else None
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                sharded.full_tensor()
        except WorkerLost as error:
            return str(error)
        return "no error"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("size", [6, 500_000], ids=["small", "large"])
def test_rank_that_died(cluster: Cluster, tmp_path: Path, backward: bool, size: int) -> None:
    """The others know at once who it was, in an operation and in its backward, in one exchange and in pieces."""
    futures = [
        worker.submit(run_rank, number, str(tmp_path / "store"), backward, size)
        for number, worker in enumerate(cluster.workers)
    ]
    started = time.monotonic()
    with pytest.raises(WorkerLost, match="worker1"):
        futures[1].wait()
    for number in (0, 2):
        assert re.search(r"rank 1 .*of the process group is gone \(exchange .* seen by rank", futures[number].wait())
    assert time.monotonic() - started < PROMPT_S


def stay_away(rank: int, store: str) -> str:
    """Only one of two ranks makes a call that concerns both."""
    join_group(rank, 2, store, timedelta(seconds=3))
    try:
        sharded = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]).shard(torch.ones(4))
        if rank == 1:
            return "stayed away"
        try:
            sharded.full_tensor()
        except WorkerLost as error:
            return str(error)
        return "no error"
    finally:
        if rank == 0:
            Path(store).with_name("over").touch()
        wait_until(Path(store).with_name("over").exists, 20.0, "the end of rank 0")
        dist.destroy_process_group()


def test_rank_that_does_not_make_the_same_calls(cluster: Cluster, tmp_path: Path) -> None:
    futures = [
        worker.submit(stay_away, number, str(tmp_path / "store")) for number, worker in enumerate(cluster.workers[:2])
    ]
    assert "did not join in time" in futures[0].wait()
    assert futures[1].wait() == "stayed away"


def test_workers_that_trust_each_other_with_data_only(leak_check: LeakCheck) -> None:
    with Cluster.local(1, trust="data"), pytest.raises(ConfigurationError, match='need trust="code"'):
        rows(0).shard(torch.ones(4))
