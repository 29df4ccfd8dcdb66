"""Several trainers, one parameter server, and three ways to share the parameters.

    python examples/parameter_server.py --steps 60

One worker has the model, four others train it at the same time, each on data of its own. What happens when one steps while
another is between forward and backward is chosen when the model is made:

      "snapshot"   every gradient is exact for the weights that its trainer saw; a step copies what others still need
      "serialize"  one trainer at a time: as if they had trained one after the other
      "hogwild"    nothing is copied; gradients may be those of weights that have changed meanwhile

The program trains once with each. In the end it shows what "snapshot" means: it steps while another context is under way,
and compares that context's gradient with the one of the weights it saw, computed in one process.
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


def make_model() -> nn.Module:
    """Two inputs, two classes; the same weights wherever it is made."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def make_batch(seed: int, size: int = BATCH_SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on two arms of a spiral, and which arm each is on."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (size,), generator=random)
    turn = torch.rand(size, generator=random) * 5 + 1
    angle = turn + labels * torch.pi
    noise = torch.randn(size, 2, generator=random) * 0.1
    return torch.stack((angle.cos(), angle.sin()), dim=1) * turn[:, None] / 3 + noise, labels


def loss_of(model: nn.Module, seed: int, size: int = BATCH_SIZE) -> torch.Tensor:
    """Cross entropy on a batch."""
    points, labels = make_batch(seed, size)
    return nn.functional.cross_entropy(model(points), labels)


def train(model: RemoteModule, trainer: int, num_steps: int) -> float:
    """Runs on a trainer; returns its last loss."""
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [model], lr=0.15, momentum=0.5)
    loss = torch.zeros(())
    for number in range(num_steps):
        with gw.autograd.context() as ctx:
            loss = loss_of(model, seed=1_000_000 * (trainer + 1) + number)
            ctx.backward(loss)
            optimizer.step(ctx)
    return float(loss.detach())


def train_together(cluster: gw.Cluster, mode: Mode, num_steps: int) -> tuple[float, float]:
    """All trainers at once; returns the loss on new points, and the seconds it took."""
    model = RemoteModule("server", make_model, concurrency=mode)
    began = time.perf_counter()
    jobs = [worker.submit(train, model, number, num_steps) for number, worker in enumerate(cluster.workers[1:])]
    for number, job in enumerate(jobs):
        print(f"  {mode}: trainer{number} is done, its last loss is {job.wait():.3f}")
    seconds = time.perf_counter() - began
    with torch.no_grad():
        return float(loss_of(model, seed=0, size=1000)), seconds


def gradient_error() -> float:
    """Steps while another context is under way; how far its gradients are from those of the weights it saw."""
    model, local = RemoteModule("server", make_model), make_model()
    names = [name for name, _ in local.named_parameters()]
    expected = torch.autograd.grad(loss_of(local, seed=1), list(local.parameters()))
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [model], lr=1.0)
    with gw.autograd.context() as slow:
        loss = loss_of(model, seed=1)
        with gw.autograd.context() as quick:
            quick.backward(loss_of(model, seed=2))
            optimizer.step(quick)
        slow.backward(loss)
        before = dict(model.named_parameters())
        optimizer.step(slow)
    after = dict(model.named_parameters())
    found = [before[name] - after[name] for name in names]  # with a rate of one, the step is the gradient
    return max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))


def main() -> None:
    """Trains with each mode."""
    parser = argparse.ArgumentParser(description="Several trainers, one parameter server.")
    parser.add_argument("--steps", type=int, default=100, help="of each trainer")
    num_steps = parser.parse_args().steps
    with torch.no_grad():
        before = float(loss_of(make_model(), seed=0, size=1000))
    print(f"{NUM_TRAINERS} trainers, {num_steps} steps each; the loss is {before:.3f} before")
    names = ["server", *(f"trainer{number}" for number in range(NUM_TRAINERS))]
    losses = []
    with gw.Cluster.local(len(names), names=names) as cluster:
        for mode in MODES:
            loss, seconds = train_together(cluster, mode, num_steps)
            losses.append(loss)
            rate = NUM_TRAINERS * num_steps / seconds
            print(f"{mode}: loss {loss:.3f} after {seconds:.1f} s, {rate:,.0f} steps/s")
        error = gradient_error()
    assert error < 1e-6, f"gradients differ by {error:.1e}"
    print(f"a gradient computed while another trainer stepped differs from that of one process by {error:.1e}")
    print(f"parameter_server: loss fell from {before:.2f} to {max(losses):.2f} or less, with every way to share")


if __name__ == "__main__":
    main()
