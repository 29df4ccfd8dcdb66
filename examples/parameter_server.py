"""
Train on a parameter server
===========================

One worker holds the model. Four others train it at the same time, each on data of its own. When the model is made,
you choose what happens if one trainer steps while another is between its forward and its backward pass:

- ``snapshot``: every gradient is exact for the weights that its trainer saw; a step copies what others still need.
- ``serialize``: one trainer at a time, as if they had trained one after the other.
- ``hogwild``: nothing is copied; a gradient may be that of weights that have changed in the meantime.

Run it::

    python examples/parameter_server.py

The program trains once in each mode and prints loss and speed. Then it shows what ``snapshot`` means: it steps while
another context is open, and compares the gradient of that context with the one computed in one process.
"""

from __future__ import annotations

import argparse
import time
from typing import Literal

import torch
from torch import nn

import gradwire as gw
from gradwire.nn import RemoteModule

NUM_TRAINERS = 4
BATCH_SIZE = 64
Mode = Literal["snapshot", "serialize", "hogwild"]
MODES: tuple[Mode, ...] = ("snapshot", "serialize", "hogwild")

# %%
# The model and the data
# ----------------------
# Points on the two arms of a spiral; the model says which arm a point is on.


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the same initial weights wherever it is made
        return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def make_batch(seed: int, size: int = BATCH_SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (size,), generator=random)
    turn = torch.rand(size, generator=random) * 5 + 1
    angle = turn + labels * torch.pi
    noise = torch.randn(size, 2, generator=random) * 0.1
    return torch.stack((angle.cos(), angle.sin()), dim=1) * turn[:, None] / 3 + noise, labels


def compute_loss(model: nn.Module, seed: int, size: int = BATCH_SIZE) -> torch.Tensor:
    points, labels = make_batch(seed, size)
    return nn.functional.cross_entropy(model(points), labels)


# %%
# On a trainer
# ------------
# A trainer is sent a handle of the model and uses it like a module of its own.


def train(model: RemoteModule, trainer: int, num_steps: int) -> list[float]:
    # The others may step up to three times between a gradient and its step; at a rate of 0.15, training could diverge.
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [model], lr=0.1, momentum=0.5)
    losses = []
    for step in range(num_steps):
        with gw.autograd.context() as ctx:
            loss = compute_loss(model, seed=1_000_000 * (trainer + 1) + step)
            ctx.backward(loss)
            optimizer.step(ctx)
        losses.append(loss.item())
    return losses


# %%
# On the driver
# -------------
# ``concurrency`` chooses the mode. All trainers run at once.


def train_together(cluster: gw.Cluster, mode: Mode, num_steps: int) -> tuple[RemoteModule, list[list[float]]]:
    """Return the model, and the losses of each trainer."""
    model = RemoteModule("server", make_model, concurrency=mode)
    futures = [worker.submit(train, model, number, num_steps) for number, worker in enumerate(cluster.workers[1:])]
    losses = []
    for number, future in enumerate(futures):
        losses.append(future.wait())
        print(f"  {mode}: trainer{number} has finished, last loss {losses[-1][-1]:.3f}")
    return model, losses


# %%
# What ``snapshot`` promises
# --------------------------
# One context steps the model while another is between forward and backward. The gradient of the second one is still
# that of the weights that it saw. (With a learning rate of one, the change of a parameter is its gradient.)


def snapshot_error() -> float:
    """Return the largest difference from the gradient of one process."""
    model, local = RemoteModule("server", make_model), make_model()
    names = [name for name, _ in local.named_parameters()]
    expected = torch.autograd.grad(compute_loss(local, seed=1), list(local.parameters()))
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [model], lr=1.0)
    with gw.autograd.context() as slow:
        loss = compute_loss(model, seed=1)
        with gw.autograd.context() as quick:
            quick.backward(compute_loss(model, seed=2))
            optimizer.step(quick)
        slow.backward(loss)
        before = dict(model.named_parameters())
        optimizer.step(slow)
    after = dict(model.named_parameters())
    found = [before[name] - after[name] for name in names]
    return float(torch.stack([(one - other).abs().max() for one, other in zip(found, expected, strict=True)]).max())


# %%
# Train in each mode
# ------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a parameter server, in three modes.")
    parser.add_argument("--steps", type=int, default=100, help="steps of each trainer (default: 100)")
    num_steps = parser.parse_args().steps
    with torch.no_grad():
        before = float(compute_loss(make_model(), seed=0, size=1000))
    print(f"{NUM_TRAINERS} trainers, {num_steps} steps each; loss before training: {before:.3f}")
    names = ["server", *(f"trainer{number}" for number in range(NUM_TRAINERS))]
    final = []
    with gw.Cluster.local(len(names), names=names) as cluster:
        for mode in MODES:
            start = time.perf_counter()
            model, _ = train_together(cluster, mode, num_steps)
            seconds = time.perf_counter() - start
            with torch.no_grad():
                final.append(float(compute_loss(model, seed=0, size=1000)))
            rate = NUM_TRAINERS * num_steps / seconds
            print(f"{mode}: loss {final[-1]:.3f} on new points after {seconds:.1f} s, {rate:,.0f} steps/s")
        error = snapshot_error()
    if not error <= 1e-6:
        raise SystemExit(f"parameter_server: the gradient differs by {error:.1e}")
    if not all(loss < before for loss in final):  # true for NaN, too
        raise SystemExit(f"parameter_server: the losses are {final} in the three modes, {before:.2f} before")
    print(f"snapshot: a gradient computed while another trainer stepped differs from one process by {error:.1e}")
    print(f"parameter_server: the loss fell from {before:.2f} to {max(final):.2f} or less in every mode")


if __name__ == "__main__":
    main()
