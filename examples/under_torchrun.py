"""
Run under torchrun
==================

torchrun starts this program on every rank. Rank 0 is the driver and runs the ``with`` block. The other ranks stop at
``Cluster.from_env()``, serve the driver, and end with it. Each of them holds one layer of a model.

Run it::

    torchrun --standalone --nproc-per-node=4 examples/under_torchrun.py

On several machines every rank needs the same secret, otherwise anyone could join. Make one with ``gradwire keys
secret ~/.gradwire-secret``, copy it to each machine, and set ``GRADWIRE_SECRET_FILE`` to its path. Then start the
same command on each machine with torchrun's own options (``--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=<first
machine>:29400``). srun and mpirun work as well.
"""

from __future__ import annotations

import torch
from torch import nn

import gradwire as gw

NUM_STEPS = 30

# %%
# The model and the data
# ----------------------


def make_layer(number: int, is_last: bool) -> nn.Module:
    torch.manual_seed(number)
    return nn.Linear(8, 1) if is_last else nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
    return x, torch.tanh(x[:, :1] - x[:, 1:2])


# %%
# Train
# -----
# The driver sends each batch through all layers, one worker after the other, and the gradients back.


def train(cluster: gw.Cluster) -> list[float]:
    last = len(cluster.workers) - 1
    model = nn.Sequential(*(worker.module(make_layer, i, i == last) for i, worker in enumerate(cluster.workers)))
    optimizer = gw.optim.DistributedOptimizer(torch.optim.AdamW, list(model), lr=0.02)
    losses = []
    for step in range(NUM_STEPS):
        x, y = make_batch(step)
        with gw.autograd.context() as ctx:
            loss = nn.functional.mse_loss(model(x), y)
            ctx.backward(loss)
            optimizer.step(ctx)
        losses.append(loss.item())
        if step % 10 == 9:
            print(f"step {step + 1} of {NUM_STEPS}: loss {losses[-1]:.4f}", flush=True)
    return losses


# %%
# Every rank runs this
# --------------------
# Only rank 0 enters the block.


def main() -> None:
    with gw.Cluster.from_env(start_timeout_s=60) as cluster:
        print(f"rank 0 drives {len(cluster.workers)} workers", flush=True)
        losses = train(cluster)
    if not losses[-1] < losses[0] / 2:  # true for NaN, too
        raise SystemExit(f"under_torchrun: the loss is still {losses[-1]:.3f}, {losses[0]:.3f} before training")
    print(f"under_torchrun: the loss fell from {losses[0]:.3f} to {losses[-1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
