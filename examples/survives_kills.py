"""Trains a model on three workers while they are killed at random, and ends with the losses of an undisturbed run.

    python examples/survives_kills.py --kills 5

A worker that is lost is started again under its name. `on_restart` makes the layer that it held again, from the last
checkpoint; then the others go back to that checkpoint, too, and the batches since then are used once more.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading

import torch
from torch import nn

import gradwire as gw

NUM_WORKERS, SAVE_EVERY, STEPS_FOR_A_KILL = 3, 4, 8


def make_layer(number: int) -> nn.Module:
    """One layer, with the same weights wherever it is made."""
    with torch.random.fork_rng():
        torch.manual_seed(number)
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh())


def batch(number: int) -> torch.Tensor:
    """The data of a step."""
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(number))


class Training:
    """One layer on each worker, and one optimizer for all."""

    def __init__(self, folder: str, max_restarts: int) -> None:
        self.folder = folder
        self.cluster = gw.Cluster.local(
            NUM_WORKERS, restart="on-loss", on_restart=self.rebuild, max_restarts=max_restarts
        )
        self.layers = {worker.name: worker.module(make_layer, worker.rank) for worker in self.cluster.workers}
        self.make_optimizer()
        self.save(0)

    def make_optimizer(self) -> None:
        self.optimizer = gw.optim.DistributedOptimizer(torch.optim.AdamW, list(self.layers.values()), lr=0.01)

    def save(self, step: int) -> None:
        gw.checkpoint.save(self.folder, {"layers": self.layers, "optim": self.optimizer, "step": step})

    def rebuild(self, worker: gw.cluster.Worker) -> None:
        """Make what a worker held again, as it was when it was saved last."""
        self.layers[worker.name] = worker.module(make_layer, worker.rank)
        gw.checkpoint.load(self.folder, {"layers": {worker.name: self.layers[worker.name]}})

    def recover(self) -> int:
        """Wait until all workers are back, take all of them to the last checkpoint; return the step to go on with."""
        self.cluster.wait_for_workers()
        self.make_optimizer()
        values = gw.checkpoint.load(self.folder, {"layers": self.layers, "optim": self.optimizer})
        return int(values["step"])

    def step(self, number: int) -> float:
        """One step; returns its loss."""
        x = target = batch(number)
        with gw.autograd.context() as ctx:
            for layer in self.layers.values():
                x = layer(x)
            loss = (x - target.flip(1)).square().mean()
            ctx.backward(loss)
            self.optimizer.step(ctx)
        return loss.item()

    def kill_soon(self, chance: random.Random) -> threading.Timer:
        """Kill one of the workers within the next steps, whatever it does then."""
        victim = chance.choice(self.cluster.workers)
        assert victim.pid is not None
        timer = threading.Timer(chance.uniform(0.0, 0.03), os.kill, (victim.pid, signal.SIGKILL))
        timer.start()
        return timer


def train(num_steps: int, kills: int, seed: int) -> list[float]:
    """The losses of all steps."""
    chance = random.Random(seed)
    kill_at = sorted(chance.sample(range(num_steps - 2), kills), reverse=True)
    losses: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        training = Training(folder, max_restarts=kills)
        number, num_replayed, killer = 0, 0, None
        with training.cluster:
            while number < num_steps:
                try:
                    if kill_at and number >= kill_at[-1] and (killer is None or not killer.is_alive()):
                        kill_at.pop()
                        killer = training.kill_soon(chance)
                    if killer is not None and number == num_steps - 1:
                        killer.join()  # the last one counts, too
                    loss = training.step(number)
                    num_replayed += number in losses
                    assert losses.setdefault(number, loss) == loss, "a batch that is used again gives the same loss"
                    number += 1
                    if number % SAVE_EVERY == 0:
                        training.save(number)
                except gw.errors.GradwireError as error:
                    number = training.recover()
                    print(f"{type(error).__name__} at step {len(losses)}: on from step {number}")
            restarts = sum(worker.restarts for worker in training.cluster.status())
        print(f"{num_steps} steps with {restarts} restarts: {num_replayed} batches were used again, loss {loss:.4f}")
    return [losses[number] for number in range(num_steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    num_steps = STEPS_FOR_A_KILL * max(options.kills, 5)
    undisturbed = train(num_steps, 0, options.seed)
    disturbed = train(num_steps, options.kills, options.seed)
    print(
        f"survives_kills: {options.kills} kills, {num_steps} losses are the same bit for bit: {disturbed == undisturbed}"
    )


if __name__ == "__main__":
    main()
