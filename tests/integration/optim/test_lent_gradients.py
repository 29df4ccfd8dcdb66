"""Gradients that a step lends to parameters: nobody takes them away meanwhile, and the step leaves the context's alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire import optim
from gradwire.cluster.api import Cluster
from gradwire.nn import RemoteModule

SGD = torch.optim.SGD
X = torch.arange(6.0).view(2, 3)


class Disturbed(SGD):
    """While it steps, another thread does something to the parameters."""

    disturb: Callable[[], Any]

    def step(self, closure: Any = None) -> Any:
        other = threading.Thread(target=type(self).disturb, name="disturber")
        other.start()
        other.join(0.3)  # it must wait for this step, so this is how long it has tried to
        try:
            return super().step(closure)
        finally:
            threads.append(other)


threads: list[threading.Thread] = []


def make_linear() -> nn.Linear:
    made = nn.Linear(3, 1, bias=False)
    nn.init.constant_(made.weight, 0.5)
    return made


def expected(**options: Any) -> torch.Tensor:
    here = make_linear()
    here(X).sum().backward()
    SGD(here.parameters(), **options).step()
    return here.weight.detach()


@pytest.mark.parametrize("way", ["optimizer", "optimizer in place", "module"])
def test_clearing_waits_for_the_step_of_another_trainer(cluster: Cluster, way: str) -> None:
    module = RemoteModule("driver", make_linear)
    mine = optim.DistributedOptimizer(Disturbed, [module], lr=0.25)
    others = optim.DistributedOptimizer(SGD, [module], lr=1.0)
    Disturbed.disturb = {
        "optimizer": others.zero_grad,
        "optimizer in place": lambda: others.zero_grad(set_to_none=False),
        "module": module.zero_grad,
    }[way]
    with gw.autograd.context() as ctx:
        ctx.backward(module(X).sum())
        mine.step(ctx)
    threads[-1].join(10)
    assert not threads.pop().is_alive()
    assert torch.equal(module.state_dict()["weight"], expected(lr=0.25))


class Halving(SGD):
    """Changes the gradients that it is lent."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)
        return super().step(closure)


def test_a_class_that_changes_gradients_changes_none_of_the_context(cluster: Cluster) -> None:
    module = RemoteModule("driver", make_linear)
    optimizer = optim.DistributedOptimizer(Halving, [module], lr=0.5)
    with gw.autograd.context() as ctx:
        ctx.backward(module(X).sum())
        (before,) = [gradient.clone() for gradient in ctx.gradients().values()]
        optimizer.step(ctx)
        (after,) = ctx.gradients().values()
        assert torch.equal(after, before)
    assert torch.equal(module.state_dict()["weight"], expected(lr=0.25))
