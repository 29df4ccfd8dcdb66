"""A model whose large layers are divided among workers learns what it learns in one process.

    python examples/sharded_mlp.py

A planner decides how: of two layers that follow each other, the first is cut by rows of its weight and the second by
columns, so that what is between them stays where it is, and only sums come back. The program itself is the one for a plain
model.
"""

from __future__ import annotations

import torch
from torch import nn

import gradwire

NUM_WORKERS = 3
NUM_STEPS = 30


def make_model() -> nn.Module:
    """Always with the same values."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 500), nn.GELU(), nn.Linear(500, 16), nn.LayerNorm(16), nn.Linear(16, 1))


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points, and what the model is to learn of them."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(number))
    return x, torch.tanh(x[:, :1] - x[:, 1:2])


def use_one_thread() -> None:
    """Several on every worker would get into each other's way."""
    torch.set_num_threads(1)


def shard(model: nn.Module) -> None:
    """Moves the large layers to the workers; small parameters stay here."""
    placements = [f"worker{number}/cpu" for number in range(NUM_WORKERS)]
    plan = gradwire.shard.BalancedPlanner(placements, min_bytes=8_000).build_plan(model)
    gradwire.shard.shard_module(model, plan)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, gradwire.shard.ShardedTensor):
            shards = parameter.metadata().shards_metadata
            print(f"{name}: " + ", ".join(f"{item.shard_sizes} on {item.placement}" for item in shards))


def train_sharded() -> list[float]:
    """The losses of a run over the workers."""
    model = make_model()
    shard(model)
    optimizer = gradwire.optim.DistributedOptimizer(torch.optim.AdamW, list(model.parameters()), lr=0.01)
    losses = []
    for number in range(NUM_STEPS):
        x, y = batch(number)
        with gradwire.autograd.context() as context:
            loss = nn.functional.mse_loss(model(x), y)
            context.backward(loss)
            optimizer.step(context)
        losses.append(loss.item())
    return losses


def train_in_one_process() -> list[float]:
    """The same with torch alone."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for number in range(NUM_STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Trains both, and compares every loss."""
    use_one_thread()
    with gradwire.Cluster.local(NUM_WORKERS) as cluster:
        for worker in cluster.workers:
            worker.call(use_one_thread)
        there = train_sharded()
    here = train_in_one_process()
    for number in range(0, NUM_STEPS, 10):
        print(f"step {number:2}: loss {there[number]:.6f} on workers, {here[number]:.6f} in one process")
    apart = max(abs(a - b) / b for a, b in zip(there, here, strict=True))
    if apart > 1e-3:  # sums are made in another order, and training makes the difference grow
        raise SystemExit(f"sharded_mlp: the losses are {apart:.1e} apart")
    print(f"sharded_mlp: {NUM_STEPS} losses fell from {here[0]:.3f} to {here[-1]:.3f}, the same up to rounding")


if __name__ == "__main__":
    main()
