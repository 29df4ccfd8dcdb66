"""Several trainers, each with an optimizer of its own, on the same parameters at the same time."""

from __future__ import annotations

import threading

import pytest
import torch

import gradwire as gw
from gradwire import optim, rpc
from gradwire.cluster.api import Cluster
from gradwire.optim import distributed
from gradwire.rpc import RRef

NUM_TRAINERS, NUM_STEPS, RATE = 4, 12, 2.0**-6


def make_ones() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(8))


def times(weight: RRef[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return weight.local_value() * x


def train(weights: list[RRef[torch.Tensor]], errors: list[BaseException]) -> None:
    """The gradient is one whatever the weights are, so the sum of all steps is known."""
    try:
        optimizer = optim.DistributedOptimizer(torch.optim.SGD, weights, lr=RATE)
        for number in range(NUM_STEPS):
            with gw.autograd.context() as ctx:
                parts = [rpc.rpc_sync(weight.owner(), times, (weight, torch.ones(8))) for weight in weights]
                loss = torch.stack(parts).sum()
                if number % 2:
                    ctx.backward(loss, optimizer=optimizer)
                else:
                    ctx.backward(loss)
                    optimizer.step(ctx)
    except BaseException as error:
        errors.append(error)


@pytest.mark.timeout(120)
def test_no_step_is_lost_and_no_gradient_is_another_trainers(cluster: Cluster) -> None:
    weights = [rpc.remote(name, make_ones) for name in ("worker0", "worker1")]
    errors: list[BaseException] = []
    trainers = [
        threading.Thread(target=train, args=(weights, errors), name=f"trainer-{number}")
        for number in range(NUM_TRAINERS)
    ]
    for trainer in trainers:
        trainer.start()
    for trainer in trainers:
        trainer.join(100)
        assert not trainer.is_alive()
    assert errors == []
    expected = torch.full((8,), 1.0 - NUM_TRAINERS * NUM_STEPS * RATE)
    for weight in weights:
        assert torch.equal(weight.to_here().detach(), expected)


def test_threads_share_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one looks for steps of contexts that are over, another forgets the same one and begins a step."""
    optimizer = optim.DistributedOptimizer.__new__(optim.DistributedOptimizer)
    optimizer._unfinished = {(1,): 0, (2,): 1}

    def is_over(context_id: int) -> bool:
        optimizer._unfinished.pop((1,), None)
        optimizer._unfinished[3,] = 2
        return context_id == 1

    monkeypatch.setattr(distributed, "is_over", is_over)
    optimizer._forget_unfinished()
    assert optimizer._unfinished == {(2,): 1, (3,): 2}
