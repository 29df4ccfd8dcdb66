"""Backward passes through tensors on an accelerator, whose nodes torch runs in threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradwire as gw
from accelerator import device
from gradwire.autograd import ambient, guards, sharing
from gradwire.autograd.api import _retrieve_context
from gradwire.autograd.saving import saving
from gradwire.cluster.api import Cluster
from gradwire.errors import BackwardFailed

Tensor = torch.Tensor
Call = Callable[..., Any]

ZERO, ONE = f"{device.NAME}:0", f"{device.NAME}:1"


def _input(on: str = ZERO) -> Tensor:
    values = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64).reshape(2, 3)
    return values.to(on).requires_grad_()


def _tanh(x: Tensor) -> Tensor:
    assert x.device.type == device.NAME
    return torch.tanh(x * 2)


def _on_the_other(x: Tensor) -> Tensor:
    """Computes on both devices."""
    there = ONE if x.device.index == 0 else ZERO
    return (torch.sin(x.to(there)) * 3).to(x.device) * x


def _here(_: int, function: Call, *args: Tensor) -> Any:
    return function(*args)


def _chain(call: Any, x: Tensor) -> Tensor:
    return call(1, _on_the_other, call(0, _tanh, x)).square().sum()


def _branches(call: Any, x: Tensor) -> Tensor:
    """The results of calls meet here, on both devices; one goes out again, so a run has to wait for it in the middle."""
    first, second = call(0, _tanh, x), call(1, _on_the_other, x)
    joined = first.to(ONE) * second.to(ONE)
    again = call(0, _on_the_other, joined)
    return (again * joined).sum().cpu() + first.sum().cpu()


def _to_the_cpu_and_back(call: Any, x: Tensor) -> Tensor:
    hidden = call(0, torch.tanh, x.cpu())
    return call(1, _on_the_other, hidden.to(ONE)).sum()


@pytest.mark.parametrize("loss_of", [_chain, _branches, _to_the_cpu_and_back])
def test_gradients_are_those_of_one_process(cluster: Cluster, loss_of: Callable[[Any, Tensor], Tensor]) -> None:
    def call(worker: int, function: Call, *args: Tensor) -> Any:
        return cluster.workers[worker].call(function, *args)

    alone = _input()
    loss_of(_here, alone).backward()  # type: ignore[no-untyped-call]
    x = _input()
    with gw.autograd.context() as ctx:
        ctx.backward(loss_of(call, x))
        found = ctx.gradients()[x]
    assert found.device == x.device
    assert alone.grad is not None
    assert torch.equal(found.cpu(), alone.grad.cpu())


def test_several_passes_at_once_keep_their_gradients_apart(cluster: Cluster) -> None:
    """All of them go through the one thread that torch has for the device."""

    def train(number: int) -> None:
        x = _input()
        with gw.autograd.context() as ctx:
            ctx.backward(cluster.workers[number % 2].call(_tanh, x * number).sum())
            found[number] = ctx.gradients()[x].cpu()

    found: dict[int, Tensor] = {}
    threads = [threading.Thread(target=train, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    for number in range(1, 5):
        x = _input("cpu")
        torch.tanh(x * number * 2).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert torch.allclose(found[number], x.grad)


def test_gradients_of_gradients(cluster: Cluster) -> None:
    alone = _input()
    (first,) = torch.autograd.grad(_chain(_here, alone), [alone], create_graph=True)
    first.square().sum().backward()
    x = _input()
    with gw.autograd.context() as ctx:
        loss = _chain(lambda worker, function, *args: cluster.workers[worker].call(function, *args), x)
        (again,) = gw.autograd.grad(ctx, [loss], [x], create_graph=True)
        ctx.backward(again.square().sum())
        found = ctx.gradients()[x]
    assert alone.grad is not None
    assert torch.allclose(found.cpu(), alone.grad.cpu())


def test_a_remote_module_on_a_device_is_trained_as_in_one_process(cluster: Cluster) -> None:
    torch.manual_seed(0)
    alone = torch.nn.Linear(3, 2, dtype=torch.float64)
    module = gw.nn.RemoteModule(f"worker0/{ONE}", torch.nn.Linear, (3, 2), {"dtype": torch.float64})
    module.load_state_dict(alone.state_dict())
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [module], lr=0.1)
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(2):
        with gw.autograd.context() as ctx:
            ctx.backward(module(_input("cpu")).square().sum())
            optimizer.step(ctx)
        sgd.zero_grad()
        alone(_input("cpu")).square().sum().backward()
        sgd.step()
    for name, value in module.state_dict().items():
        assert torch.allclose(value.cpu(), alone.state_dict()[name]), name


# -- what the threads of devices see of the thread that began the run ---------------------------------------------------


class _Probe(torch.autograd.Function):
    """Notes what its backward sees, and where it runs."""

    seen: tuple[int, bool] = (0, False)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _Probe.seen = ambient.current_context_id(), threading.current_thread() is threading.main_thread()
        return gradient


def test_backward_code_in_the_thread_of_a_device_runs_in_the_context(cluster: Cluster) -> None:
    x = _input()
    with gw.autograd.context() as ctx:
        ctx.backward(_Probe.apply(cluster.workers[0].call(_tanh, x)).sum())
        assert _Probe.seen == (ctx, False)
    _Probe.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    assert _Probe.seen == (0, False)


def test_a_recorded_pass_notes_which_shared_parameters_it_uses_on_a_device(cluster: Cluster) -> None:
    """A step of another context must know that their values are needed."""
    weight, x = torch.nn.Parameter(_input().detach()), _input()
    sharing.guard([weight], "snapshot")
    loss = torch.tanh(weight * x).sum()
    with gw.autograd.context() as ctx:
        with saving(_retrieve_context(ctx)):
            torch.autograd.grad(loss, [x], create_graph=True)
        guarded = guards.find(weight)
        assert guarded is not None
        assert [user() for user in guarded.users] == [_retrieve_context(ctx)]


class _Broken(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("on purpose")


def _break(x: Tensor) -> Tensor:
    return _Broken.apply(x) * 2  # type: ignore[no-any-return]


def test_anomaly_mode_shows_where_the_forward_was_called(cluster: Cluster) -> None:
    with (
        pytest.warns(UserWarning, match="Anomaly Detection"),
        torch.autograd.detect_anomaly(),
        gw.autograd.context() as ctx,
        pytest.raises(BackwardFailed, match=r"on purpose(?s:.)*in _break"),
    ):
        ctx.backward(cluster.workers[0].call(_break, _input()).sum())


def test_backward_without_a_context_says_what_to_call(cluster: Cluster) -> None:
    x = _input()
    with gw.autograd.context(), pytest.raises(Exception, match=r"use gradwire.autograd.backward"):
        cluster.workers[0].call(_tanh, x).sum().backward()
