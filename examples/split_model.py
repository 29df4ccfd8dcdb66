"""
Split a model over two workers
==============================

The encoder is on one worker, the head on another, the data on the driver. The program trains that model, then the
same model in one process with torch alone, and compares every loss.

Run it::

    python examples/split_model.py

The losses are equal bit for bit, with everything that a real training loop has: an optimizer with state (AdamW), a
learning rate schedule, gradient clipping over both workers, and two micro-batches per step. (All processes use one
thread for tensor operations, because another number of threads may add numbers in another order.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gradwire as gw

NUM_STEPS = 40
MAX_NORM = 1.0

# %%
# The model and the data
# ----------------------
# Both halves have the same initial weights wherever they are made.


def make_encoder() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16))


def make_head() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Tanh(), nn.Linear(16, 1))


def make_micro_batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(step))
    return [(x, torch.tanh(x[:, :1] - x[:, 1:2])) for x in inputs]


# %%
# On two workers
# --------------
# Each micro-batch has a context of its own. The optimizer adds up their gradients, clips them by their norm over both
# workers, and steps each half where it lives.


def on_workers() -> tuple[Any, Callable[[int], float]]:
    """Return the optimizer, and a function that runs one step and returns its loss."""
    encoder = gw.nn.RemoteModule("worker0", make_encoder)
    head = gw.nn.RemoteModule("worker1", make_head)
    optimizer = gw.optim.DistributedOptimizer(torch.optim.AdamW, [encoder, head], lr=0.01)

    def run_step(step: int) -> float:
        losses, contexts = [], []
        with contextlib.ExitStack() as stack:
            for x, y in make_micro_batches(step):
                contexts.append(stack.enter_context(gw.autograd.context()))
                losses.append(nn.functional.mse_loss(head(encoder(x)), y))
                contexts[-1].backward(losses[-1])
            optimizer.clip_grad_norm_(contexts, MAX_NORM)
            optimizer.step(contexts)
        return sum(loss.item() for loss in losses)

    return optimizer, run_step


# %%
# In one process
# --------------


def in_one_process() -> tuple[Any, Callable[[int], float]]:
    """Return the optimizer, and a function that runs one step and returns its loss."""
    model = nn.Sequential(make_encoder(), make_head())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def run_step(step: int) -> float:
        optimizer.zero_grad()
        losses = [nn.functional.mse_loss(model(x), y) for x, y in make_micro_batches(step)]
        for loss in losses:
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return sum(loss.item() for loss in losses)

    return optimizer, run_step


# %%
# Train both and compare
# ----------------------
# A scheduler of torch works on either optimizer.


def train(place: Callable[[], tuple[Any, Callable[[int], float]]]) -> list[float]:
    optimizer, run_step = place()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    losses = []
    for step in range(NUM_STEPS):
        losses.append(run_step(step))
        scheduler.step()
        if step % 10 == 0:
            print(f"  step {step:2} of {NUM_STEPS}: loss {losses[-1]:.6f}")
    return losses


def main() -> None:
    torch.set_num_threads(1)  # as many as each worker has
    with gw.Cluster.local(2):
        print("encoder on worker0, head on worker1:")
        distributed = train(on_workers)
    print("the same model in one process:")
    local = train(in_one_process)
    if distributed != local:
        raise SystemExit("split_model: the losses differ")
    if not local[-1] < local[0]:
        raise SystemExit("split_model: the loss has not fallen")
    print(
        f"split_model: the loss fell from {local[0]:.3f} to {local[-1]:.3f}, all {NUM_STEPS} losses equal bit for bit"
    )


if __name__ == "__main__":
    main()
