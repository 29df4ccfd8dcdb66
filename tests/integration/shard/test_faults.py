"""A worker or a rank that has shards is gone, or stops: an error by the deadline that says who, and the others work on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire as gw
from cluster.processes import is_there, stopped
from gradwire.cluster.api import Cluster
from gradwire.errors import BackwardFailed, ConfigurationError, WorkerLost
from gradwire.shard import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from gradwire.shard.rank_loss import collective
from gradwire.testing import LeakCheck, wait_until
from shard.groups import join_group

PROMPT_S = 10.0
"""Far below the 60 s of a call, and the timeouts of groups: the end of a process is noticed, not waited for."""

LATE_S = 5.0
"""The timeout of groups whose operations time out; ranks must also be able to join within it."""


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
    join_group(rank, 3, store, timedelta(seconds=60))
    try:
        rows = ChunkShardingSpec(0, [f"rank:{number}/cpu" for number in range(3)])
        columns = ChunkShardingSpec(1, [f"rank:{number}/cpu" for number in range(3)])
        sharded = rows.shard(torch.ones(size, 3)).requires_grad_(True)
        run = sharded.redistribute(columns).local_tensor().sum().backward if backward else sharded.full_tensor
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(WorkerLost) as first:
            run()
        with pytest.raises(WorkerLost) as second:  # the group is of no use any more, for the same reason
            sharded.full_tensor()
        assert second.value.worker == first.value.worker
        return str(first.value)
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


@contextlib.contextmanager
def staying_until(store: str, is_last: bool) -> Iterator[None]:
    """Stay in the group until the last rank has left this block: no rank learns anything from the end of another."""
    over = Path(store).with_name("over")
    try:
        yield
    finally:
        if is_last:
            over.touch()
        wait_until(over.exists, 40.0, "the end of the last rank")
        dist.destroy_process_group()


NUM_IN_CHAIN = 2**21  # elements: the parts are moved in pieces


def chain(num: int = NUM_IN_CHAIN) -> tuple[EnumerableShardingSpec, EnumerableShardingSpec]:
    """Two layouts: from the first to the second, rank 1 sends to rank 2, and rank 2 to rank 0."""
    half = num // 2
    before, after = (
        EnumerableShardingSpec(
            [ShardMetadata([0], [half], f"rank:{first}/cpu"), ShardMetadata([half], [half], f"rank:{second}/cpu")]
        )
        for first, second in ((1, 2), (2, 0))
    )
    return before, after


def wait_in_a_chain(rank: int, store: str, is_killed: bool) -> str:
    """Rank 0 waits for rank 2 alone, which waits for rank 1, which is killed or does not make the call."""
    join_group(rank, 3, store, timedelta(seconds=LATE_S if rank == 2 and not is_killed else 60))
    with staying_until(store, is_last=rank == 0):
        before, after = chain()
        sharded = before.shard(torch.ones(NUM_IN_CHAIN))
        if rank == 1 and is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            return "stayed away"
        with pytest.raises(WorkerLost) as caught:
            sharded.redistribute(after)
        return str(caught.value)


def test_rank_that_waits_for_a_rank_that_lost_another(cluster: Cluster, tmp_path: Path) -> None:
    """It is told at once as well, and who is gone, not who has given up."""
    futures = [
        worker.submit(wait_in_a_chain, number, str(tmp_path / "store"), True)
        for number, worker in enumerate(cluster.workers)
    ]
    started = time.monotonic()
    for number in (2, 0):
        assert futures[number].wait().startswith("rank 1 of the process group is gone (exchange of parts")
    assert time.monotonic() - started < PROMPT_S
    with pytest.raises(WorkerLost, match="worker1"):
        futures[1].wait()


def leave_in_a_message(rank: int, folder: Path) -> str:
    """As above, but rank 0 stops while rank 2 sends to it, and rank 1 is killed then."""
    join_group(rank, 3, str(folder / "store"), timedelta(seconds=60))
    batch_isend_irecv = dist.batch_isend_irecv

    def post(operations: list[dist.P2POp]) -> list[dist.Work]:
        requests = batch_isend_irecv(operations)
        (folder / f"posted{rank}").touch()
        return requests

    with staying_until(str(folder / "store"), is_last=rank == 0), pytest.MonkeyPatch.context() as patch:
        before, after = chain(2**25)
        patch.setattr("gradwire.shard.rank_loss._FINISH_S", 20.0)  # a busy machine may need more than usual
        patch.setattr("gradwire.shard.redistribute.PIECE_BYTES", 2**24)  # four pieces; the network takes less than one
        sharded = before.shard(torch.ones(2**25))
        if rank == 1:
            wait_until((folder / "posted2").exists, 40.0, "the message")
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            wait_until((folder / "receiver stands").exists, 40.0, "the receiver to stand")
        patch.setattr(dist, "batch_isend_irecv", post)
        with pytest.raises(WorkerLost) as caught:
            sharded.redistribute(after)
        return str(caught.value)


def test_rank_that_leaves_in_the_middle_of_a_message(cluster: Cluster, tmp_path: Path) -> None:
    """It finishes the message first: gloo would tell the receiver nothing until the group times out."""
    receiver, lost, sender = (
        worker.submit(leave_in_a_message, number, tmp_path) for number, worker in enumerate(cluster.workers)
    )
    wait_until((tmp_path / "posted0").exists, 40.0, "the receiver")
    started = time.monotonic()
    with stopped(cluster.workers[0].pid):
        (tmp_path / "receiver stands").touch()
        with pytest.raises(WorkerLost, match="worker1"):
            lost.wait()
        wait_until(lambda: b"gradwire/left/2" in (tmp_path / "store").read_bytes(), 20.0, "the report of rank 2")
    for future in (sender, receiver):
        assert future.wait().startswith("rank 1 of the process group is gone (exchange of parts")
    assert time.monotonic() - started < PROMPT_S


def test_rank_that_waits_for_a_rank_that_timed_out(cluster: Cluster, tmp_path: Path) -> None:
    """A rank that has given up waiting is not gone, so the others do not say that it is."""
    futures = [
        worker.submit(wait_in_a_chain, number, str(tmp_path / "store"), False)
        for number, worker in enumerate(cluster.workers)
    ]
    started = time.monotonic()
    for number in (2, 0):
        assert futures[number].wait().startswith("a rank of the process group did not join in time")
    assert time.monotonic() - started < LATE_S + PROMPT_S
    assert futures[1].wait() == "stayed away"


def stay_away(rank: int, store: str) -> str:
    """Only one of two ranks makes a call that concerns both."""
    join_group(rank, 2, store, timedelta(seconds=LATE_S))
    with staying_until(store, is_last=rank == 0):
        sharded = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]).shard(torch.ones(4))
        if rank == 1:
            return "stayed away"
        with pytest.raises(WorkerLost) as caught:
            sharded.full_tensor()
        return str(caught.value)


def test_rank_that_does_not_make_the_same_calls(cluster: Cluster, tmp_path: Path) -> None:
    futures = [
        worker.submit(stay_away, number, str(tmp_path / "store")) for number, worker in enumerate(cluster.workers[:2])
    ]
    assert futures[0].wait().startswith("a rank of the process group did not join in time")
    assert futures[1].wait() == "stayed away"


def send_too_much(folder: Path) -> None:
    join_group(1, 2, str(folder / "store"), timedelta(seconds=60))
    wait_until((folder / "receiver stands").exists, 20.0)
    dist.isend(torch.ones(2**25), 0)
    (folder / "sent").touch()
    threading.Event().wait(60.0)  # until it is killed, with what the network did not take


def receive(folder: Path) -> str:
    join_group(0, 2, str(folder / "store"), timedelta(seconds=60))
    try:
        request: Any = dist.irecv(torch.ones(2**25), 1)
        (folder / "receiving").touch()
        wait_until((folder / "killed").exists, 30.0)
        with pytest.raises(WorkerLost) as caught, collective(None, "a test"):
            request.wait(timedelta(seconds=2))
        return str(caught.value)
    finally:
        dist.destroy_process_group()


def test_rank_that_died_in_the_middle_of_a_message(cluster: Cluster, tmp_path: Path) -> None:
    """Gloo says only that time is up; the error says who is gone all the same."""
    receiver, sender = cluster.workers[:2]
    received, sent = receiver.submit(receive, tmp_path), sender.submit(send_too_much, tmp_path)
    wait_until((tmp_path / "receiving").exists, 20.0)
    with stopped(receiver.pid):
        (tmp_path / "receiver stands").touch()
        wait_until((tmp_path / "sent").exists, 20.0)
        kill(cluster, 1)
    (tmp_path / "killed").touch()
    with pytest.raises(WorkerLost, match="worker1"):
        sent.wait()
    assert received.wait().startswith("rank 1 of the process group is gone (a test, seen by rank 0 of 2)")


def open_store(rank: int, path: Path) -> dist.TCPStore:
    """A store that rank 0 serves, at a port that the file says."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path.with_suffix(".new").write_text(str(store.port))
        path.with_suffix(".new").rename(path)
        return store
    wait_until(path.exists, 20.0, "the port of the store")
    return dist.TCPStore("127.0.0.1", int(path.read_text()), is_master=False)


def lose_the_store(rank: int, path: Path) -> str:
    """The rank that is killed is the one that serves the group's store."""
    dist.init_process_group(
        "gloo", store=open_store(rank, path), rank=rank, world_size=3, timeout=timedelta(seconds=60)
    )
    try:
        dist.barrier()
        sharded = ChunkShardingSpec(0, [f"rank:{number}/cpu" for number in range(3)]).shard(torch.ones(6))
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(WorkerLost) as caught:
            sharded.full_tensor()
        return caught.value.worker
    finally:
        dist.destroy_process_group()


def test_rank_that_died_with_the_store(cluster: Cluster, tmp_path: Path) -> None:
    """Reports of the others cannot be read then, so the names may include a rank that has given up."""
    futures = [
        worker.submit(lose_the_store, number, tmp_path / "port") for number, worker in enumerate(cluster.workers)
    ]
    started = time.monotonic()
    with pytest.raises(WorkerLost, match="worker0"):
        futures[0].wait()
    for number in (1, 2):
        assert re.match("ranks? 0\\b", futures[number].wait())
    assert time.monotonic() - started < PROMPT_S


def test_workers_that_trust_each_other_with_data_only(leak_check: LeakCheck) -> None:
    with Cluster.local(1, trust="data"), pytest.raises(ConfigurationError, match='need trust="code"'):
        rows(0).shard(torch.ones(4))
