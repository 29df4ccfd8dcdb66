"""What the autograd cases compute: models that live where they are first used, and the same without any calls.

The functions are called on servers, and by `OneProcess` in the driver itself.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

SIZES = {"mlp": (8, 1024), "branch": (4, 512), "layer": (1, 256), "ten million": (10, 1000)}  # number of layers, width
LEARNING_RATE = 1e-3
FACTOR = torch.arange(16.0).view(4, 4).requires_grad_()


@functools.cache
def model(name: str) -> nn.Sequential:
    """The model of that name in this process; equal in all processes until it is trained."""
    num_layers, width = SIZES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [layer for _ in range(num_layers) for layer in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*layers[:-1])


def apply_model(name: str, x: Tensor) -> Tensor:
    """Runs the model that lives here."""
    return model(name)(x)


def affine(x: Tensor) -> Tensor:
    """Next to nothing, but not the same."""
    return x * 0.9 + 0.1


def first_values(name: str) -> Tensor:
    """A few values of each parameter that lives here."""
    return torch.stack([parameter.detach().flatten()[:8] for parameter in model(name).parameters()])


def parameter_references(rpc_module: str, name: str) -> list[Any]:
    """References to the parameters that live here."""
    rpc = importlib.import_module(rpc_module)
    return [rpc.RRef(parameter) for parameter in model(name).parameters()]


@functools.cache
def optimizer_for(peer: Any, name: str, servers: tuple[str, ...] = ("server",), momentum: float = 0.0) -> Any:
    """The system's distributed optimizer of that model; made once, because its state is on the servers."""
    if hasattr(peer.rpc, "make_optimizer"):
        assert servers == ("server",)
        assert momentum == 0.0
        return peer.rpc.make_optimizer(name)
    parameters = [
        parameter
        for server in servers
        for parameter in peer.rpc.rpc_sync(server, parameter_references, args=(peer.module, name))
    ]
    optim = importlib.import_module(peer.module.removesuffix("rpc") + "optim")
    return optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=LEARNING_RATE, momentum=momentum)


class OneProcess:
    """The measure for the cost of calls: the same work by the driver alone."""

    servers = ()

    def __init__(self) -> None:
        self.rpc = self.autograd = self  # has the few names of either module that the cases use

    def start(self) -> None:
        torch.set_num_threads(1)

    def rpc_sync(self, _to: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return function(*args)

    def rpc_async(self, _to: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        future = torch.futures.Future[Any]()
        future.set_result(function(*args))
        return future

    @contextlib.contextmanager
    def context(self) -> Iterator[int]:
        yield 0
        for name in SIZES:
            model(name).zero_grad()  # a new context has no gradients either

    def backward(self, _context_id: int, roots: list[Tensor]) -> None:
        torch.autograd.backward(roots)

    def close(self) -> None:
        """Nothing is open."""
