"""A worker is killed before, in the middle of, and after its part: the pass fails, by name, and the rest goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import gradwire as gw
from autograd_faults import tasks
from autograd_faults.worlds import (
    BOUND_S,
    begin_backward,
    check_works,
    go_on,
    kill,
    make_input,
    wait_clean,
    wait_dropped,
    wait_for_file,
)
from gradwire.cluster.api import Cluster, Worker
from gradwire.errors import BackwardFailed, WorkerLost
from gradwire.testing import wait_until

MODES = pytest.mark.parametrize("mode", ["smart", "fast"])
WAYS = pytest.mark.parametrize(
    ("way", "victim"),
    [([], 0), (["worker1"], 0), (["worker1"], 1), (["worker1", "worker2"], 1)],
    ids=["the only one", "the first of two", "the last of two", "the one in the middle"],
)


def check_loss(error: BaseException | None, name: str) -> None:
    """The error says who died, and how."""
    assert isinstance(error, BackwardFailed), error
    assert error.worker == name
    assert f"worker {name} is lost" in str(error)
    assert "WorkerLost" in str(error)


def others(cluster: Cluster, victim: int) -> list[Worker]:
    return [worker for worker in cluster.workers if worker.rank != victim]


@MODES
@WAYS
def test_killed_before_the_pass(cluster: Cluster, mode: str, way: list[str], victim: int) -> None:
    x = make_input()
    with gw.autograd.context() as ctx:
        loss = cluster.workers[0].call(tasks.through, x, way).sum()
        kill(cluster.workers[victim])
        started = time.monotonic()
        with pytest.raises(BackwardFailed) as caught:
            ctx.backward(loss, mode=mode)
        assert time.monotonic() - started < BOUND_S
        check_loss(caught.value, f"worker{victim}")
        wait_dropped(ctx, others(cluster, victim))
    check_works(others(cluster, victim))


@MODES
@WAYS
def test_killed_in_the_middle(cluster: Cluster, mode: str, way: list[str], victim: int) -> None:
    """It ends itself, inside a node of its backward; whoever is behind it has not begun, whoever is before it waits."""
    x = make_input()
    names = ["worker0", *way]
    with gw.autograd.context() as ctx:
        value = cluster.workers[0].call(tasks.through, x, names[1 : victim + 1], "dies")
        for name in names[victim + 1 :]:
            value = next(worker for worker in cluster.workers if worker.name == name).call(tasks.layer, value)
        started = time.monotonic()
        with pytest.raises(BackwardFailed) as caught:
            ctx.backward(value.sum(), mode=mode)
        assert time.monotonic() - started < BOUND_S
        check_loss(caught.value, f"worker{victim}")
        wait_dropped(ctx, others(cluster, victim))
    check_works(others(cluster, victim))


@MODES
def test_killed_after_its_part(cluster: Cluster, tmp_path: Path, mode: str) -> None:
    """It has reported; another one still computes. Its gradients are lost, so the pass must not count."""
    first, second, third = cluster.workers
    x = make_input()
    with gw.autograd.context() as ctx:
        held = second.call(tasks.through, x, [], "holds", str(tmp_path))
        loss = held.sum() + first.call(tasks.layer, x).sum()
        backward = begin_backward(ctx, loss, mode=mode)
        wait_for_file(tmp_path)
        wait_until(lambda: first.call(tasks.phases, int(ctx)) == ["DONE"], 10.0, "that the first has reported")
        kill(first)
        error = backward.wait(BOUND_S)
        go_on(tmp_path)
        check_loss(error, "worker0")
        wait_dropped(ctx, [second])
    check_works([second, third])


def test_killed_after_its_part_where_the_root_never_talked_to_it(cluster: Cluster, tmp_path: Path) -> None:
    """The root knows of it only by the report of the worker in between."""
    first, second, third = cluster.workers
    x = make_input()
    with gw.autograd.context() as ctx:
        held = third.call(tasks.through, x, [], "holds", str(tmp_path))
        loss = held.sum() + first.call(tasks.beside, x, second.name).sum()
        backward = begin_backward(ctx, loss)
        wait_for_file(tmp_path)
        wait_until(lambda: first.call(tasks.phases, int(ctx)) == ["DONE"], 10.0, "that the first has reported")
        wait_until(lambda: first.call(phases_on, second.name, int(ctx)) == ["DONE"], 10.0, "that the second has")
        kill(second)
        error = backward.wait(BOUND_S)
        go_on(tmp_path)
        check_loss(error, "worker1")
        wait_dropped(ctx, [first, third])
    check_works([first, third])


def phases_on(name: str, context_id: int) -> list[str]:
    found: list[str] = gw.rpc.rpc_sync(name, tasks.phases, args=(context_id,))
    return found


def test_killed_after_the_pass(cluster: Cluster) -> None:
    """The pass has counted: the others keep their gradients, and whoever asks for its own learns that it is gone."""
    first, second, third = cluster.workers
    x = make_input()
    with gw.autograd.context() as ctx:
        ctx.backward(first.call(tasks.through, x, [second.name]).sum())
        kill(second)
        assert x in ctx.gradients()
        assert first.call(tasks.weight_gradient, int(ctx)) is not None
        with pytest.raises(WorkerLost):
            second.call(tasks.weight_gradient, int(ctx))
        other = third.call(tasks.layer, x).sum()
        ctx.backward(other, timeout=20)  # the dead one has no part in it
    check_works([first, third])


def test_worker_that_has_no_part_in_the_loss_may_die(cluster: Cluster) -> None:
    """Before the pass: nobody has a gradient for it."""
    first, second, third = cluster.workers
    x = make_input()
    with gw.autograd.context() as ctx:
        second.call(tasks.layer, x)
        loss = first.call(tasks.through, x, [third.name]).sum()
        kill(second)
        wait_until(lambda: not second.is_alive)
        ctx.backward(loss, timeout=20)
        assert x in ctx.gradients()
    check_works([first, third])


@pytest.mark.parametrize("way", [[], ["worker1"]], ids=["at once", "after a call of its own"])
def test_killed_in_forward(cluster: Cluster, way: list[str]) -> None:
    """The context goes on without it, and is freed on those that only it has talked to."""
    first, second, third = cluster.workers
    x = make_input()
    with gw.autograd.context() as ctx:
        with pytest.raises(WorkerLost) as caught:
            first.call(tasks.die, x, way)
        assert caught.value.worker == "worker0"
        ctx.backward(third.call(tasks.layer, x).sum(), timeout=20)
        assert x in ctx.gradients()
    check_works([second, third])


def test_dead_worker_does_not_hold_up_the_release(cluster: Cluster) -> None:
    """Neither here nor on those behind it, which nobody else knows of."""
    first, second, third = cluster.workers
    x = make_input()
    with gw.autograd.context():
        first.call(tasks.through, x, [second.name, third.name])
        kill(first)
        started = time.monotonic()
    assert time.monotonic() - started < BOUND_S
    wait_clean([second, third])
    check_works([second, third])


def test_call_and_backward_with_all_workers_dead(cluster: Cluster) -> None:
    x = make_input()
    with gw.autograd.context() as ctx:
        loss = cluster.workers[0].call(tasks.through, x, ["worker1", "worker2"]).sum()
        for worker in cluster.workers:
            kill(worker)
        with pytest.raises(BackwardFailed):
            ctx.backward(loss)
        ctx.backward((x * 2).sum())
        assert ctx.gradients()[x].tolist() == [2.0, 2.0, 2.0]
    wait_clean([])
