"""Gradient scaling: as in one process, and either all owners step or none does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire as gw
from closeness import assert_close
from gradwire.cluster.api import Cluster
from gradwire.errors import ConfigurationError, OptimizerError
from gradwire.optim import GradScaler
from optim.programs import Distributed, OneProcess, assert_same, batches, make

SEEDS = (1, 2, 3)
OPTIONS: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 2, "growth_factor": 4.0, "backoff_factor": 0.25}


def worlds(cluster: Cluster) -> tuple[OneProcess, Distributed]:
    here, there = OneProcess(SEEDS), Distributed(SEEDS, cluster.workers)
    for world in (here, there):
        world.make_optimizer(make(torch.optim.SGD, lr=0.1, momentum=0.9))
    return here, there


def bad(x: torch.Tensor) -> torch.Tensor:
    """An input with which one gradient is infinite: the first weight's, on another worker."""
    x = x.clone()
    x[0, 0] = float("inf")
    return x


def step_here(here: OneProcess, scaler: Any, x: torch.Tensor, clip: bool) -> None:
    here.optimizer.zero_grad()
    scaler.scale(here.loss(x)).backward()
    if clip:
        scaler.unscale_(here.optimizer)
        torch.nn.utils.clip_grad_norm_(here.parameters, 0.1)
    scaler.step(here.optimizer)
    scaler.update()


def step_there(there: Distributed, scaler: GradScaler, x: torch.Tensor, clip: bool) -> bool:
    with gw.autograd.context() as ctx:
        ctx.backward(scaler.scale(there.loss(x)))
        if clip:
            scaler.unscale_(there.optimizer, ctx)
            there.optimizer.clip_grad_norm_(ctx, 0.1)
        stepped = scaler.step(there.optimizer, ctx)
    scaler.update()
    return stepped


@pytest.mark.parametrize("clip", [False, True])
def test_same_as_in_one_process(cluster: Cluster, clip: bool) -> None:
    here, there = worlds(cluster)
    expected, scaler = torch.amp.GradScaler("cpu", **OPTIONS), GradScaler(**OPTIONS)
    for number in range(6):
        x = bad(batches(number)) if number == 3 else batches(number)
        before = there.values()
        step_here(here, expected, x, clip)
        assert step_there(there, scaler, x, clip) == (number != 3)
        assert scaler.get_scale() == expected.get_scale()
        if number == 3:
            assert_same(there.values(), before)
        assert_same(there.values(), here.values())


def test_state_is_torchs(cluster: Cluster) -> None:
    _, there = worlds(cluster)
    scaler = GradScaler(**OPTIONS)
    step_there(there, scaler, batches(0), clip=False)
    expected = torch.amp.GradScaler("cpu", **OPTIONS)
    expected.load_state_dict(scaler.state_dict())
    assert expected.state_dict() == scaler.state_dict()
    again = GradScaler()
    again.load_state_dict(scaler.state_dict())
    assert again.state_dict() == scaler.state_dict()
    with pytest.raises(ConfigurationError, match="disabled"):
        again.load_state_dict(GradScaler(enabled=False).state_dict())


def test_not_enabled(cluster: Cluster) -> None:
    here, there = worlds(cluster)
    scaler = GradScaler(enabled=False)
    assert step_there(there, scaler, batches(0), clip=False)
    here.step(batches(0))
    assert_same(there.values(), here.values())
    assert scaler.get_scale() == 1.0
    assert not scaler.is_enabled()


def test_misuse(cluster: Cluster) -> None:
    _, there = worlds(cluster)
    scaler = GradScaler()
    with pytest.raises(OptimizerError, match="No inf checks"):
        scaler.update()
    with gw.autograd.context() as ctx:
        ctx.backward(scaler.scale([there.loss(batches(0))])[0])
        scaler.unscale_(there.optimizer, ctx)
        with pytest.raises(OptimizerError, match="already been called"):
            scaler.unscale_(there.optimizer, ctx)
    scaler.update(512.0)
    assert scaler.get_scale() == 512.0
    with pytest.raises(ConfigurationError, match="can be scaled"):
        scaler.scale("loss")
    with pytest.raises(ConfigurationError, match="growth factor"):
        GradScaler(growth_factor=1.0)


@pytest.mark.parametrize("is_bad", [False, True])
def test_one_step_between_updates(cluster: Cluster, is_bad: bool) -> None:
    """A second one would use gradients that are not scaled down; torch refuses it, too."""
    _, there = worlds(cluster)
    scaler = GradScaler(**OPTIONS)
    with gw.autograd.context() as ctx:
        ctx.backward(scaler.scale(there.loss(bad(batches(0)) if is_bad else batches(0))))
        assert scaler.step(there.optimizer, ctx) is not is_bad
        before = there.values()
        with pytest.raises(OptimizerError, match="already been called since the last update"):
            scaler.step(there.optimizer, ctx)
        assert_same(there.values(), before)


def test_a_context_that_is_used_again_is_scaled_down_once(cluster: Cluster) -> None:
    here, there = worlds(cluster)
    scaler = GradScaler(**{**OPTIONS, "growth_interval": 10})
    with gw.autograd.context() as ctx:
        for number in range(2):
            ctx.backward(scaler.scale(there.loss(batches(number))))
            assert scaler.step(there.optimizer, ctx)
            scaler.update()
    for number in range(2):
        here.loss(batches(number)).backward()
        here.optimizer.step()
    for got, want in zip(there.values(), here.values(), strict=True):
        assert_close(got, want)
