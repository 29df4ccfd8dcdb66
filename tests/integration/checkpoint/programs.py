"""What the tests of checkpoints train, and what they have workers do."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gradwire import autograd, checkpoint, rpc
from gradwire.checkpoint import directory
from gradwire.nn import RemoteModule
from gradwire.optim import DistributedOptimizer


def make_layer(number: int) -> nn.Module:
    """One of two layers, with the same weights wherever it is made."""
    with torch.random.fork_rng():
        torch.manual_seed(number)
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh()) if number == 0 else nn.Linear(4, 1)


class Training:
    """Two layers on the named workers, an optimizer and a schedule; the same steps everywhere."""

    def __init__(self, workers: Sequence[str]) -> None:
        self.layers = [RemoteModule(worker, make_layer, (number,)) for number, worker in enumerate(workers)]
        pairs = [
            (f"{number}.{name}", rref)
            for number, layer in enumerate(self.layers)
            for name, rref in layer.named_remote_parameters()
        ]
        self.optimizer = DistributedOptimizer(torch.optim.AdamW, pairs, lr=0.05)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    @property
    def state(self) -> dict[str, Any]:
        return {"layers": list(self.layers), "optim": self.optimizer, "schedule": self.schedule}

    def step(self, number: int) -> float:
        with autograd.context() as ctx:
            loss = self.layers[1](self.layers[0](batch(number))).square().mean()
            ctx.backward(loss)
            self.optimizer.step(ctx)
        self.schedule.step()
        return loss.item()


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(number))


def one_process(num_steps: int) -> tuple[nn.Module, list[float]]:
    """The same training without workers: the model and its losses."""
    model = nn.Sequential(make_layer(0), make_layer(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    for number in range(num_steps):
        loss = model(batch(number)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return model, losses


# What workers are told to do.


def die_at(point: str) -> None:
    """From now on, the process that runs this kills itself when a save comes to that point."""

    def hook(passed: str) -> None:
        if passed == point:
            os.kill(os.getpid(), signal.SIGKILL)

    directory.failpoint_hook = hook


def kill_at(point: str, pid: int) -> None:
    """From now on, this worker kills another process when a save comes to that point."""

    def hook(passed: str) -> None:
        if passed == point:
            os.kill(pid, signal.SIGKILL)

    directory.failpoint_hook = hook


def limit_files(num_bytes: int) -> None:
    """No file of this process may grow beyond that: what a full disk looks like. Python ignores the signal."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def make_plain(value: Any) -> Any:
    """A value that stays on the worker."""
    return value


def make_many(num_tensors: int, offset: float = 0.0) -> nn.Module:
    """Many small parameters with different values."""
    return nn.ParameterList([torch.full((1,), number + offset) for number in range(num_tensors)])


def make_tied() -> nn.Module:
    """Two names for one parameter."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


def wait_at(point: str, gate: str) -> None:
    """From now on, a save that comes to that point waits until the test opens the gate and writes."""

    def hook(passed: str) -> None:
        if passed == point:
            with open(gate) as opened:
                opened.read()

    directory.failpoint_hook = hook


def save_there(folder: str, reference: rpc.RRef[torch.Tensor]) -> int:
    """Saves from the worker that runs this."""
    return checkpoint.save(folder, {"x": reference, "step": 1}).num_tensors
