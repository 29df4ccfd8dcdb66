"""Ctrl-C reaches code of the user that an optimizer calls, and not the optimizer itself."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gradwire import _interrupts, autograd
from gradwire.optim import DistributedOptimizer
from gradwire.rpc import Agent, set_current_agent
from gradwire.testing import wait_until


@pytest.fixture
def handler(make_agents: Callable[..., list[Agent]]) -> Iterator[None]:
    """This process has a worker, and Ctrl-C is deferred while the main thread is in gradwire's code."""
    (agent,) = make_agents(1)
    set_current_agent(agent)
    _interrupts.install()
    yield
    _interrupts.uninstall()
    set_current_agent(None)


class Interrupted:
    """Presses Ctrl-C when it is called; notes whether it went on."""

    def __init__(self) -> None:
        self.went_on = False

    def __call__(self, *_: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        self.went_on = True


class Own(torch.optim.SGD):
    """An optimizer of the user's."""

    press = Interrupted()

    def step(self, closure: Any = None) -> Any:
        type(self).press()


def step(optimizer: DistributedOptimizer, weight: torch.Tensor) -> None:
    with autograd.context() as ctx:
        ctx.backward(weight.sum())
        optimizer.step(ctx)


def run(action: Callable[[], Any]) -> None:
    """Run it, and wait for a Ctrl-C that was deferred, so that it is raised here in any case."""
    action()
    wait_until(lambda: False, what="a Ctrl-C that was deferred")


@pytest.mark.parametrize("kind", ["step_pre", "step_post", "state_dict_pre", "state_dict_post"])
def test_hooks_are_interrupted_at_once(handler: None, kind: str) -> None:
    weight, press = torch.nn.Parameter(torch.ones(2)), Interrupted()
    optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.1)
    getattr(optimizer, f"register_{kind}_hook")(press)
    with pytest.raises(KeyboardInterrupt):
        run((lambda: step(optimizer, weight)) if kind.startswith("step") else optimizer.state_dict)
    assert not press.went_on


def test_an_optimizer_of_the_user_s_is_interrupted_at_once(handler: None) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = DistributedOptimizer(Own, [weight], lr=0.1)
    with pytest.raises(KeyboardInterrupt):
        run(lambda: step(optimizer, weight))
    assert not Own.press.went_on
    assert weight.grad is None, "gradients that a step lends are taken back"
