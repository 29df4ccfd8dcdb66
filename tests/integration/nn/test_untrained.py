"""Programs in which remote parameters would stay untrained without any error: there is a warning that says what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.cluster.api import Cluster
from gradwire.nn import RemoteModule
from nn.models import Net, make_input

Call = Callable[[RemoteModule, torch.Tensor], Any]

WAYS: dict[str, Call] = {
    "call": lambda module, x: module(x),
    "keyword": lambda module, x: module(x, factor=2.0),
    "method": lambda module, x: module.first_only(x),
    "rpc_sync": lambda module, x: module.rpc_sync().first_only(x),
    "rpc_async": lambda module, x: module.rpc_async().first_only(x).wait(),
    "forward_async": lambda module, x: module.forward_async(x).wait(),
}


def make_module(cluster: Cluster) -> RemoteModule:
    return cluster.workers[0].module(Net, 4, 3)


# -- backward outside a context ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_local_backward_through_a_result_warns_and_says_what_to_call(cluster: Cluster, way: str) -> None:
    module = make_module(cluster)
    head = nn.Linear(WAYS[way](module, make_input(1)).shape[1], 1, dtype=torch.float64)
    loss = head(WAYS[way](module, make_input(1))).sum()
    with pytest.warns(
        UserWarning, match=r"result of Net on worker0, which was called outside a context.*ctx\.backward\(loss\)"
    ) as caught:
        loss.backward()
    assert [warning.filename for warning in caught] == [__file__]
    assert head.weight.grad is not None


def test_a_pass_of_a_context_warns_of_a_result_from_outside(cluster: Cluster) -> None:
    result = make_module(cluster)(make_input(1))
    with gw.autograd.context() as ctx, pytest.warns(UserWarning, match="was called outside a context"):
        ctx.backward(result.sum())


class Several(nn.Module):
    """Its results come in a container."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"one": (x * self.weight, 7), "rest": [x]}


def test_results_in_containers_are_found(cluster: Cluster) -> None:
    result = cluster.workers[0].module(Several)(make_input(1))
    with pytest.warns(UserWarning, match="result of Several on worker0"):
        result["one"][0].sum().backward()


def test_there_is_no_warning_where_nothing_is_lost(cluster: Cluster) -> None:
    module = make_module(cluster)
    head = nn.Linear(3, 1, dtype=torch.float64)
    with gw.autograd.context() as ctx:
        ctx.backward(head(module(make_input(1))).sum())
    head(module(make_input(1)).detach()).sum().backward()
    with torch.no_grad():
        result = module(make_input(1))
    head(result.detach()).sum().backward()
    module.requires_grad_(False)
    head(module(make_input(1))).sum().backward()


# -- optimizers over parameters() ----------------------------------------------------------------------------------------


def make_outer(module: RemoteModule) -> nn.Sequential:
    return nn.Sequential(module, nn.Tanh(), nn.Linear(3, 2, dtype=torch.float64))


@pytest.mark.parametrize(
    "make",
    [
        lambda outer: torch.optim.SGD(outer.parameters(), lr=0.1),
        lambda outer: torch.optim.Adam([{"params": outer.parameters(), "lr": 0.1}]),
        lambda outer: torch.optim.AdamW(filter(lambda param: param.requires_grad, outer.parameters())),
        lambda outer: torch.optim.SGD(outer.named_parameters(), lr=0.1),
        lambda outer: gw.optim.DistributedOptimizer(torch.optim.SGD, outer.parameters(), lr=0.1),
    ],
    ids=["parameters", "group", "filtered", "named", "distributed"],
)
def test_an_optimizer_over_parameters_of_an_outer_module_warns(
    cluster: Cluster, make: Callable[[nn.Module], Any]
) -> None:
    outer = make_outer(make_module(cluster))
    with pytest.warns(UserWarning, match=r"parameters of Net on worker0 will not be trained.*\[outer\]") as caught:
        make(outer)
    assert [warning.filename for warning in caught] == [__file__]


def test_looking_at_parameters_and_the_right_optimizer_do_not_warn(cluster: Cluster) -> None:
    outer = make_outer(make_module(cluster))
    assert len(list(outer.parameters())) == 2
    assert [name for name, _ in outer.named_parameters()] == ["2.weight", "2.bias"]
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [outer], lr=0.1)
    assert len(optimizer.named_parameters()) == 6
    torch.optim.SGD(outer[2].parameters(), lr=0.1)
    with gw.autograd.context() as ctx:
        ctx.backward(outer(make_input(1)).sum())
        optimizer.step(ctx)


def test_a_handle_that_travelled_warns_as_well(cluster: Cluster) -> None:
    text = cluster.workers[1].call(_train_wrongly, make_module(cluster))
    assert "parameters of Net on worker0 will not be trained" in text


def _train_wrongly(module: RemoteModule) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.optim.SGD(make_outer(module).parameters(), lr=0.1)
    return "\n".join(str(warning.message) for warning in caught)
