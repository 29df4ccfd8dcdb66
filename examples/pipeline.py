"""
Keep the stages of a pipeline busy
==================================

A model is in three stages on three workers. Each stage holds its layers and a handle of the next stage, and calls it
itself. So activations go from worker to worker, and the driver gets a loss::

    driver  --- rows, targets -->  stage0  --- activations -->  stage1  --- activations -->  stage2
            <-------------------------------- loss of a micro-batch ------------------------------

Run it::

    python examples/pipeline.py --micro-batches 8

The program trains with three schedules and prints when each stage worked on which micro-batch:

- one batch: the whole batch at once. One stage works, the others wait.
- GPipe: all micro-batches forward, then one backward pass through all of them.
- 1F1B: each micro-batch goes backward as soon as its loss is there. Few are in progress at a time, which bounds memory.

The layers are small. For each row, a stage waits as long as a device might compute, one micro-batch at a time, so the
schedules can be compared on a machine with few cores. Finally, the weights are compared with those of a model that one
process has trained on the same batches.
"""

from __future__ import annotations

import argparse
import contextlib
import contextvars
import string
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

import gradwire as gw
from gradwire.nn import RemoteModule
from gradwire.optim import DistributedOptimizer

NUM_STAGES, NUM_STEPS = 3, 3
WIDTH, BATCH_SIZE = 32, 512
FORWARD_S, BACKWARD_S = 0.024 / BATCH_SIZE, 0.048 / BATCH_SIZE  # of a stage, for each row
COLUMNS = 72  # of the picture
Batch = list[tuple[torch.Tensor, torch.Tensor]]
Work = tuple[str, int, float, float]  # forward or backward, micro-batch, begin, end


# %%
# A stage
# -------
# ``compute`` stands for the work of a device, and notes when it was done.


def make_layers(stage: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(stage)  # the same initial weights wherever they are made
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Stage(nn.Module):
    """Some layers, and the stage after them."""

    def __init__(self, number: int, following: RemoteModule | None) -> None:
        super().__init__()
        self.layers = make_layers(number)
        self.following = following
        self.device = threading.Lock()  # held by the micro-batch that the stage works on
        self.log: list[Work] = []

    def forward(self, x: torch.Tensor, target: torch.Tensor, number: int) -> torch.Tensor:
        """Return the loss of a micro-batch, which the last stage computes."""
        self.compute("forward", number, FORWARD_S * len(x))
        result = self.layers(x)
        result.register_hook(lambda _: self.compute("backward", number, BACKWARD_S * len(x)))
        if self.following is None:
            return nn.functional.mse_loss(result, target)
        loss: torch.Tensor = self.following(result, target, number)
        return loss

    def compute(self, kind: str, number: int, seconds: float) -> None:
        with self.device:
            began = time.monotonic()
            time.sleep(seconds)
            self.log.append((kind, number, began, time.monotonic()))

    def take_log(self) -> list[Work]:
        """Return what it has done since the last time."""
        log, self.log = self.log, []
        return log


def make_batch(seed: int, num_parts: int) -> Batch:
    x = torch.randn(BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(seed))
    return list(zip(x.chunk(num_parts), x.flip(1).tanh().chunk(num_parts), strict=True))


# %%
# GPipe
# -----
# All calls are started before the first result is waited for. One backward pass goes through all micro-batches, side by
# side.


def gpipe(stage0: RemoteModule, optimizer: DistributedOptimizer, batch: Batch) -> None:
    with gw.autograd.context() as ctx:
        futures = [stage0.forward_async(x, target, number) for number, (x, target) in enumerate(batch)]
        loss = torch.stack([future.wait() for future in futures]).mean()
        ctx.backward(loss)
        optimizer.step(ctx)


# %%
# 1F1B
# ----
# Each micro-batch has a context of its own. The pool runs few of them at a time: one for each stage, and one on its way.
# ``step`` adds up the gradients of all contexts.


def one_forward_one_backward(stage0: RemoteModule, optimizer: DistributedOptimizer, batch: Batch) -> None:
    def run(ctx: gw.autograd.ContextId, number: int) -> None:
        loss = stage0(*batch[number], number) / len(batch)
        ctx.backward(loss)

    with ThreadPoolExecutor(NUM_STAGES + 1) as pool, contextlib.ExitStack() as stack:
        contexts, jobs = [], []
        for number in range(len(batch)):
            contexts.append(stack.enter_context(gw.autograd.context()))
            inside = contextvars.copy_context()  # so that the thread of the pool runs in this autograd context
            jobs.append(pool.submit(inside.run, run, contexts[-1], number))
        for job in jobs:
            job.result()
        optimizer.step(contexts)


# %%
# A picture of the schedule
# -------------------------
# One line for each stage. Digits are micro-batches going forward, letters are the same ones going backward.


def draw(logs: list[list[Work]]) -> None:
    begin = min(work[2] for log in logs for work in log)
    column_s = (max(work[3] for log in logs for work in log) - begin) / COLUMNS
    for number, log in enumerate(logs):
        line = ["."] * COLUMNS
        for kind, part, began, ended in log:
            first, last = round((began - begin) / column_s), round((ended - begin) / column_s)
            line[first:last] = (string.digits if kind == "forward" else string.ascii_lowercase)[part] * (last - first)
        print(f"  stage{number} {''.join(line)}")


# %%
# Train with each schedule
# ------------------------


def train(
    step: Callable[[RemoteModule, DistributedOptimizer, Batch], None], num_parts: int
) -> tuple[list[torch.Tensor], float]:
    """Return the weights after some steps, and the seconds of the fastest step."""
    stages: list[RemoteModule] = []
    for number in reversed(range(NUM_STAGES)):
        stages.insert(0, RemoteModule(f"stage{number}", Stage, (number, stages[0] if stages else None)))
    optimizer = DistributedOptimizer(torch.optim.SGD, [stages[0]], lr=0.1)  # finds the other stages, too
    seconds = []
    for number in range(NUM_STEPS):
        for stage in stages:
            stage.take_log()
        began = time.perf_counter()
        step(stages[0], optimizer, make_batch(number, num_parts))
        seconds.append(time.perf_counter() - began)
    draw([stage.take_log() for stage in stages])
    return list(stages[0].state_dict().values()), min(seconds)


def train_in_one_process() -> list[torch.Tensor]:
    """Train the same model on the same batches with torch alone."""
    model = nn.Sequential(*map(make_layers, range(NUM_STAGES)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(NUM_STEPS):
        ((x, target),) = make_batch(number, 1)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), target).backward()
        optimizer.step()
    return list(model.state_dict().values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a pipeline of three stages, with three schedules.")
    parser.add_argument("--micro-batches", type=int, default=8, help="at most 10, so that each has a digit")
    num_parts = parser.parse_args().micro_batches
    most = NUM_STAGES * num_parts / (num_parts + NUM_STAGES - 1)
    expected, whole_s = train_in_one_process(), 0.0
    differences = []
    with gw.Cluster.local(NUM_STAGES, names=[f"stage{number}" for number in range(NUM_STAGES)]):
        for name, step, parts in (
            ("one batch", gpipe, 1),
            ("GPipe", gpipe, num_parts),
            ("1F1B", one_forward_one_backward, num_parts),
        ):
            print(f"{name}:")
            found, seconds = train(step, parts)
            whole_s = whole_s or seconds
            note = f", {whole_s / seconds:.2f} times as fast; {most:.2f} is possible" if parts > 1 else ""
            print(f"  {seconds * 1e3:.0f} ms a step{note}")
            differences += [(one - other).abs().max() for one, other in zip(found, expected, strict=True)]
    error = float(torch.stack(differences).max())
    if not error <= 1e-6:
        raise SystemExit(f"pipeline: weights differ from those of one process by {error:.1e}")
    print(
        f"pipeline: after {NUM_STEPS} steps with each schedule, weights differ from those of one process by {error:.1e}"
    )


if __name__ == "__main__":
    main()
