"""Modules that the tests make on workers, what they call there, and what must come out: the same in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

import gradwire as gw
from gradwire import rpc
from gradwire.nn import RemoteModule
from gradwire.params import snapshots
from gradwire.rref import context as rref_context

Gradients = dict[str, torch.Tensor]


class Net(nn.Module):
    """Two layers of known weights, with a buffer and methods of its own."""

    def __init__(self, num_in: int, num_out: int, seed: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(num_in, 8, dtype=torch.float64)
        self.second = nn.Linear(8, num_out, dtype=torch.float64)
        self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))
        numbers = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.rand(param.shape, generator=numbers, dtype=torch.float64) - 0.5)

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale * factor

    def shapes(self) -> list[tuple[int, ...]]:
        """A method that `nn.Module` does not have."""
        return [tuple(param.shape) for param in self.parameters()]

    def first_only(self, x: torch.Tensor, *, sign: int = 1) -> torch.Tensor:
        """Another way through it."""
        return self.first(x) * sign

    def fail(self) -> None:
        raise LookupError("not today")


class Seen(nn.Module):
    """One layer that also says which weights it saw."""

    def __init__(self, num_in: int = 4, num_out: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(num_in * num_out, dtype=torch.float64).view(num_in, num_out) / 10 - 0.4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(x @ self.weight), self.weight.detach().clone()


def make_input(seed: int, rows: int = 3, columns: int = 4) -> torch.Tensor:
    """Numbers that depend on the seed alone."""
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1


def mode_on_owner(rref: Any) -> bool:
    return bool(rref.local_value().training)


def gradients_on_owner(module_rref: Any, context_id: int) -> Gradients:
    """What a context holds for a module, by name."""
    found = gw.autograd.get_gradients(context_id)
    return {name: found[param] for name, param in module_rref.local_value().named_parameters() if param in found}


def gradients_of(module: RemoteModule, context_id: int) -> Gradients:
    """The same, asked from elsewhere."""
    with torch.no_grad():
        return rpc.rpc_sync(module.module_rref.owner(), gradients_on_owner, args=(module.module_rref, context_id))


_steps: list[Any] = []
_lock = threading.Lock()  # guards _steps


def step_on_owner(module_rref: Any, context_ids: Sequence[int], rate: float, label: Any = None) -> Gradients:
    """Gradient descent with the gradients of some contexts, as an optimizer does it; notes the order of steps."""
    module = module_rref.local_value()
    params = dict(module.named_parameters())
    tables = [gw.autograd.get_gradients(context_id) for context_id in context_ids]
    total = {
        name: sum(table[param] for table in tables if param in table)
        for name, param in params.items()
        if any(param in table for table in tables)
    }
    with snapshots.stepping(params.values(), context_ids), torch.no_grad():
        for name, gradient in total.items():
            params[name].sub_(gradient, alpha=rate)
        with _lock:
            _steps.append(label)
    return total


def step(module: RemoteModule, context_id: int, rate: float = 0.1, label: Any = None) -> Gradients:
    """A step on the owner; returns the gradients it used."""
    with torch.no_grad():
        args = (module.module_rref, [int(context_id)], rate, label)
        return rpc.rpc_sync(module.module_rref.owner(), step_on_owner, args=args)


def take_steps() -> list[Any]:
    """The order of steps on this worker since the last time."""
    with _lock:
        taken = list(_steps)
        _steps.clear()
    return taken


def weights_of(module: RemoteModule) -> Gradients:
    """A copy of the weights."""
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def count_left() -> int:
    """Contexts and references of this worker."""
    numbers = rref_context.here().statistics()
    contexts = int(gw.autograd._get_debug_info()["num_autograd_contexts"])
    return contexts + numbers.num_values + numbers.num_forks + numbers.num_children


def num_left(workers: Iterable[Any]) -> int:
    """Contexts and references of these workers, and here."""
    return count_left() + sum(worker.call(count_left) for worker in workers)
