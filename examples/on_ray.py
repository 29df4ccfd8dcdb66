"""A model split over the workers of a Ray cluster learns what it learns in one process.

    python examples/on_ray.py                       # starts Ray on this machine, and stops it at the end
    python examples/on_ray.py --address auto        # on the Ray cluster that this machine belongs to
    ray job submit --working-dir . -- python examples/on_ray.py

Ray finds room for the workers, starts their processes and starts them again if they are lost. Calls and gradients go from
worker to worker over gradwire's own connections, with TLS where machines differ.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import gradwire as gw

NUM_STEPS = 30


def make_stage(number: int) -> nn.Module:
    """A part of the model, with the same values wherever it is made."""
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh()) if number == 0 else nn.Linear(32, 1)


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Points, and what the model is to learn of them."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(number))
    return x, torch.tanh(x[:, :1] - x[:, 1:2])


def on_workers(cluster: gw.Cluster) -> list[float]:
    """The losses of a run with each stage on the worker of its rank."""
    model = nn.Sequential(*(worker.module(make_stage, worker.rank) for worker in cluster.workers))
    optimizer = gw.optim.DistributedOptimizer(torch.optim.Adam, list(model), lr=0.01)
    losses = []
    for number in range(NUM_STEPS):
        x, y = batch(number)
        with gw.autograd.context() as ctx:
            loss = nn.functional.mse_loss(model(x), y)
            ctx.backward(loss)
            optimizer.step(ctx)
        losses.append(loss.item())
    return losses


def in_one_process() -> list[float]:
    """The losses of the same run with torch alone."""
    model = nn.Sequential(make_stage(0), make_stage(1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for number in range(NUM_STEPS):
        x, y = batch(number)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Trains on two workers, and compares."""
    parser = argparse.ArgumentParser(description="Trains a model that is split over two workers on Ray.")
    parser.add_argument("--address", help='"auto" or host:port of a Ray cluster; without it Ray is started here')
    torch.set_num_threads(1)  # as many as each worker has
    with gw.Cluster.ray(2, resources={"CPU": 1}, address=parser.parse_args().address) as cluster:
        print(cluster.describe())
        there = on_workers(cluster)
    here = in_one_process()
    is_same = max(abs(one - other) for one, other in zip(there, here, strict=True)) < 1e-6
    print(f"on_ray: {NUM_STEPS} losses fell from {there[0]:.3f} to {there[-1]:.3f}, as in one process: {is_same}")


if __name__ == "__main__":
    main()
