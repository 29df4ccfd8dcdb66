"""One program that torchrun starts on every rank: rank 0 trains, the others hold the model.

    torchrun --standalone --nproc-per-node=4 examples/under_torchrun.py

Rank 0 is the driver and runs the block; the other ranks stop at `Cluster.from_env()`, serve it, and end with it. Here each
of them holds one layer of a model, and the driver sends batches through all of them and the gradients back.

On several machines every rank needs the same secret, or anyone could join: make one with
`gradwire keys secret ~/.gradwire-secret`, set GRADWIRE_SECRET_FILE to it, and start the same command on each machine with
torchrun's own options (--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=<first machine>:29400). srun and mpirun work as well.
"""

from __future__ import annotations

import torch
from torch import nn

import gradwire as gw

NUM_STEPS = 30


def make_layer(number: int, is_last: bool) -> nn.Module:
    """One layer, with the same weights wherever it is made."""
    torch.manual_seed(number)
    return nn.Linear(8, 1) if is_last else nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def make_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points, and what the model is to learn of them."""
    points = torch.randn(32, 8, generator=torch.Generator().manual_seed(number))
    return points, torch.tanh(points[:, :1] - points[:, 1:2])


def train(layers: list[gw.nn.RemoteModule]) -> list[float]:
    """Return the loss of each step."""
    optimizer = gw.optim.DistributedOptimizer(torch.optim.AdamW, layers, lr=0.02)
    losses = []
    for step in range(NUM_STEPS):
        points, wanted = make_batch(step)
        with gw.autograd.context() as context:
            values = points
            for layer in layers:
                values = layer(values)
            loss = nn.functional.mse_loss(values, wanted)
            gw.autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
        if step % 10 == 9:
            print(f"step {step + 1} of {NUM_STEPS}: loss {losses[-1]:.4f}", flush=True)
    return losses


def main() -> None:
    """Runs to the end in rank 0; the other ranks do not come past the first line."""
    with gw.Cluster.from_env(start_timeout_s=60) as cluster:
        last = len(cluster.workers) - 1
        layers = [worker.module(make_layer, index, index == last) for index, worker in enumerate(cluster.workers)]
        losses = train(layers)
        print(f"under_torchrun: {last + 1} workers, loss fell from {losses[0]:.3f} to {losses[-1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
