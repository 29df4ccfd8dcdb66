"""Optimizers of sharded parameters in checkpoints: training goes on elsewhere as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from closeness import assert_close
from gradwire import autograd, checkpoint
from gradwire.optim import DistributedOptimizer
from gradwire.shard import ShardedOptimizer, ShardedTensor
from shard.worlds import GroupWorld, WorkerWorld, World, Worlds

BACKENDS = ["group", "workers"]
START = torch.linspace(-1, 1, 35, dtype=torch.float64).view(7, 5)
FACTORS = torch.linspace(0.1, 2, 35, dtype=torch.float64).view(7, 5)


def loss_of(weight: torch.Tensor, step: int) -> torch.Tensor:
    return ((weight * FACTORS - 0.1 * step) ** 2).sum()


def one_process(num_steps: int) -> tuple[torch.Tensor, Any]:
    weight = nn.Parameter(START.clone())
    optimizer = torch.optim.AdamW([("weight", weight)], lr=0.05)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(weight, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return weight.detach(), optimizer.state_dict()


def make_optimizer(world: World, weight: ShardedTensor, lr: float) -> Any:
    if isinstance(world, GroupWorld):
        return ShardedOptimizer({"weight": weight}, torch.optim.AdamW, lr=lr)
    return DistributedOptimizer(torch.optim.AdamW, [("weight", weight)], lr=lr)


def train(world: World, weight: ShardedTensor, optimizer: Any, steps: range) -> None:
    for step in steps:
        if isinstance(world, WorkerWorld):
            with autograd.context() as context:
                context.backward(loss_of(weight.full_tensor(), step))
                optimizer.step(context)
        else:
            optimizer.zero_grad()
            world.backward(loss_of(weight.full_tensor(), step))
            optimizer.step()


def save_training(world: World, folder: str) -> None:
    weight = world.shard(START, world.uneven(0, 7, 5), requires_grad=True)
    optimizer = make_optimizer(world, weight, 0.05)
    train(world, weight, optimizer, range(2))
    checkpoint.save(folder, {"weight": weight, "optim": optimizer, "step": 2}, progress=False)


def go_on(world: World, folder: str, expected: torch.Tensor) -> None:
    for spec in (world.chunks(1), world.blocks(7, 5)):
        weight = world.shard(torch.zeros_like(START), spec, requires_grad=True)
        optimizer = make_optimizer(world, weight, 0.9)
        values = checkpoint.load(folder, {"weight": weight, "optim": optimizer}, progress=False)
        assert values == {"step": 2}
        assert optimizer.param_groups[0]["lr"] == 0.05
        train(world, weight, optimizer, range(2, 4))
        assert_close(weight.full_tensor().detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("saver", "num_savers", "loader", "num_loaders"),
    [("group", 3, "group", 2), ("workers", 2, "workers", 3), ("group", 2, "workers", 2), ("workers", 3, "group", 2)],
)
def test_training_goes_on(
    worlds: Worlds, tmp_path: Path, saver: str, num_savers: int, loader: str, num_loaders: int
) -> None:
    worlds.check(saver, num_savers, save_training, str(tmp_path))
    expected, _ = one_process(4)
    assert set(worlds.check(loader, num_loaders, go_on, str(tmp_path), expected)) == {None}


@pytest.mark.parametrize("backend", BACKENDS)
def test_into_an_optimizer_of_one_process(worlds: Worlds, backend: str, tmp_path: Path) -> None:
    worlds.check(backend, 3, save_training, str(tmp_path))
    weight, state = one_process(2)
    found = checkpoint.read(tmp_path)
    assert_close(found["weight"], weight, rtol=1e-12, atol=1e-12)
    (saved,) = found["optim"]["state"].values()
    assert saved.keys() == state["state"][0].keys()
    for key, value in saved.items():
        assert_close(torch.as_tensor(value), state["state"][0][key], rtol=1e-12, atol=1e-12)
