"""
Shard the large layers of a model
=================================

A planner divides the large layers of a model among three workers; the training loop stays that of a plain model. The
program then trains the same model in one process and compares every loss.

Run it::

    python examples/sharded_mlp.py

The first lines show which worker has which part of each weight. Of two linear layers in a row the planner divides the
first by rows of its weight and the second by columns: the activations between them stay on the workers, and only
partial sums come back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

import gradwire as gw
from gradwire.shard import BalancedPlanner, ShardedTensor, shard_module

NUM_WORKERS = 3
NUM_STEPS = 30

# %%
# The model and the data
# ----------------------


def make_model() -> nn.Module:
    torch.manual_seed(1)  # the same initial weights each time
    return nn.Sequential(nn.Linear(16, 500), nn.GELU(), nn.Linear(500, 16), nn.LayerNorm(16), nn.Linear(16, 1))


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
    return x, torch.tanh(x[:, :1] - x[:, 1:2])


# %%
# Divide the layers
# -----------------
# ``min_bytes`` keeps small parameters on the driver.


def make_sharded_model(workers: Sequence[str]) -> nn.Module:
    model = make_model()
    planner = BalancedPlanner([f"{name}/cpu" for name in workers], min_bytes=8_000)
    shard_module(model, planner.build_plan(model))
    return model


def show_placement(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, ShardedTensor):
            shards = parameter.metadata().shards_metadata
            parts = ", ".join(f"{shard.shard_sizes} on {shard.placement}" for shard in shards)
        else:
            parts = f"{list(parameter.shape)} on the driver"
        print(f"  {name}: {parts}")


# %%
# Train
# -----
# The two loops differ in the context and in the optimizer, and in nothing else.


def train_sharded(model: nn.Module) -> list[float]:
    optimizer = gw.optim.DistributedOptimizer(torch.optim.AdamW, list(model.parameters()), lr=0.01)
    losses = []
    for step in range(NUM_STEPS):
        x, y = make_batch(step)
        with gw.autograd.context() as ctx:
            loss = nn.functional.mse_loss(model(x), y)
            ctx.backward(loss)
            optimizer.step(ctx)
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"  step {step:2} of {NUM_STEPS}: loss {losses[-1]:.6f}")
    return losses


def train_in_one_process() -> list[float]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(NUM_STEPS):
        x, y = make_batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"  step {step:2} of {NUM_STEPS}: loss {losses[-1]:.6f}")
    return losses


# %%
# Compare
# -------
# Sharded layers add up numbers in another order, so the losses are equal up to rounding, not bit for bit.


def main() -> None:
    torch.set_num_threads(1)  # as many as each worker has
    with gw.Cluster.local(NUM_WORKERS) as cluster:
        model = make_sharded_model([worker.name for worker in cluster.workers])
        print("placement:")
        show_placement(model)
        print(f"sharded over {NUM_WORKERS} workers:")
        distributed = train_sharded(model)
    print("the same model in one process:")
    local = train_in_one_process()
    # Rounding differs in the first step, and training amplifies it.
    if not all(abs(a - b) < 1e-3 * b for a, b in zip(distributed, local, strict=True)):
        raise SystemExit(f"sharded_mlp: the losses {distributed} differ from {local}")
    if not local[-1] < local[0]:
        raise SystemExit("sharded_mlp: the loss has not fallen")
    print(f"sharded_mlp: the loss fell from {local[0]:.3f} to {local[-1]:.3f}, as in one process up to rounding")


if __name__ == "__main__":
    main()
