"""Remote modules on a device: where their arguments and results go; autocast, random numbers, compiled modules, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from accelerator import device, training
from gradwire.cluster.api import Cluster

DEVICE = training.ONE


def test_a_caller_without_the_device_moves_nothing_itself(cluster: Cluster) -> None:
    alone = training.make_branches()
    module = gw.nn.RemoteModule(f"worker1/{DEVICE}", training.make_branches)
    x, own = training.values(), training.values()
    expected, (tanh, more) = alone({"x": own}, scale=torch.tensor(2.0))
    with gw.autograd.context() as ctx:
        out, (second, third) = module({"x": x}, scale=torch.tensor(2.0))
        assert {item.device.type for item in (out, second, third["sum"])} == {"cpu"}
        assert torch.allclose(second, tanh)
        assert third["name"] == "branches"
        encoded = module.encode(x)
        assert encoded.device.type == "cpu"
        assert torch.allclose(encoded, alone.encode(own))
        ctx.backward((out * encoded).sum() + third["sum"])
        (expected * alone.encode(own)).sum().add(more["sum"]).backward()
        assert own.grad is not None
        assert torch.allclose(ctx.gradients()[x], own.grad)


def test_state_comes_to_a_caller_without_the_device_and_goes_back(cluster: Cluster) -> None:
    module = gw.nn.RemoteModule(f"worker1/{DEVICE}", training.make_branches)
    state = module.state_dict()
    assert {item.device.type for item in state.values()} == {"cpu"}
    assert {item.device.type for _, item in module.named_parameters()} == {"cpu"}
    module.load_state_dict({key: item + 1 for key, item in state.items()})
    assert all(torch.equal(item, state[key] + 1) for key, item in module.state_dict().items())


@pytest.mark.parametrize("place", ["device=", "placement"])
def test_a_module_may_be_made_on_the_device_by_its_class(cluster: Cluster, place: str) -> None:
    worker = cluster.workers[1]
    if place == "device=":
        module = worker.module(nn.Linear, 3, 2, dtype=torch.float64, device=DEVICE)
    else:
        module = gw.nn.RemoteModule(f"rank:1/{DEVICE}", nn.Linear, (3, 2), {"dtype": torch.float64})
    assert module(training.values().detach()).device.type == "cpu"
    where = [worker.call(_device_of_reference, rref) for rref in module.remote_parameters()]
    assert where == [DEVICE, DEVICE]
    module.to("cpu")
    assert worker.call(_device_of_reference, module.remote_parameters()[0]) == "cpu"
    module.to(training.ZERO)
    assert worker.call(_device_of_reference, module.remote_parameters()[0]) == training.ZERO
    assert module(training.values().detach()).device.type == "cpu"


def _device_of_reference(rref: Any) -> str:
    return str(rref.local_value().device)


class _Where(nn.Module):
    """Has no parameters."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:
        return x * 2, str(x.device)


def test_a_module_without_parameters_computes_where_it_was_placed(cluster: Cluster) -> None:
    out, where = gw.nn.RemoteModule(f"worker1/{DEVICE}", _Where)(torch.ones(2))
    assert (out.device.type, where) == ("cpu", DEVICE)


def test_a_missing_device_is_an_error_that_names_it(cluster: Cluster) -> None:
    with pytest.raises(Exception, match=r"(?i)hpu"):
        gw.nn.RemoteModule("worker1/hpu:0", nn.Linear, (3, 2))


@pytest.mark.slow
def test_random_numbers_repeat_in_checkpointed_activations(cluster: Cluster) -> None:
    module = gw.nn.RemoteModule(f"worker1/{DEVICE}", training.make_dropped)
    x = training.values()
    with gw.autograd.context() as ctx:
        out = module(x)
        ctx.backward(out.sum())
        found = ctx.gradients()[x]
    expected, gradient = cluster.workers[1].call(training.run_dropped)
    assert torch.allclose(out, expected)
    assert torch.allclose(found, gradient)


@pytest.mark.slow  # as the one above: torch imports its compiler
def test_a_compiled_module_trains_like_a_plain_one(cluster: Cluster) -> None:
    module = gw.nn.RemoteModule(f"worker1/{DEVICE}", training.make_compiled, ("aot_eager",))
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [module], lr=0.1)
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(2):
        x = torch.rand(4, 3)
        with gw.autograd.context() as ctx:
            ctx.backward(module(x).square().sum())
            optimizer.step(ctx)
        sgd.zero_grad()
        alone(x).square().sum().backward()
        sgd.step()
    found = [item for _, item in sorted(module.state_dict().items())]
    expected = [item for _, item in sorted(alone.state_dict().items())]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs)


def test_autocast_of_the_device_goes_with_calls(cluster: Cluster) -> None:
    first, second = cluster.workers[:2]
    assert first.call(training.call_under_autocast, second.name) == {device.NAME: "torch.float16"}
    with torch.autocast("cpu", torch.bfloat16):
        assert second.call(training.autocast_state) == {"cpu": "torch.bfloat16"}
    assert second.call(training.autocast_state) == {}


def test_autocast_of_a_device_that_the_worker_lacks_is_left_out(cluster: Cluster) -> None:
    assert cluster.workers[0].call(training.call_under_autocast, "driver") == {}


def test_status_tells_the_memory_on_devices(cluster: Cluster) -> None:
    module = gw.nn.RemoteModule(f"worker1/{DEVICE}", nn.Linear, (1024, 1024), {"bias": False})
    first, second, _ = cluster.status()
    assert (second.device_bytes or 0) - (first.device_bytes or 0) >= 4 << 20
    assert (second.device or "").startswith(device.NAME)
    assert "on devices" in str(cluster.status())
    del module
