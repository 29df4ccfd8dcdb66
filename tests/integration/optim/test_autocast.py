"""Autocast travels with calls."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.cluster.api import Cluster
from optim.programs import make_values


def state() -> tuple[bool, str, bool]:
    return torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu")), torch.is_autocast_cache_enabled()


def state_two_hops_away(name: str) -> tuple[bool, str, bool]:
    found: tuple[bool, str, bool] = rpc.rpc_sync(name, state)
    return found


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_callee_runs_under_the_callers_autocast(cluster: Cluster, dtype: torch.dtype) -> None:
    before = cluster.workers[0].call(state)
    with torch.autocast("cpu", dtype, cache_enabled=False):
        assert cluster.workers[0].call(state) == (True, str(dtype), False)
        assert cluster.workers[0].call(state_two_hops_away, "worker1") == (True, str(dtype), False)
        assert rpc.rpc_sync("driver", state) == (True, str(dtype), False)
        assert rpc.remote("worker0", state).to_here() == (True, str(dtype), False)
        with torch.autocast("cpu", enabled=False):
            assert not cluster.workers[0].call(state)[0]
    assert cluster.workers[0].call(state) == before
    assert not before[0]


def test_gradients_under_autocast(cluster: Cluster) -> None:
    x, y = make_values(1).requires_grad_(), make_values(2).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        expected = product(x, y)
    wanted = torch.autograd.grad(expected.float().sum(), [x, y])
    with gw.autograd.context() as ctx:
        with torch.autocast("cpu", torch.bfloat16):
            found = cluster.workers[0].call(product, x, y)
        ctx.backward(found.float().sum())
        gradients = ctx.gradients()
    assert torch.equal(found, expected)
    assert torch.equal(gradients[x], wanted[0])
    assert torch.equal(gradients[y], wanted[1])
