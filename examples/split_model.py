"""A model split over two workers learns exactly what it learns in one process.

    python examples/split_model.py

The encoder is on one worker, the head on another, the data on the driver. All use one thread, so that every sum is made in
the same order; then the losses of both runs are the same, bit for bit: with an optimizer that has state, a learning rate
that changes, gradient clipping and micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gradwire

NUM_STEPS = 40
MAX_NORM = 1.0


def make_encoder() -> nn.Module:
    """The first half; its values are the same wherever it is made."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16))


def make_head() -> nn.Module:
    """The second half."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Tanh(), nn.Linear(16, 1))


def batches(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two micro-batches: points, and what the model is to learn of them."""
    numbers = torch.Generator().manual_seed(number)
    points = torch.randn(2, 16, 8, generator=numbers)
    return [(x, torch.tanh(x[:, :1] - x[:, 1:2])) for x in points]


def use_one_thread() -> None:
    """With several, sums may be made in another order."""
    torch.set_num_threads(1)


def train(make_step: Callable[[], tuple[Any, Callable[[int], float]]]) -> list[float]:
    """The losses of a run, with a schedule on top of its optimizer."""
    optimizer, step = make_step()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    losses = []
    for number in range(NUM_STEPS):
        losses.append(step(number))
        schedule.step()
    return losses


def on_workers() -> tuple[Any, Callable[[int], float]]:
    """The halves on two workers."""
    encoder = gradwire.nn.RemoteModule("worker0", make_encoder)
    head = gradwire.nn.RemoteModule("worker1", make_head)
    optimizer = gradwire.optim.DistributedOptimizer(torch.optim.AdamW, [encoder, head], lr=0.01)

    def step(number: int) -> float:
        losses, contexts = [], []
        with contextlib.ExitStack() as stack:
            for x, y in batches(number):  # a context for each; the optimizer adds their gradients up
                contexts.append(stack.enter_context(gradwire.autograd.context()))
                losses.append(nn.functional.mse_loss(head(encoder(x)), y))
                contexts[-1].backward(losses[-1])
            optimizer.clip_grad_norm_(contexts, MAX_NORM)
            optimizer.step(contexts)
        return sum(loss.item() for loss in losses)

    return optimizer, step


def in_one_process() -> tuple[Any, Callable[[int], float]]:
    """The same model, and torch alone."""
    model = nn.Sequential(make_encoder(), make_head())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(number: int) -> float:
        optimizer.zero_grad()
        losses = [nn.functional.mse_loss(model(x), y) for x, y in batches(number)]
        for loss in losses:
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return sum(loss.item() for loss in losses)

    return optimizer, step


def main() -> None:
    """Trains both, and compares every loss."""
    use_one_thread()
    with gradwire.Cluster.local(2) as cluster:
        for worker in cluster.workers:
            worker.call(use_one_thread)
        there = train(on_workers)
    here = train(in_one_process)
    for number in range(0, NUM_STEPS, 10):
        print(f"step {number:2}: loss {there[number]:.6f} on workers, {here[number]:.6f} in one process")
    if there != here:
        raise SystemExit("split_model: the losses differ")
    print(f"split_model: {NUM_STEPS} losses fell from {here[0]:.3f} to {here[-1]:.3f}, the same bit for bit")


if __name__ == "__main__":
    main()
