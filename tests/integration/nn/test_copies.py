"""Deep copies of remote modules: modules of their own, on the same owners. Shallow ones: handles on the same module."""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gradwire as gw
from gradwire.cluster.api import Cluster
from gradwire.nn import RemoteModule
from gradwire.params import snapshots
from gradwire.rref import context as rref_context
from gradwire.testing import wait_until
from nn.models import Net, gradients_of, make_input, step, weights_of


class Around(nn.Module):
    """A layer after a module of another worker."""

    def __init__(self, inner: RemoteModule) -> None:
        super().__init__()
        self.inner = inner
        self.last = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.inner(x))


def _train(model: RemoteModule, x: torch.Tensor) -> None:
    with gw.autograd.context() as ctx:
        ctx.backward(model(x).square().sum())
        step(model, ctx)


def _are_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def modes_on_owner(rref: Any) -> set[str | None]:
    return {snapshots.mode_of(param) for param in rref.local_value().parameters()}


def num_values() -> int:
    return rref_context.here().statistics().num_values


def test_a_copy_has_parameters_of_its_own(cluster: Cluster) -> None:
    model, x = cluster.workers[0].module(Net, 4, 3), make_input(1)
    _train(model, x)
    before = weights_of(model)
    made = copy.deepcopy(model.eval())
    assert type(made) is RemoteModule
    assert (made.on, made.device, made.training) == (model.on, model.device, False)
    assert made.module_rref.owner_name() == "worker0"
    _train(model, x)
    assert _are_equal(weights_of(made), before)
    assert not _are_equal(weights_of(model), before)
    local = Net(4, 3)
    local.load_state_dict(made.state_dict())
    local(x).square().sum().backward()
    with gw.autograd.context() as ctx:
        ctx.backward(made(x).square().sum())
        found = gradients_of(made, ctx)
    assert all(torch.equal(found[name], param.grad) for name, param in local.named_parameters())
    assert made.shapes() == local.shapes()


def test_a_copy_and_its_origin_are_freed_one_by_one(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    model = worker.module(Net, 4, 3)
    assert worker.call(num_values) == 1
    made = copy.deepcopy(model)
    assert worker.call(num_values) == 2
    weights = weights_of(model)
    del model
    gc.collect()
    wait_until(lambda: worker.call(num_values) == 1)
    assert _are_equal(weights_of(made), weights)


def test_a_shallow_copy_is_another_handle_on_the_same_module(cluster: Cluster) -> None:
    model, x = cluster.workers[0].module(Net, 4, 3), make_input(1)
    made = copy.copy(model)
    assert type(made) is RemoteModule
    assert made is not model
    _train(made, x)
    assert _are_equal(weights_of(made), weights_of(model))
    assert cluster.workers[0].call(num_values) == 1


def test_contexts_share_a_copy_as_they_share_its_origin(cluster: Cluster) -> None:
    model = RemoteModule("worker0", Net, (4, 3), concurrency="serialize")
    made = copy.deepcopy(model)
    assert cluster.workers[0].call(modes_on_owner, made.module_rref) == {"serialize"}


def test_parts_on_other_workers_are_copied_there(cluster: Cluster) -> None:
    inner = cluster.workers[1].module(Net, 4, 3)
    outer, x = cluster.workers[0].module(Around, inner), make_input(1)
    made = copy.deepcopy(outer)
    before = outer(x).detach()
    _train(inner, x)
    assert not torch.equal(outer(x).detach(), before)
    assert torch.equal(made(x).detach(), before)
    assert [rref.owner_name() for rref in made.remote_parameters()] == ["worker1"] * 4 + ["worker0"] * 2


def test_inside_an_outer_module(cluster: Cluster) -> None:
    shared, calls = cluster.workers[0].module(Net, 4, 4), []
    outer, x = nn.Sequential(shared, nn.Linear(4, 4, dtype=torch.float64), shared), make_input(1)
    twin = RemoteModule.init_from_module_rref("worker0", shared.module_rref)  # another handle on the same module
    outer.append(twin)
    shared.register_forward_hook(lambda *_: calls.append("here"))
    made = copy.deepcopy(outer)
    assert made[0] is made[2]
    assert made[0] is not shared
    assert made[3].module_rref is made[0].module_rref
    expected = outer(x).detach()
    assert torch.equal(made(x).detach(), expected)
    assert calls == ["here"] * 4
    _train(shared, x)
    assert torch.equal(made(x).detach(), expected)


def test_averaging_where_the_parameters_are(cluster: Cluster) -> None:
    """Exponential moving averages: torch's class runs on the owner; here it averages what is here."""
    worker, x = cluster.workers[0], make_input(1)
    model, local = worker.module(Net, 4, 3), Net(4, 3)
    average = worker.module(make_average, model.get_module_rref())
    expected = AveragedModel(local, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        _train(model, x)
        local.load_state_dict(model.state_dict())
        worker.call(update_average, average.get_module_rref(), model.get_module_rref())
        expected.update_parameters(local)
    assert torch.equal(average(x).detach(), expected(x).detach())
    assert not torch.equal(average(x).detach(), model(x).detach())

    outer = nn.Sequential(model, nn.Linear(3, 2, dtype=torch.float64))
    averaged = AveragedModel(outer)
    assert averaged.module[0].module_rref is not model.module_rref
    averaged.update_parameters(outer)
    assert torch.equal(averaged(x).detach(), outer(x).detach())


def make_average(model: Any) -> nn.Module:
    return AveragedModel(model.local_value(), multi_avg_fn=get_ema_multi_avg_fn(0.9))


def update_average(average: Any, model: Any) -> None:
    average.local_value().update_parameters(model.local_value())
