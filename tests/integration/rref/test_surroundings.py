"""Values that functions make later, inside what the layers above put around calls."""

from __future__ import annotations

import contextlib

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.cluster.api import Cluster


@rpc.functions.async_execution
def later(x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(x * 2)
    return future


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_value_that_is_made_later(cluster: Cluster, is_inside: bool) -> None:
    with contextlib.ExitStack() as stack:
        if is_inside:
            stack.enter_context(gw.autograd.context())
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        made = rpc.remote("worker0", later, (torch.ones(2),))
        assert torch.equal(made.to_here(), torch.full((2,), 2.0))
