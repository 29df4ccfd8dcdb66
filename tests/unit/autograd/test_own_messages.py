"""A worker that calls itself: gradients come back as from anybody else."""

from __future__ import annotations

import torch

import gradwire as gw
from gradwire import rpc
from gradwire.rpc import Agent


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def test_gradients_of_two_leaves_share_no_memory(trio: list[Agent]) -> None:
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    with gw.autograd.context() as ctx:
        ctx.backward(rpc.rpc_sync("a", add, args=(x, y)).sum())
        gradients = ctx.gradients()
        gradients[x].mul_(2)
        assert gradients[x].tolist() == [2.0] * 3
        assert gradients[y].tolist() == [1.0] * 3


def test_gradient_given_for_a_root_is_left_alone(trio: list[Agent]) -> None:
    x, given = torch.ones(3, requires_grad=True), torch.ones(3)
    with gw.autograd.context() as ctx:
        gw.autograd.backward(ctx, [rpc.rpc_sync("a", add, args=(x, torch.zeros(3)))], gradients=[given])
        ctx.gradients()[x].mul_(2)
        assert given.tolist() == [1.0] * 3


def test_sparse_gradients(trio: list[Agent]) -> None:
    weight = torch.ones(4, 2, requires_grad=True)
    with gw.autograd.context() as ctx:
        ctx.backward(rpc.rpc_sync("a", look_up, args=(weight,)).sum())
        gradient = ctx.gradients()[weight]
        assert gradient.is_sparse
        assert gradient.to_dense().tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]


def look_up(weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(torch.tensor([1, 3]), weight, sparse=True)
