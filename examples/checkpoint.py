"""Trains on two workers, saves, loses a worker, and goes on with three of them: the same losses, bit for bit.

    python examples/checkpoint.py

Each worker writes the parameters and the optimizer state that it has; names are what counts when they are loaded, not
workers. At the end the checkpoint is read in one process, without any cluster.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import gradwire as gw

NUM_STEPS, LOST_AFTER, SAVE_EVERY = 12, 8, 3
NUM_LAYERS = 3


def make_layer(number: int) -> nn.Module:
    """One layer, with the same weights wherever it is made."""
    with torch.random.fork_rng():
        torch.manual_seed(number)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def batch(number: int) -> torch.Tensor:
    """The data of a step."""
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(number))


class Training:
    """Layers spread over the workers of a cluster, with one optimizer and a schedule."""

    def __init__(self, workers: Sequence[str]) -> None:
        places = [workers[number % len(workers)] for number in range(NUM_LAYERS)]
        layers = [gw.nn.RemoteModule(place, make_layer, (number,)) for number, place in enumerate(places)]
        self.model = nn.Sequential(*layers)
        self.optimizer = gw.optim.DistributedOptimizer(torch.optim.AdamW, [self.model], lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, NUM_STEPS)

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        return {"model": self.model, "optim": self.optimizer, "schedule": self.schedule}

    def step(self, number: int) -> float:
        """One step; returns its loss."""
        with gw.autograd.context() as ctx:
            loss = (self.model(batch(number)) - batch(number).flip(1)).square().mean()
            ctx.backward(loss)
            self.optimizer.step(ctx)
        self.schedule.step()
        return loss.item()


def train_undisturbed() -> list[float]:
    """The losses of all steps when nothing happens."""
    with gw.Cluster.local(2) as cluster:
        training = Training([worker.name for worker in cluster.workers])
        return [training.step(number) for number in range(NUM_STEPS)]


def train_until_a_worker_is_lost(folder: str) -> dict[int, float]:
    """The losses of the steps until then, by step."""
    losses = {}
    with gw.Cluster.local(2) as cluster:
        training = Training([worker.name for worker in cluster.workers])
        try:
            for number in range(NUM_STEPS):
                losses[number] = training.step(number)
                if (number + 1) % SAVE_EVERY == 0:
                    summary = gw.checkpoint.save(folder, {**training.state, "step": number + 1})
                if number + 1 == LOST_AFTER:
                    print(f"saved last:\n{summary!r}\n")
                    os.kill(cluster.workers[1].pid or 0, signal.SIGKILL)
        except gw.errors.GradwireError as error:
            print(f"step {number}: {type(error).__name__}, worker1 is lost")
    return losses


def train_on(folder: str) -> dict[int, float]:
    """The losses of the steps from the checkpoint on, on three workers."""
    with gw.Cluster.local(3) as cluster:
        training = Training([worker.name for worker in cluster.workers])
        first = gw.checkpoint.load(folder, training.state)["step"]
        print(f"goes on at step {first} on {len(cluster.workers)} workers")
        return {number: training.step(number) for number in range(first, NUM_STEPS)}


def main() -> None:
    """Trains twice and compares."""
    torch.set_num_threads(1)  # as many as each worker has
    expected = train_undisturbed()
    with tempfile.TemporaryDirectory() as folder:
        losses = train_until_a_worker_is_lost(folder)
        losses |= train_on(folder)
        weights = gw.checkpoint.read(folder)["model"]
    print(f"read in one process: {len(weights)} tensors, the first is {next(iter(weights))}")
    same = [losses[number] for number in range(NUM_STEPS)] == expected
    print(f"checkpoint: {NUM_STEPS} losses are the same bit for bit: {same}")


if __name__ == "__main__":
    from checkpoint import main as imported_main  # so that the workers import this file, too

    imported_main()
