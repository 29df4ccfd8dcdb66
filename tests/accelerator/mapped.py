"""Programs for workers with device maps: worker0 is the root, which has maps for all workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire as gw
from accelerator import device
from gradwire.errors import CannotSend

Tensor = torch.Tensor

ZERO, ONE = f"{device.NAME}:0", f"{device.NAME}:1"
MAPS = {
    "worker0": {ZERO: ONE},  # of calls to itself
    "worker1": {ZERO: ONE, ONE: ZERO},
    "worker2": {"cpu": ZERO, ONE: "cpu"},
}


def _values(on: str) -> Tensor:
    return torch.linspace(-1.0, 1.0, 6, dtype=torch.float64).reshape(2, 3).to(on).requires_grad_()


def _device_of(x: Tensor) -> str:
    return str(x.device)


def _double(x: Tensor, expected: str) -> Tensor:
    assert str(x.device) == expected
    return torch.tanh(x * 2)


def _make(on: str) -> Tensor:
    return torch.ones(2, device=on)


def map_arguments() -> None:
    """Tensors arrive on the device that the map says."""
    found = {
        (worker, here): gw.rpc.rpc_sync(worker, _device_of, (torch.ones(2, device=here),))
        for worker, devices in MAPS.items()
        for here in devices
    }
    assert found == {(worker, here): there for worker, devices in MAPS.items() for here, there in devices.items()}
    assert gw.rpc.rpc_sync("worker1", _device_of, (torch.ones(2),)) == "cpu"


def map_results() -> None:
    """Results come back by the reverse of the map, of whatever they were made."""
    for worker, devices in MAPS.items():
        for here, there in devices.items():
            assert str(gw.rpc.rpc_sync(worker, _make, (there,)).device) == here
            assert str(gw.rpc.rpc_async(worker, _make, (there,)).wait().device) == here
            is_own = worker == gw.rpc.get_worker_info().name  # the value of an own reference does not travel
            assert str(gw.rpc.remote(worker, _make, (there,)).to_here().device) == (there if is_own else here)
    by_reference = gw.rpc.remote("worker1", _double, (_values(ZERO), ONE))
    assert str(by_reference.to_here().device) == ZERO
    assert torch.equal(by_reference.to_here().cpu(), torch.tanh(_values("cpu") * 2))


def miss_a_device() -> None:
    """A device that is not in the map cannot be sent, and cannot come back; the connection goes on."""
    with pytest.raises(CannotSend, match=r"Request device mapping is not available|which the device map"):
        gw.rpc.rpc_sync("worker2", _device_of, (torch.ones(2, device=ZERO),))
    with pytest.raises(CannotSend, match=r"Response device mapping is not available|which the device map"):
        gw.rpc.rpc_sync("worker2", _make, (ONE,))
    with pytest.raises(CannotSend, match=r"Response device mapping is not available|which the device map"):
        gw.rpc.remote("worker2", _make, (ONE,)).to_here()
    assert gw.rpc.rpc_sync("worker2", _device_of, (torch.ones(2, device=ONE),)) == "cpu"


def differentiate(worker: str, here: str) -> None:
    """Gradients come back on the device of the tensor that they belong to, and are those of one process."""
    there = MAPS[worker][here]
    alone = _values("cpu")
    torch.tanh(torch.tanh(alone * 2) * 2).sum().backward()  # type: ignore[no-untyped-call]
    x = _values(here)
    with gw.autograd.context() as ctx:
        hidden = gw.rpc.rpc_sync(worker, _double, (x, there))
        assert str(hidden.device) == here
        out = gw.rpc.remote(worker, _double, (hidden, there)).to_here()
        assert out.device.type == (there if worker == "worker0" else here).partition(":")[0]
        ctx.backward(out.sum())
        found = ctx.gradients()[x]
    assert str(found.device) == here
    assert alone.grad is not None
    assert torch.equal(found.cpu(), alone.grad)


def _forward(module: Any, x: Tensor) -> Tensor:
    found: Tensor = module(x)
    return found


def call_a_module() -> None:
    """Results of a module come back by the map, where its caller has one, and to the CPU where it has none."""
    torch.manual_seed(0)
    alone = torch.nn.Linear(3, 2, dtype=torch.float64)
    module = gw.nn.RemoteModule(f"worker1/{ONE}", torch.nn.Linear, (3, 2), {"dtype": torch.float64})
    module.load_state_dict(alone.state_dict())
    assert module.is_device_map_set
    for on in ("cpu", ZERO, ONE):
        x, own = _values(on), _values("cpu")
        with gw.autograd.context() as ctx:
            out = module(x)
            assert str(out.device) == ZERO
            assert torch.allclose(out.cpu(), alone(own))
            assert str(module(input=x).device) == ZERO
            assert str(module.forward_async(x).wait().device) == ZERO
            assert str(module.rpc_sync().forward(x).device) == ZERO
            ctx.backward(out.square().sum())
            (expected,) = torch.autograd.grad(alone(own).square().sum(), [own])
            assert str(ctx.gradients()[x].device) == on
            assert torch.allclose(ctx.gradients()[x].cpu(), expected)
    with torch.no_grad():
        assert gw.rpc.rpc_sync("worker1", _forward, (module, _values("cpu").detach())).device.type == device.NAME
