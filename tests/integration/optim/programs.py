"""One program, run with its parameters on several workers and with all of them in one process.

Parameters are a matrix on each worker; the program multiplies its way through them. `Distributed` and `OneProcess` offer the
same few things, so a test trains both and compares the parameters bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import gradwire as gw
from gradwire import rpc
from gradwire.rpc import RRef

WIDTH = 4
DRIVER = "driver"


def make_values(seed: int, *shape: int) -> torch.Tensor:
    """Numbers that depend on the seed alone."""
    return torch.randn(*(shape or (WIDTH, WIDTH)), generator=torch.Generator().manual_seed(seed))


def make_weight(seed: int, kind: str = "dense") -> torch.nn.Parameter:
    """A parameter; the same wherever it is made."""
    return torch.nn.Parameter(make_values(seed))


def layer(weight: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """What one worker does in the program; with ``sparse``, its gradient is sparse."""
    if kind == "sparse":
        rows = torch.nn.functional.embedding(torch.tensor([0, 2, 2, 1]), weight, sparse=True)
        return torch.tanh(x @ rows)
    return torch.tanh(x @ weight)


def layer_there(weight: RRef[torch.Tensor], x: torch.Tensor, kind: str) -> torch.Tensor:
    return layer(weight.local_value(), x, kind)


def read(weight: RRef[torch.Tensor]) -> torch.Tensor:
    return weight.local_value().detach().clone()


class OneProcess:
    """The oracle: all parameters here, a plain optimizer."""

    def __init__(self, seeds: Sequence[int], kind: str = "dense") -> None:
        self.kind = kind
        self.parameters: list[Any] = [make_weight(seed, kind) for seed in seeds]
        self.optimizer: Any = None

    def make_optimizer(self, make: Callable[[Any, list[Any]], Any]) -> None:
        self.optimizer = make(None, self.parameters)

    def loss(self, x: torch.Tensor, used: Sequence[int] | None = None) -> torch.Tensor:
        for number in used if used is not None else range(len(self.parameters)):
            x = layer(self.parameters[number], x, self.kind)
        return x.square().sum()

    def step(self, *batches: torch.Tensor, used: Sequence[int] | None = None) -> float:
        self.optimizer.zero_grad()
        for batch in batches:
            loss = self.loss(batch, used)
            loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]


class Distributed(OneProcess):
    """The same with parameters on workers: the first on the first worker, and so on in turn; the last on the driver."""

    def __init__(self, seeds: Sequence[int], workers: Sequence[Any], kind: str = "dense") -> None:
        self.kind = kind
        names = [worker.name for worker in workers]
        places = [names[number % len(names)] for number in range(len(seeds) - 1)]
        self.parameters = [
            rpc.remote(place, make_weight, (seed, kind)) for place, seed in zip(places, seeds, strict=False)
        ]
        self.parameters.append(RRef(make_weight(seeds[-1], kind)))
        self.optimizer: Any = None

    def make_optimizer(self, make: Callable[[Any, list[Any]], Any]) -> None:
        self.optimizer = make(gw.optim.DistributedOptimizer, self.parameters)

    def loss(self, x: torch.Tensor, used: Sequence[int] | None = None) -> torch.Tensor:
        for number in used if used is not None else range(len(self.parameters)):
            weight = self.parameters[number]
            if weight.is_owner():
                x = layer_there(weight, x, self.kind)
            else:
                x = rpc.rpc_sync(weight.owner(), layer_there, (weight, x, self.kind))
        return x.square().sum()

    def step(self, *batches: torch.Tensor, used: Sequence[int] | None = None) -> float:
        return self.in_contexts(batches, self.optimizer.step, used)

    def in_contexts(
        self, batches: Sequence[torch.Tensor], act: Callable[[Any], Any], used: Sequence[int] | None = None
    ) -> float:
        """Forward and backward of each batch in a context of its own, all open; then acts on these."""
        open_contexts = [gw.autograd.context() for _ in batches]
        ids = []
        for batch, context in zip(batches, open_contexts, strict=True):
            ids.append(context.__enter__())
            loss = self.loss(batch, used)
            ids[-1].backward(loss, timeout=30.0)
        try:
            act(ids[0] if len(ids) == 1 else ids)
        finally:
            for context in reversed(open_contexts):
                context.__exit__(None, None, None)
        return float(loss.detach())

    def values(self) -> list[torch.Tensor]:
        return [
            read(weight) if weight.is_owner() else rpc.rpc_sync(weight.owner(), read, (weight,))
            for weight in self.parameters
        ]


def make(optimizer_class: type[Any], /, *args: Any, **kwargs: Any) -> Callable[[Any, list[Any]], Any]:
    """Makes the same optimizer in both worlds."""
    return functools.partial(_make, optimizer_class, args, kwargs)


def _make(
    optimizer_class: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any], distributed: Any, parameters: list[Any]
) -> Any:
    if distributed is None:
        return optimizer_class(parameters, *args, **kwargs)
    return distributed(optimizer_class, parameters, *args, **kwargs)


def batches(number: int) -> torch.Tensor:
    """The input of a step."""
    return make_values(1000 + number)


def assert_same(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Equal to the last bit."""
    assert len(actual) == len(expected)
    for number, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(got, want), f"parameter {number}: {(got - want).abs().max()} apart"
