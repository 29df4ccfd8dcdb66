"""Programs for workers with an accelerator: the first one is the root, and calls the others.

An assertion that fails on a worker is the `AssertionError` of the driver's call, so it fails the test there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradwire as gw
from accelerator import device
from gradwire.autograd import current_context as ambient
from gradwire.autograd.api import _retrieve_context
from gradwire.errors import BackwardFailed
from gradwire.params import rwlock as guards
from gradwire.params import snapshots as sharing
from gradwire.params.snapshots import saving

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


def call(worker: int, function: Call, *args: Tensor) -> Any:
    """Calls one of the two workers that are not the root."""
    return gw.rpc.rpc_sync(f"worker{worker + 1}", function, args=args)


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


LOSSES = {"chain": _chain, "branches": _branches, "to the CPU and back": _to_the_cpu_and_back}


def differentiate(name: str) -> None:
    """Compares the gradients of a loss with those of one process."""
    alone = _input()
    LOSSES[name](_here, alone).backward()  # type: ignore[no-untyped-call]
    x = _input()
    with gw.autograd.context() as ctx:
        ctx.backward(LOSSES[name](call, x))
        found = ctx.gradients()[x]
    assert found.device == x.device
    assert alone.grad is not None
    assert torch.equal(found.cpu(), alone.grad.cpu())


def run_several_passes_at_once() -> None:
    """All of them compute on the same device."""

    def train(number: int) -> None:
        x = _input()
        with gw.autograd.context() as ctx:
            ctx.backward(call(number % 2, _tanh, x * number).sum())
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


def differentiate_twice() -> None:
    """Compares gradients of gradients with those of one process."""
    alone = _input()
    (first,) = torch.autograd.grad(_chain(_here, alone), [alone], create_graph=True)
    first.square().sum().backward()
    x = _input()
    with gw.autograd.context() as ctx:
        loss = _chain(call, x)
        (again,) = gw.autograd.grad(ctx, [loss], [x], create_graph=True)
        ctx.backward(again.square().sum())
        found = ctx.gradients()[x]
    assert alone.grad is not None
    assert torch.allclose(found.cpu(), alone.grad.cpu())


def train_a_remote_module() -> None:
    """Compares the weights of a module on a device with those of one that is trained here."""
    torch.manual_seed(0)
    alone = torch.nn.Linear(3, 2, dtype=torch.float64)
    module = gw.nn.RemoteModule(f"worker1/{ONE}", torch.nn.Linear, (3, 2), {"dtype": torch.float64})
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


def run_a_pass_in_a_hook() -> None:
    """A hook on a received tensor runs in the device's thread, and calls backward there."""
    found: list[Tensor] = []

    def run_another(_: Tensor) -> None:
        y = _input()
        with torch.enable_grad(), gw.autograd.context() as other:
            other.backward(call(1, _tanh, y).sum(), timeout=30.0)
            found.append(other.gradients()[y])

    x = _input()
    with gw.autograd.context() as ctx:
        hidden = call(0, _tanh, x)
        hidden.register_hook(run_another)
        ctx.backward(hidden.sum(), timeout=30.0)
        found.append(ctx.gradients()[x])
    assert torch.equal(found[0].cpu(), found[1].cpu())


def hook_an_accumulator() -> None:
    """A hook on the node that accumulates the gradient of a leaf on a device runs once."""
    seen: list[Tensor] = []
    x = _input()
    node = torch.autograd.graph.get_gradient_edge(x).node
    node.register_hook(lambda _, gradients: seen.append(gradients[0].cpu()))
    with gw.autograd.context() as ctx:
        ctx.backward(call(0, _tanh, x).sum())
        assert torch.equal(ctx.gradients()[x].cpu(), seen[0])
    assert len(seen) == 1
    assert x.grad is None


# -- what the code of backward sees -------------------------------------------------------------------------------------


class _Probe(torch.autograd.Function):
    """Notes what its backward sees, and where it runs."""

    seen = (0, False, 0)  # the context, whether that is the thread that began the run, and the current device
    root = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        is_root = threading.get_ident() == _Probe.root
        _Probe.seen = ambient.current_context_id(), is_root, torch.accelerator.current_device_index()
        return gradient


def look_at_the_context() -> None:
    """Code of a pass runs in the thread that began it, and as elsewhere in torch on the device of its gradient.

    A local backward still uses the threads of devices, afterwards, too.
    """
    x, _Probe.root = _input(ONE), threading.get_ident()
    with gw.autograd.context() as ctx:
        ctx.backward(_Probe.apply(call(0, _tanh, x)).sum())
        assert _Probe.seen == (ctx, True, 1)
    _Probe.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    assert _Probe.seen == (0, False, 1)


def record_what_is_used() -> None:
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


def detect_an_anomaly() -> None:
    """What torch says about a failure in a thread of a device becomes part of the error."""
    with (
        pytest.warns(UserWarning, match="Anomaly Detection"),
        torch.autograd.detect_anomaly(),
        gw.autograd.context() as ctx,
        pytest.raises(BackwardFailed, match=r"on purpose(?s:.)*in _break"),
    ):
        ctx.backward(call(0, _break, _input()).sum())


def forget_the_context() -> None:
    """A local backward that reaches a received tensor says what to call instead."""
    x = _input()
    with gw.autograd.context(), pytest.raises(Exception, match=r"use gradwire.autograd.backward"):
        call(0, _tanh, x).sum().backward()
