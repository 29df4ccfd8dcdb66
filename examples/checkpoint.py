"""
Save, lose a worker, resume on three
====================================

Train on two workers and save a checkpoint every three steps. After eight steps a worker is killed. Load the last
checkpoint on three workers and finish the training there: the losses equal those of an undisturbed run, bit for bit.

Run it::

    python examples/checkpoint.py

Each worker writes the parameters and the optimizer state that it holds. Loading goes by the names of parameters, not
by workers, so the number of workers may change. At the end the program reads the checkpoint in one process, without a
cluster.
"""

from __future__ import annotations

import os
import signal
import tempfile
from typing import Any

import torch
from torch import nn

import gradwire as gw

NUM_STEPS, KILL_AFTER, SAVE_EVERY = 12, 8, 3
NUM_LAYERS = 3

# %%
# The model and the data
# ----------------------


def make_layer(number: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(number)  # the same initial weights wherever it is made
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def make_batch(step: int) -> torch.Tensor:
    return torch.randn(256, 8, generator=torch.Generator().manual_seed(step))


# %%
# The training
# ------------
# Three layers on the workers that there are, one optimizer, and a scheduler. ``state`` is what a checkpoint has to
# hold.


class Training:
    def __init__(self, cluster: gw.Cluster) -> None:
        workers = [cluster.workers[number % len(cluster.workers)] for number in range(NUM_LAYERS)]
        self.model = nn.Sequential(*(worker.module(make_layer, number) for number, worker in enumerate(workers)))
        self.optimizer = gw.optim.DistributedOptimizer(torch.optim.AdamW, [self.model], lr=0.03)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, NUM_STEPS)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def run_step(self, step: int) -> float:
        x = make_batch(step)
        with gw.autograd.context() as ctx:
            loss = (self.model(x) - x.flip(1)).square().mean()
            ctx.backward(loss)
            self.optimizer.step(ctx)
        self.scheduler.step()
        print(f"  step {step:2}: loss {loss.item():.6f}")
        return loss.item()


# %%
# Without a failure
# -----------------


def train_undisturbed() -> list[float]:
    with gw.Cluster.local(2) as cluster:
        training = Training(cluster)
        return [training.run_step(step) for step in range(NUM_STEPS)]


# %%
# With a failure
# --------------
# ``checkpoint.save`` is atomic: a save that fails leaves the last one as it was. A killed worker shows as an error of
# the next step.


def train_until_killed(folder: str) -> dict[int, float]:
    """Return the losses by step."""
    losses = {}
    with gw.Cluster.local(2) as cluster:
        training = Training(cluster)
        try:
            for step in range(NUM_STEPS):
                losses[step] = training.run_step(step)
                if (step + 1) % SAVE_EVERY == 0:
                    summary = gw.checkpoint.save(folder, {**training.state, "step": step + 1})
                    print(f"  saved {summary.num_tensors} tensors in {len(summary.files)} files")
                if step + 1 == KILL_AFTER:
                    print("  killing worker1")
                    os.kill(cluster.workers[1].pid or 0, signal.SIGKILL)
        except gw.errors.GradwireError as error:
            print(f"  step {step:2}: {type(error).__name__}")
    return losses


def resume(folder: str) -> dict[int, float]:
    """Return the losses by step, from the last checkpoint on."""
    with gw.Cluster.local(3) as cluster:
        training = Training(cluster)
        first: int = gw.checkpoint.load(folder, training.state)["step"]
        return {step: training.run_step(step) for step in range(first, NUM_STEPS)}


# %%
# Compare
# -------


def main() -> None:
    torch.set_num_threads(1)  # as many as each worker has
    print("two workers, undisturbed:")
    expected = train_undisturbed()
    with tempfile.TemporaryDirectory() as folder:
        print("two workers, until one is killed:")
        losses = train_until_killed(folder)
        print("three workers, from the last checkpoint on:")
        losses |= resume(folder)
        weights = gw.checkpoint.read(folder)["model"]
    print(f"read in one process: {len(weights)} tensors, the first is {next(iter(weights))!r}")
    if [losses[step] for step in range(NUM_STEPS)] != expected:
        raise SystemExit("checkpoint: the losses differ from those of the undisturbed run")
    print(f"checkpoint: all {NUM_STEPS} losses equal those of the undisturbed run, bit for bit")


if __name__ == "__main__":
    main()
