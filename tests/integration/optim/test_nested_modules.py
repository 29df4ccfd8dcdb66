"""Modules with tied weights, and remote modules inside others: every parameter is trained, and once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire import optim
from gradwire.cluster.api import Cluster
from gradwire.errors import ConfigurationError, OptimizerNotMade

SGD = torch.optim.SGD
X = torch.arange(6.0).view(2, 3) / 6


class Tied(nn.Module):
    """Two layers with one weight, and one of them there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.again = nn.Sequential(self.second)
        for number, parameter in enumerate(self.parameters()):
            nn.init.constant_(parameter, 0.1 + number / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Outer(nn.Module):
    """A layer after another module, which may be anywhere; the module is there twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.last = nn.Linear(3, 1)
        self.same = inner
        for parameter in self.last.parameters():
            nn.init.constant_(parameter, 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x))


def train_here(module: nn.Module, num_steps: int = 3) -> dict[str, torch.Tensor]:
    optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(num_steps):
        optimizer.zero_grad()
        module(X).square().sum().backward()
        optimizer.step()
    return module.state_dict()


def train_there(module: nn.Module, optimizer: Any, num_steps: int = 3) -> dict[str, torch.Tensor]:
    for _ in range(num_steps):
        with gw.autograd.context() as ctx:
            ctx.backward(module(X).square().sum())
            optimizer.step(ctx)
    return module.state_dict()


def assert_trained(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(actual) == list(expected)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def names_of(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


@pytest.mark.parametrize("place", ["here", "there"])
def test_tied_weights_are_one_parameter(cluster: Cluster, place: str) -> None:
    module = Tied() if place == "here" else cluster.workers[0].module(Tied)
    optimizer = optim.DistributedOptimizer(SGD, [module], lr=0.1, momentum=0.9)
    assert [name for name, _ in optimizer.named_parameters()] == names_of(Tied())
    assert_trained(train_there(module, optimizer), train_here(Tied()))


def test_what_is_given_twice_is_still_an_error(cluster: Cluster) -> None:
    tied = Tied()
    for params in ([tied, tied], [tied.first, tied.second], [*tied.parameters(), tied.first.weight]):
        with pytest.raises(OptimizerNotMade, match="appear more than once"):
            optim.DistributedOptimizer(SGD, params, lr=0.1)


@pytest.mark.parametrize("place", ["here", "there"])
def test_a_remote_module_inside_of_another_is_trained(cluster: Cluster, place: str) -> None:
    inner = cluster.workers[0].module(Tied)
    outer = Outer(inner) if place == "here" else cluster.workers[1].module(Outer, inner)
    optimizer = optim.DistributedOptimizer(SGD, [outer], lr=0.1, momentum=0.9)
    assert [name for name, _ in optimizer.named_parameters()] == names_of(Outer(Tied()))
    expected = train_here(Outer(Tied()))
    assert_trained(train_there(outer, optimizer), expected)
    with pytest.raises(OptimizerNotMade, match="appear more than once"):
        optim.DistributedOptimizer(SGD, [outer, inner], lr=0.1)


def test_a_module_of_a_worker_around_one_of_another_around_one_of_the_first(cluster: Cluster) -> None:
    inner = cluster.workers[1].module(Outer, cluster.workers[0].module(Tied))
    outer = cluster.workers[0].module(nn.Sequential, inner)
    here = nn.Sequential(Outer(Tied()))
    assert [name for name, _ in outer.named_remote_parameters()] == names_of(here)
    assert [rref.owner_name() for rref in outer.remote_parameters()] == ["worker0"] * 3 + ["worker1"] * 2
    assert outer.remote_parameters(recurse=False) == []
    optimizer = optim.DistributedOptimizer(SGD, outer.remote_parameters(), lr=0.1, momentum=0.9)
    assert_trained(train_there(outer, optimizer), train_here(here))


def test_a_group_that_is_in_no_list(cluster: Cluster) -> None:
    with pytest.raises(ConfigurationError, match="put the group in a list"):
        optim.DistributedOptimizer(SGD, {"params": [Tied()]}, lr=0.1)
