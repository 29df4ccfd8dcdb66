"""Gradients of gradients cross ranks, too."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from closeness import assert_close
from gradwire.shard import ShardedTensor
from shard.worlds import World, Worlds

IDS = torch.tensor([[0, 4], [3, 3], [5, 1], [2, 0], [1, 4]])


def penalty(parts: list[torch.Tensor], loss: torch.Tensor) -> torch.Tensor:
    """Of large gradients."""
    gradients = torch.autograd.grad(loss, parts, create_graph=True)
    return torch.stack([gradient.square().sum() for gradient in gradients]).sum()


def linear_loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of own rows, or of a divided result, which is the same for everybody."""
    found = F.linear(x, weight)
    return (found.full_tensor() if isinstance(found, ShardedTensor) else found).pow(3).sum()


def rows_loss(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.embedding(ids, weight).pow(3).sum()


def check_penalties(world: World) -> int:
    weight = torch.randn(6, 4, dtype=torch.float64)
    batch = torch.randn(5, 4, dtype=torch.float64)
    num_checked = 0
    for loss_of, inputs in ((linear_loss, batch), (rows_loss, IDS)):
        whole = weight.clone().requires_grad_()
        penalty([whole], loss_of(inputs, whole)).backward()
        for spec in world.specs(6, 4):
            sharded = world.shard(weight, spec, requires_grad=True)
            parts = [part for part in sharded._parts if isinstance(part, torch.Tensor)]
            penalty(parts, loss_of(world.own(inputs), sharded)).backward()
            assert whole.grad is not None
            assert_close(world.full_gradient(sharded), whole.grad)
            num_checked += 1
    return num_checked


def test_penalties_of_gradients(worlds: Worlds) -> None:
    assert set(worlds.check("group", 3, check_penalties)) == {10}
