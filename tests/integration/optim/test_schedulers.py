"""Learning-rate schedulers of torch, used as they are, do what they do in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import gradwire as gw
from gradwire.cluster.api import Cluster
from gradwire.errors import ConfigurationError
from gradwire.optim import distributed
from optim.programs import Distributed, OneProcess, assert_same, batches, make

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, step_size=2, gamma=0.5),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=0.2, total_steps=8),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, base_lr=0.01, max_lr=0.1, step_size_up=2),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0, threshold=0.5, factor=0.3),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=2),
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda epoch: 0.9**epoch),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt, 0.1, 2), lr_scheduler.ExponentialLR(opt, 0.8)], milestones=[2]
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # SequentialLR uses it itself in torch 2.8
@pytest.mark.parametrize("name", SCHEDULERS)
def test_same_as_in_one_process(cluster: Cluster, name: str) -> None:
    here, there = OneProcess((1, 2, 3)), Distributed((1, 2, 3), cluster.workers)
    schedulers = []
    for world in (here, there):
        world.make_optimizer(make(torch.optim.SGD, lr=0.1, momentum=0.9))
        schedulers.append(SCHEDULERS[name](world.optimizer))
    seen = set()
    for number in range(6):
        for world, scheduler in zip((here, there), schedulers, strict=True):
            loss = world.step(batches(number))
            scheduler.step(loss) if name == "ReduceLROnPlateau" else scheduler.step()
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
        seen.add(schedulers[0].get_last_lr()[0])
    assert_same(there.values(), here.values())
    options = [
        {k: v for k, v in world.optimizer.param_groups[0].items() if k[:5] != "param"} for world in (here, there)
    ]
    assert options[0] == options[1]
    assert len(seen) > 1


def test_a_scheduler_that_steps_first_is_told_so(cluster: Cluster) -> None:
    there = Distributed((1, 2), cluster.workers)
    there.make_optimizer(make(torch.optim.SGD, lr=0.1))
    scheduler = lr_scheduler.StepLR(there.optimizer, 1)
    with pytest.warns(UserWarning, match=r"before `optimizer\.step\(\)`"):
        scheduler.step()


def test_a_change_outlives_a_step_that_could_not_begin(cluster: Cluster) -> None:
    here, there = OneProcess((1, 2, 3)), Distributed((1, 2, 3), cluster.workers)
    for world in (here, there):
        world.make_optimizer(make(torch.optim.SGD, lr=0.1))
        world.optimizer.param_groups[0]["lr"] = 0.5
    with gw.autograd.context() as ctx, gw.autograd.context() as other:
        there.optimizer.clip_grad_value_(other, 100.0)
        with pytest.raises(ConfigurationError, match="used together"):
            there.optimizer.step([ctx, other])
    for world in (here, there):
        world.step(batches(0))
    assert_same(there.values(), here.values())


def test_a_change_outlives_a_step_that_was_interrupted(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C, before any owner was told."""
    here, there = OneProcess((1, 2, 3)), Distributed((1, 2, 3), cluster.workers)
    for world in (here, there):
        world.make_optimizer(make(torch.optim.SGD, lr=0.1))
        world.optimizer.param_groups[0]["lr"] = 0.5

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with gw.autograd.context() as ctx:
        ctx.backward(there.loss(batches(0)))
        with monkeypatch.context() as patch:
            patch.setattr(distributed, "ask_all", interrupted)
            with pytest.raises(KeyboardInterrupt):
                there.optimizer.step(ctx)
        there.optimizer.step(ctx)
    here.step(batches(0))
    assert_same(there.values(), here.values())
