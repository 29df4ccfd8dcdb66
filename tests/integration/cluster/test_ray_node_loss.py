"""Nodes of a Ray cluster that go while a model is trained on them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
import torch
from ray.cluster_utils import Cluster as RayNodes
from torch import nn

import gradwire
from cluster.ray_nodes import no_leaks, ray_nodes
from gradwire.errors import GradwireError, WorkerLost
from gradwire.testing import LeakCheck, wait_until

NUM_STEPS = 12
# Ray takes half a minute to miss a node that is gone without a word; these tests do not wait for that. A node that is gone
# refuses connections at once. One that has no processor for a while answers late, and must not count as gone.
HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_timeout_ms": 20_000,
    "health_check_failure_threshold": 5,
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(1, 1, _system_config=HEALTH_CHECKS) as nodes:
        yield nodes


@pytest.fixture(scope="module", autouse=True)
def leak_check(_own_temporary_folder: None, nodes: RayNodes) -> Iterator[LeakCheck]:
    """Once for the file, because a test uses the connections of the one before it."""
    with no_leaks() as check:
        yield check


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> None:
    """The check for workers of the fork server would find those of Ray."""


def make_stage(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh()) if number == 0 else nn.Linear(8, 1)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))


def train(cluster: gradwire.Cluster, folder: Path, before_step: Callable[[int], object]) -> list[float]:
    """Losses of a run that saves after each step, and goes on from there when workers are lost."""
    losses: list[float] = []
    while len(losses) < NUM_STEPS:
        try:
            model = [worker.module(make_stage, worker.rank) for worker in cluster.workers]
            optimizer = gradwire.optim.DistributedOptimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9)
            state = {"model": model, "optimizer": optimizer}
            losses = gradwire.checkpoint.load(folder, state)["losses"] if folder.exists() else []
            while len(losses) < NUM_STEPS:
                before_step(len(losses))
                with gradwire.autograd.context() as ctx:
                    loss = loss_of(nn.Sequential(*model), len(losses))
                    ctx.backward(loss)
                    optimizer.step(ctx)
                losses.append(loss.item())
                gradwire.checkpoint.save(folder, {**state, "losses": losses})
        except GradwireError:
            losses = []
            cluster.wait_for_workers(timeout=60.0)  # raises WorkerLost where none comes back
    return losses


def train_alone() -> list[float]:
    model = nn.Sequential(make_stage(0), make_stage(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(NUM_STEPS):
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def remove_node(nodes: RayNodes, cluster: gradwire.Cluster) -> str:
    """Ends all of the node that is not the first one, without a word to Ray; returns the worker that was on it."""
    (node,) = nodes.worker_nodes
    (worker,) = [worker for worker in cluster.workers if worker.call(node_id) == node.node_id]
    nodes.remove_node(node, allow_graceful=False)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)  # processes of a machine end together; Ray's would take seconds to notice
    return worker.name


def node_id() -> str:
    found: str = ray.get_runtime_context().get_node_id()
    return found


@pytest.mark.slow
def test_without_restart_the_worker_of_a_lost_node_is_named(nodes: RayNodes, tmp_path: Path) -> None:
    lost: list[str] = []

    def before_step(step: int) -> None:
        if step == 5 and not lost:
            lost.append(remove_node(nodes, cluster))

    with gradwire.Cluster.ray(2, strategy="STRICT_SPREAD") as cluster:
        with pytest.raises(WorkerLost) as raised:
            train(cluster, tmp_path / "run", before_step)
        assert lost[0] in str(raised.value)
        (worker,) = [worker for worker in cluster.workers if worker.name == lost[0]]
        assert not worker.is_alive
    nodes.add_node(num_cpus=1)
    wait_until(lambda: ray.available_resources().get("CPU") == 2.0, 30.0)


@pytest.mark.slow
def test_with_restart_the_run_ends_as_if_nothing_had_happened(nodes: RayNodes, tmp_path: Path) -> None:
    """The place of the lost worker moves to a node that joins later."""
    lost: list[str] = []
    restarted: list[str] = []

    def before_step(step: int) -> None:
        if step == 5 and not lost:
            lost.append(remove_node(nodes, cluster))
            nodes.add_node(num_cpus=1)

    with gradwire.Cluster.ray(
        2, strategy="STRICT_SPREAD", restart="on-loss", on_restart=lambda worker: restarted.append(worker.name)
    ) as cluster:
        before = {worker.name: worker.pid for worker in cluster.workers}
        losses = train(cluster, tmp_path / "run", before_step)
        after = {worker.name: worker.pid for worker in cluster.workers}
    assert restarted == lost
    assert [name for name in before if before[name] != after[name]] == lost
    assert losses == pytest.approx(train_alone(), rel=1e-5)
