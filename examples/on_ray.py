"""
Run workers on a Ray cluster
============================

Ray finds room for the workers and starts their processes. Calls and gradients go from worker to worker over
gradwire's own connections, with TLS where machines differ. Everything else is as with ``Cluster.local``.

Run it in one of these ways::

    python examples/on_ray.py                       # starts Ray on this machine, and stops it at the end
    python examples/on_ray.py --address auto        # on the Ray cluster that this machine belongs to
    ray job submit --working-dir . -- python examples/on_ray.py

It needs the extra ``gradwire[ray]``. The first lines show the workers; ``cluster.describe()`` has their
nodes, addresses and options as well. The last line compares the losses with those of the same training in one process.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import gradwire as gw

NUM_STEPS = 30

# %%
# The model and the data
# ----------------------
# Two stages, with the same initial weights wherever they are made.


def make_stage(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh()) if number == 0 else nn.Linear(32, 1)


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
    return x, torch.tanh(x[:, :1] - x[:, 1:2])


# %%
# Train on the workers
# --------------------
# Each stage is on the worker of its rank.


def train_on_workers(cluster: gw.Cluster) -> list[float]:
    model = nn.Sequential(*(worker.module(make_stage, worker.rank) for worker in cluster.workers))
    optimizer = gw.optim.DistributedOptimizer(torch.optim.Adam, list(model), lr=0.01)
    losses = []
    for step in range(NUM_STEPS):
        x, y = make_batch(step)
        with gw.autograd.context() as ctx:
            loss = nn.functional.mse_loss(model(x), y)
            ctx.backward(loss)
            optimizer.step(ctx)
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step:2} of {NUM_STEPS}: loss {losses[-1]:.4f}")
    return losses


# %%
# Train in one process
# --------------------


def train_in_one_process() -> list[float]:
    model = nn.Sequential(make_stage(0), make_stage(1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(NUM_STEPS):
        x, y = make_batch(step)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %%
# Start the workers
# -----------------
# Only this line differs from a program on one machine.


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a model that is split over two workers on Ray.")
    parser.add_argument("--address", help='"auto" or host:port of a Ray cluster; without it, Ray is started here')
    torch.set_num_threads(1)  # as many as each worker has
    with gw.Cluster.ray(2, resources={"CPU": 1}, address=parser.parse_args().address) as cluster:
        print(cluster.status())
        distributed = train_on_workers(cluster)
    local = train_in_one_process()
    if not all(abs(one - other) < 1e-6 for one, other in zip(distributed, local, strict=True)):
        raise SystemExit(f"on_ray: the losses {distributed} differ from those of one process, {local}")
    if not local[-1] < local[0]:
        raise SystemExit("on_ray: the loss has not fallen")
    print(f"on_ray: the loss fell from {local[0]:.3f} to {local[-1]:.3f}, as in one process")


if __name__ == "__main__":
    main()
