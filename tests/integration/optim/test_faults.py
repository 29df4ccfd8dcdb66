"""Owners that die: whoever lives has stepped, and the error says who has and who has not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire as gw
from autograd_faults.worlds import Background, kill, wait_for_file
from gradwire import optim, rpc
from gradwire.cluster.api import Cluster
from gradwire.errors import OptimizerNotMade, OptimizerStepFailed, RpcTimeout, WorkerLost
from gradwire.testing import wait_until
from optim.programs import Distributed, OneProcess, assert_same, batches, make, make_weight, read

SEEDS = (1, 2, 3)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two workers of its own."""
    with Cluster.local(2) as cluster:
        yield cluster


class Waits(torch.optim.SGD):
    """On one worker, its step waits until the folder says go; says when it is there."""

    def __init__(self, params: Any, lr: float, folder: str) -> None:
        super().__init__(params, lr)
        self.folder = Path(folder)

    def step(self, closure: Any = None) -> Any:
        if rpc.get_worker_info().name == "worker1":
            (self.folder / "entered").touch()
            wait_until((self.folder / "go").exists, 60.0, "that the step may go on")
        return super().step(closure)


def end_worker(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def worlds(cluster: Cluster, made: Any) -> tuple[OneProcess, Distributed]:
    here, there = OneProcess(SEEDS), Distributed(SEEDS, cluster.workers)
    there.make_optimizer(made)
    here.make_optimizer(make(torch.optim.SGD, lr=0.1))
    return here, there


def living(there: Distributed) -> list[torch.Tensor]:
    """Values of the first and the last parameter: the one between them was on the worker that died."""
    first = there.parameters[0]
    return [rpc.rpc_sync(first.owner(), read, (first,)), read(there.parameters[2])]


def test_an_owner_that_died_before_the_step(cluster: Cluster) -> None:
    here, there = worlds(cluster, make(torch.optim.SGD, lr=0.1))
    with gw.autograd.context() as ctx:
        ctx.backward(there.loss(batches(0)))
        kill(cluster.workers[1])
        for _ in range(2):  # the second time nobody steps again
            with pytest.raises(
                OptimizerStepFailed, match=r"Stepped: driver, worker0\. Failed: worker1: \w+Lost"
            ) as caught:
                there.optimizer.step(ctx)
            assert sorted(caught.value.stepped) == ["driver", "worker0"]
            assert isinstance(caught.value.failed["worker1"], WorkerLost)
    here.step(batches(0))
    expected = here.values()
    assert_same(living(there), [expected[0], expected[2]])


def test_an_owner_that_dies_in_the_middle_of_a_step(cluster: Cluster, tmp_path: Path) -> None:
    here, there = worlds(cluster, make(Waits, lr=0.1, folder=str(tmp_path)))
    with gw.autograd.context() as ctx:
        ctx.backward(there.loss(batches(0)))
        step = Background(there.optimizer.step, ctx)
        wait_for_file(tmp_path)
        kill(cluster.workers[1])
        error = step.wait()
    assert isinstance(error, OptimizerStepFailed)
    assert sorted(error.stepped) == ["driver", "worker0"]
    assert isinstance(error.failed["worker1"], WorkerLost)
    here.step(batches(0))
    expected = here.values()
    assert_same(living(there), [expected[0], expected[2]])


def test_an_owner_that_is_late_steps_once(cluster: Cluster, tmp_path: Path) -> None:
    """The request is repeated after a timeout, while the owner is still at it: that makes one step."""
    here, there = worlds(cluster, make(Waits, lr=0.1, folder=str(tmp_path)))
    with gw.autograd.context() as ctx:
        ctx.backward(there.loss(batches(0)))
        with pytest.raises(OptimizerStepFailed, match="worker1: RpcTimeout") as caught:
            there.optimizer.step(ctx, timeout=0.5)
        assert isinstance(caught.value.failed["worker1"], RpcTimeout)
        again = Background(there.optimizer.step, ctx)
        (tmp_path / "go").touch()
        assert again.wait() is None
    here.step(batches(0))
    assert_same(there.values(), here.values())


def test_a_step_that_was_given_up_while_it_waited_is_not_done(cluster: Cluster, tmp_path: Path) -> None:
    """It is done when it is repeated, after the one that it waited for."""
    here, there = worlds(cluster, make(Waits, lr=0.1, folder=str(tmp_path)))
    optimizer = there.optimizer

    def act(contexts: Any) -> None:
        for ctx in contexts:  # the second waits until the first has ended
            with pytest.raises(OptimizerStepFailed, match="worker1: RpcTimeout"):
                optimizer.step(ctx, timeout=0.5)
        (tmp_path / "go").touch()
        optimizer.step(contexts[0])
        first = rpc.rpc_sync("worker1", read, (there.parameters[1],))
        optimizer.step(contexts[1])
        assert not torch.equal(first, rpc.rpc_sync("worker1", read, (there.parameters[1],)))

    there.in_contexts([batches(0), batches(1)], act)
    gradients = [torch.autograd.grad(here.loss(batches(number)), here.parameters) for number in range(2)]
    for found in gradients:
        for parameter, gradient in zip(here.parameters, found, strict=True):
            parameter.grad = gradient
        here.optimizer.step()
    assert_same(there.values(), here.values())


def test_an_owner_that_is_gone_at_construction(cluster: Cluster) -> None:
    there = Distributed(SEEDS, cluster.workers)
    there.values()
    kill(cluster.workers[1])
    with pytest.raises(OptimizerNotMade, match=r"worker1: \w+Lost") as caught:
        there.make_optimizer(make(torch.optim.SGD, lr=0.1))
    assert list(caught.value.failed) == ["worker1"]


def test_an_owner_that_dies_during_construction(cluster: Cluster) -> None:
    weights = [rpc.remote("worker0", make_weight, (1,)), rpc.remote("worker1", end_worker)]
    with pytest.raises(OptimizerNotMade, match="worker1: ") as caught:
        optim.DistributedOptimizer(torch.optim.SGD, weights, lr=0.1)
    assert list(caught.value.failed) == ["worker1"]


def test_norms_and_state_name_who_is_gone(cluster: Cluster) -> None:
    _, there = worlds(cluster, make(torch.optim.SGD, lr=0.1))
    with gw.autograd.context() as ctx:
        ctx.backward(there.loss(batches(0)))
        kill(cluster.workers[1])
        for act in (lambda: there.optimizer.clip_grad_norm_(ctx, 1.0), there.optimizer.state_dict):
            with pytest.raises(gw.errors.OptimizerError, match="failed on 1 of 3 workers: worker1: ") as caught:
                act()
            assert list(caught.value.failed) == ["worker1"]


def test_a_worker_that_dies_before_it_follows_up(cluster: Cluster, tmp_path: Path) -> None:
    """The pass is committed, the request to step never answered: the others have stepped, and wait for nothing."""
    here, there = worlds(cluster, make(Waits, lr=0.1, folder=str(tmp_path)))
    with gw.autograd.context() as ctx:
        loss = there.loss(batches(0))
        step = Background(ctx.backward, loss, optimizer=there.optimizer)
        wait_for_file(tmp_path)
        kill(cluster.workers[1])
        error = step.wait()
    assert isinstance(error, OptimizerStepFailed)
    assert sorted(error.stepped) == ["driver", "worker0"]
    here.step(batches(0))
    expected = here.values()
    assert_same(living(there), [expected[0], expected[2]])
