"""Functions that the tests call on workers of one process, and what they wait for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradwire.autograd.backward_pass import BackwardPass
from gradwire.autograd.context import DistAutogradContext
from gradwire.autograd.current_context import current_context
from gradwire.autograd.engine import DistEngine
from gradwire.rpc import Agent
from gradwire.rpc.connection import current_request

entered, gate = threading.Event(), threading.Event()
weight = torch.nn.Parameter(torch.tensor([0.5, -0.25, 0.125]))
"""A leaf that all workers of the process share, each with a gradient of its own."""


def here() -> Agent:
    """The worker whose call this thread serves."""
    request = current_request()
    assert request is not None
    agent: Agent = request.source.server.agent
    return agent


def layer(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * weight)


def through(x: torch.Tensor, way: list[str]) -> torch.Tensor:
    """A layer here, then one on each worker of the way, nested."""
    value = layer(x)
    if way:
        value = here().call(way[0], through, (value, way[1:]))
    return value


def from_elsewhere(x: torch.Tensor, name: str, function: Callable[..., Any]) -> torch.Tensor:
    """Adds what a third worker makes of the same numbers; no gradient comes back from there to here."""
    value: torch.Tensor = here().call(name, function, (x.detach(),))
    return layer(x) + value


class Held(torch.autograd.Function):
    """Its backward waits until the test opens the gate."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        entered.set()
        assert gate.wait(20)
        return gradient


def held_layer(x: torch.Tensor) -> torch.Tensor:
    entered.clear()
    gate.clear()
    result: torch.Tensor = Held.apply(layer(x))  # type: ignore[no-untyped-call]
    return result


@contextlib.contextmanager
def inside(context_id: int) -> Iterator[None]:
    """Run a block in a context."""
    token = current_context.set(context_id)
    try:
        yield
    finally:
        current_context.reset(token)


def engine_of(agent: Agent) -> DistEngine:
    """The distributed autograd of a worker."""
    found: DistEngine = agent.extensions["autograd"]
    return found


def pass_of(agent: Agent, context_id: int) -> BackwardPass:
    """The one pass that is under way in a context on a worker."""
    (current,) = context_of(agent, context_id).passes.values()
    return current


def context_of(agent: Agent, context_id: int) -> DistAutogradContext:
    """The context as a worker has it."""
    return engine_of(agent).container.retrieve(context_id)


def num_contexts(agents: list[Agent]) -> int:
    """Contexts alive on these workers."""
    return sum(len(engine_of(agent).container) for agent in agents)
