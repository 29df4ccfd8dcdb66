"""
Train while workers are killed
==============================

Workers are killed with SIGKILL at random while they train. A lost worker is restarted under its name, ``on_restart``
rebuilds the layer that it held from the last checkpoint, the other workers go back to that checkpoint as well, and
the steps since then are repeated. The losses equal those of an undisturbed run, bit for bit.

Run it::

    python examples/survives_kills.py --kills 5

Each line about an error shows where the training was and where it resumed. ``--seed`` chooses other moments for the
kills.
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

NUM_WORKERS, SAVE_EVERY, STEPS_PER_KILL = 3, 4, 8

# %%
# The model and the data
# ----------------------


def make_layer(number: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(number)  # the same initial weights wherever it is made
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh())


def make_batch(step: int) -> torch.Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(step))


# %%
# A training that can recover
# ---------------------------
# ``rebuild`` runs in a thread of the driver as soon as the new process serves calls. ``recover`` waits until all
# workers are back and takes them to the same checkpoint.


class Training:
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
        gw.checkpoint.save(self.folder, {"layers": self.layers, "optimizer": self.optimizer, "step": step})

    def rebuild(self, worker: gw.cluster.Worker) -> None:
        self.layers[worker.name] = worker.module(make_layer, worker.rank)
        gw.checkpoint.load(self.folder, {"layers": {worker.name: self.layers[worker.name]}})

    def recover(self) -> int:
        """Return the step to resume at."""
        self.cluster.wait_for_workers()
        self.make_optimizer()
        values = gw.checkpoint.load(self.folder, {"layers": self.layers, "optimizer": self.optimizer})
        return int(values["step"])

    def run_step(self, step: int) -> float:
        x = target = make_batch(step)
        with gw.autograd.context() as ctx:
            for layer in self.layers.values():
                x = layer(x)
            loss = (x - target.flip(1)).square().mean()
            ctx.backward(loss)
            self.optimizer.step(ctx)
        return loss.item()

    def kill_soon(self, chance: random.Random) -> threading.Timer:
        """Kill one of the workers within the next steps, whatever it is doing then."""
        victim = chance.choice(self.cluster.workers)
        assert victim.pid is not None
        timer = threading.Timer(chance.uniform(0.0, 0.03), os.kill, (victim.pid, signal.SIGKILL))
        timer.start()
        return timer


# %%
# Train, and recover after every error
# ------------------------------------
# Any error of gradwire leads back to the last checkpoint. A step that is repeated must give the loss that it gave
# before.


def train(num_steps: int, num_kills: int, seed: int) -> list[float]:
    """Return the losses of all steps."""
    chance = random.Random(seed)
    kill_at = sorted(chance.sample(range(num_steps - 2), num_kills), reverse=True)
    losses: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        training = Training(folder, max_restarts=num_kills)
        step, num_repeated, killer = 0, 0, None
        with training.cluster:
            while step < num_steps:
                try:
                    if kill_at and step >= kill_at[-1] and (killer is None or not killer.is_alive()):
                        kill_at.pop()
                        killer = training.kill_soon(chance)
                    if killer is not None and step == num_steps - 1:
                        killer.join()  # the last kill counts, too
                    loss = training.run_step(step)
                    num_repeated += step in losses
                    if losses.setdefault(step, loss) != loss:
                        raise SystemExit(f"survives_kills: step {step} gave another loss when it was repeated")
                    step += 1
                    if step % SAVE_EVERY == 0:
                        training.save(step)
                except gw.errors.GradwireError as error:
                    failed, step = step, training.recover()
                    print(f"  {type(error).__name__} at step {failed}: resumed at step {step}")
            num_restarts = sum(worker.restarts for worker in training.cluster.status())
        print(f"  {num_steps} steps, {num_restarts} restarts, {num_repeated} steps repeated, last loss {loss:.4f}")
    return [losses[step] for step in range(num_steps)]


# %%
# Compare
# -------


def main() -> None:
    parser = argparse.ArgumentParser(description="Train while workers are killed at random.")
    parser.add_argument("--kills", type=int, default=5, help="how many workers to kill (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the moments and the workers (default: 0)")
    options = parser.parse_args()
    num_steps = STEPS_PER_KILL * max(options.kills, 5)
    print(f"{NUM_WORKERS} workers, undisturbed:")
    undisturbed = train(num_steps, 0, options.seed)
    print(f"{NUM_WORKERS} workers, {options.kills} kills:")
    disturbed = train(num_steps, options.kills, options.seed)
    if disturbed != undisturbed:
        raise SystemExit("survives_kills: the losses differ from those of the undisturbed run")
    print(
        f"survives_kills: after {options.kills} kills all {num_steps} losses equal those of the undisturbed run, bit for bit"
    )


if __name__ == "__main__":
    main()
