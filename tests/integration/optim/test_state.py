"""State dicts: torch's form, by name where there are names, wherever the parameters live."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import optim, rpc
from gradwire.cluster.api import Cluster
from gradwire.errors import ConfigurationError, OptimizerError
from optim.programs import Distributed, OneProcess, assert_same, batches, make

SEEDS = (1, 2, 3)


def named(made: Any, names: str) -> Any:
    """Makes an optimizer of named parameters, in the order of the names."""

    def make_one(distributed: Any, parameters: list[Any]) -> Any:
        pairs = dict(zip("abc", parameters, strict=True))
        return made(distributed, [(name, pairs[name]) for name in names])

    return make_one


def trained(world: Any, made: Any, num_steps: int = 2) -> Any:
    world.make_optimizer(made)
    for number in range(num_steps):
        world.step(batches(number))
    return world


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_there_and_back(cluster: Cluster, optimizer_class: Any) -> None:
    """Saved with parameters on workers, loaded in one process; saved there, loaded on workers in another order."""
    made = make(optimizer_class, lr=0.1)
    here, there = trained(OneProcess(SEEDS), made), trained(Distributed(SEEDS, cluster.workers), made)
    saved = there.optimizer.state_dict()
    expected = here.optimizer.state_dict()
    assert {key: set(value) for key, value in saved["state"].items()} == {
        k: set(v) for k, v in expected["state"].items()
    }
    assert saved["param_groups"][0]["params"] == expected["param_groups"][0]["params"]
    fresh_here = OneProcess(SEEDS)
    fresh_there = Distributed(SEEDS, cluster.workers[::-1])
    for fresh, state in ((fresh_here, saved), (fresh_there, expected)):
        fresh.make_optimizer(made)
        fresh.optimizer.load_state_dict(state)
        fresh.step(batches(5))
    assert_same(fresh_there.values(), fresh_here.values())


def test_names_decide_where_there_are_names(cluster: Cluster) -> None:
    made = make(torch.optim.Adam, lr=0.1)
    saved = trained(Distributed(SEEDS, cluster.workers), named(made, "abc")).optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == ["a", "b", "c"]
    fresh = [Distributed(SEEDS, cluster.workers) for _ in range(2)]
    for world, order in zip(fresh, ("abc", "cba"), strict=True):
        world.make_optimizer(named(made, order))
        world.optimizer.load_state_dict(saved)
        world.step(batches(5))
    assert_same(fresh[1].values(), fresh[0].values())


def test_state_of_other_parameters_is_refused(cluster: Cluster) -> None:
    made = make(torch.optim.Adam, lr=0.1)
    there = trained(Distributed(SEEDS, cluster.workers), named(made, "abc"), 1)
    saved = there.optimizer.state_dict()
    renamed = {**saved, "param_groups": [{**saved["param_groups"][0], "param_names": ["a", "b", "z"]}]}
    with pytest.raises(ConfigurationError, match=r"missing \['c'\], unexpected \['z'\]"):
        there.optimizer.load_state_dict(renamed)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        there.optimizer.load_state_dict({**saved, "param_groups": saved["param_groups"] * 2})
    shorter = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    with pytest.raises(ValueError, match="doesn't match the size"):
        there.optimizer.load_state_dict(shorter)
    with pytest.raises(ConfigurationError, match="not the state of an optimizer"):
        there.optimizer.load_state_dict({"model": 1})


def test_options_come_with_the_state(cluster: Cluster) -> None:
    here, there = OneProcess(SEEDS), Distributed(SEEDS, cluster.workers)
    for world in (here, there):
        world.make_optimizer(make(torch.optim.SGD, lr=0.1, momentum=0.9))
        saved = world.optimizer.state_dict()
        saved["param_groups"][0]["lr"] = 0.5
        world.optimizer.load_state_dict(saved)
        world.step(batches(0))
    assert there.optimizer.param_groups[0]["lr"] == 0.5
    assert_same(there.values(), here.values())


def test_owners_name_their_state(cluster: Cluster) -> None:
    there = trained(Distributed(SEEDS, cluster.workers), named(make(torch.optim.Adam, lr=0.1), "abc"))
    parts = [rref.rpc_sync().named_state() for rref in there.optimizer.remote_optimizers]
    assert sorted(name for part in parts for name in part) == ["a", "b", "c"]
    assert set(parts[0]["a"]) == {"step", "exp_avg", "exp_avg_sq"}
    for rref, part in zip(there.optimizer.remote_optimizers, parts, strict=True):
        rref.rpc_sync().load_named_state({name: {**state, "step": torch.tensor(9.0)} for name, state in part.items()})
    steps = [state["step"].item() for state in there.optimizer.state_dict()["state"].values()]
    assert steps == [9.0, 9.0, 9.0]
    with pytest.raises(ConfigurationError, match=r"no parameter on worker \w+ is called z"):
        there.optimizer.remote_optimizers[0].rpc_sync().load_named_state({"z": {}})


def test_hooks_of_state_dicts(cluster: Cluster) -> None:
    there = trained(Distributed(SEEDS, cluster.workers), make(torch.optim.SGD, lr=0.1), 1)
    seen: list[str] = []
    there.optimizer.register_state_dict_pre_hook(lambda _: seen.append("pre"))
    there.optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
    there.optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append("load"))
    there.optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    saved = there.optimizer.state_dict()
    there.optimizer.load_state_dict(saved)
    assert saved["more"] == 1
    assert seen == ["pre", "load", "loaded"]


def test_an_owner_that_cannot_take_its_part_is_named(cluster: Cluster) -> None:
    there = trained(Distributed(SEEDS, cluster.workers), make(torch.optim.Adam, lr=0.1), 1)
    with pytest.raises(OptimizerError, match="load_state_dict failed on 3 of 3 workers") as caught:
        there.optimizer._ask("load_named_state", lambda _: ({"z": {}},), 10.0)
    assert sorted(caught.value.failed) == ["driver", "worker0", "worker1"]
    assert isinstance(there.optimizer, optim.DistributedOptimizer)


def test_saved_state_is_that_of_one_moment(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another trainer steps when the owner has answered already: what is saved stays what it was."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, [rpc.RRef(weight)], lr=0.1, momentum=0.5)
    ask = optimizer._ask

    def step() -> None:
        with gw.autograd.context() as ctx:
            ctx.backward(weight.sum())
            optimizer.step(ctx)

    def step_after(*args: Any) -> Any:
        answers = ask(*args)
        step()
        return answers

    step()
    monkeypatch.setattr(optimizer, "_ask", step_after)
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].tolist() == [1.0] * 3
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].tolist() == [1.5] * 3


def test_state_of_other_shapes_is_refused_before_anything_is_loaded(cluster: Cluster) -> None:
    """An owner whose fused kernel was given it would die."""
    made = make(torch.optim.Adam, lr=0.1, fused=True)
    there = trained(Distributed(SEEDS, cluster.workers), made)
    before = there.optimizer.state_dict()
    small = torch.ones(1)
    for number in range(len(SEEDS)):
        wrong = {**before["state"], number: {**before["state"][number], "exp_avg": small, "exp_avg_sq": small}}
        with pytest.raises(ConfigurationError, match=rf"on \w+, state 'exp_avg' of parameter '{number}' has"):
            there.optimizer.load_state_dict({**before, "state": wrong})
    after = there.optimizer.state_dict()
    for number, values in before["state"].items():
        assert all(torch.equal(after["state"][number][key], value) for key, value in values.items())
    here = OneProcess(SEEDS)
    trained(here, made)
    assert here.step(batches(9)) == there.step(batches(9))


def test_fused_steps_with_gradients_of_other_strides(cluster: Cluster) -> None:
    """Torch lays gradients out like their parameter before a fused kernel sees them."""
    weights = [torch.nn.Parameter(torch.arange(6.0).view(2, 3)) for _ in range(2)]
    factors = torch.arange(6.0).view(3, 2)
    options = {"lr": 0.1, "momentum": 0.9, "fused": True}
    here, there = (
        torch.optim.SGD(weights[:1], **options),
        optim.DistributedOptimizer(torch.optim.SGD, weights[1:], **options),
    )
    for _ in range(3):
        here.zero_grad()
        (weights[0].t() * factors).sum().backward()
        here.step()
        with gw.autograd.context() as ctx:
            ctx.backward((weights[1].t() * factors).sum())
            there.step(ctx)
    assert torch.equal(weights[0], weights[1])
