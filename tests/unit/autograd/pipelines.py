"""One call after the other, the ways that gradients take back, and what they must be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradwire import rpc
from gradwire.autograd.messages import PropagateGradients
from gradwire.rpc import Agent
from gradwire.rpc.oneway import Notices
from unit.autograd import layers
from unit.autograd.layers import context_of, layer

Letter = tuple[str, str, PropagateGradients]
"""Gradients on their way: from whom, to whom, and the message."""


def note_letters(monkeypatch: pytest.MonkeyPatch) -> list[Letter]:
    """Notes what workers of this process send each other."""
    sent: list[Letter] = []
    send = Notices.send

    def note_and_send(self: Notices, to: str, name: str, note: Any, *args: Any, **options: Any) -> Any:
        if name == "autograd.propagate":
            sent.append((self._agent.info.name, to, note))
        return send(self, to, name, note, *args, **options)

    monkeypatch.setattr(Notices, "send", note_and_send)
    return sent


def ways_of_gradients(letters: list[Letter]) -> list[str]:
    return [f"{sender}{to}" for sender, to, note in letters if any(item.defined for item in note.items)]


def expected(num_layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of input and weight in one process."""
    x, weight = torch.ones(3, requires_grad=True), layers.weight.detach().clone().requires_grad_()
    value = x
    for _ in range(num_layers):
        value = torch.tanh(value * weight)
    found = torch.autograd.grad(value.sum(), (x, weight))
    return found[0], found[1]


def compare(agents: list[Agent], ctx: Any, x: torch.Tensor, num_layers: int) -> None:
    of_x, of_weight = expected(num_layers)
    assert torch.allclose(ctx.gradients()[x], of_x)
    tables = [context_of(agent, ctx).wait_gradients(20.0) for agent in agents]
    assert torch.allclose(torch.stack([table[layers.weight] for table in tables]).sum(0), of_weight)


def call_in_turn(way: str, x: torch.Tensor) -> torch.Tensor:
    for name in way:
        x = rpc.rpc_sync(name, layer, args=(x,))
    return x
