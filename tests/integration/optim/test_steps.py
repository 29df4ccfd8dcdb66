"""Steps: with which gradients, of which parameters, how often."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import optim, rpc
from gradwire.cluster.api import Cluster
from gradwire.errors import OptimizerNotMade, OptimizerStepFailed
from gradwire.optim import distributed
from gradwire.rpc import RRef
from optim.programs import Distributed, OneProcess, assert_same, batches, make, make_weight

SEEDS = (1, 2, 3)
MOMENTUM = make(torch.optim.SGD, lr=0.1, momentum=0.9)
_failures: dict[str, int] = {}


def worlds(cluster: Cluster, made: Any = MOMENTUM) -> tuple[OneProcess, Distributed]:
    here, there = OneProcess(SEEDS), Distributed(SEEDS, cluster.workers)
    for world in (here, there):
        world.make_optimizer(made)
    return here, there


def set_grad(weight: RRef[torch.Tensor], value: float) -> None:
    parameter = weight.local_value()
    parameter.grad = torch.full_like(parameter, value)


def get_grad(weight: RRef[torch.Tensor]) -> torch.Tensor | None:
    return weight.local_value().grad


class FailsAtFirst(torch.optim.SGD):
    """Raises in its first steps, as often as `fail` was told on that worker."""

    def step(self, closure: Any = None) -> Any:
        if _failures.get("left", 0):
            _failures["left"] -= 1
            raise ArithmeticError("not this time")
        return super().step(closure)


def fail(times: int) -> None:
    _failures["left"] = times


def test_gradients_of_several_contexts_are_added_up(cluster: Cluster) -> None:
    here, there = worlds(cluster)
    for number in range(3):
        three = [batches(3 * number + offset) for offset in range(3)]
        assert there.step(*three) == here.step(*three)
    assert_same(there.values(), here.values())


def test_parameters_without_a_gradient_are_untouched(cluster: Cluster) -> None:
    """Their momentum does not move them either, and what is in `.grad` has no part in it."""
    here, there = worlds(cluster)
    for world in (here, there):
        world.step(batches(0))
    for weight in there.parameters[:2]:
        rpc.rpc_sync(weight.owner(), set_grad, (weight, 7.0))
    for world in (here, there):
        world.step(batches(1), used=[0, 2])
    assert_same(there.values(), here.values())
    for weight in there.parameters[:2]:
        found = rpc.rpc_sync(weight.owner(), get_grad, (weight,))
        assert torch.equal(found, torch.full((4, 4), 7.0))


def test_zero_grad_clears_grad_and_leaves_contexts_alone(cluster: Cluster) -> None:
    here, there = worlds(cluster)
    weight = there.parameters[0]
    for set_to_none in (False, True):
        rpc.rpc_sync(weight.owner(), set_grad, (weight, 7.0))
        there.optimizer.zero_grad(set_to_none=set_to_none)
        found = rpc.rpc_sync(weight.owner(), get_grad, (weight,))
        assert found is None if set_to_none else torch.equal(found, torch.zeros(4, 4))

    def act(ctx: Any) -> None:
        there.optimizer.zero_grad()
        there.optimizer.step(ctx)

    there.in_contexts([batches(0)], act)
    here.step(batches(0))
    assert_same(there.values(), here.values())


def test_without_backward_nothing_moves(cluster: Cluster) -> None:
    _, there = worlds(cluster)
    before = there.values()
    with gw.autograd.context() as ctx, pytest.warns(UserWarning, match="step changed nothing"):
        there.optimizer.step(ctx)
    assert_same(there.values(), before)


def test_a_loop_of_steps_without_gradients_warns_once_at_the_line_of_the_user(cluster: Cluster) -> None:
    _, there = worlds(cluster)
    plain = torch.ones(1, requires_grad=True)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            with gw.autograd.context() as ctx:
                there.optimizer.step(ctx)
        first = there.optimizer.register_step_pre_hook(lambda *_: None)
        for _ in range(3):
            with gw.autograd.context() as ctx:
                there.optimizer.step(ctx)
        first.remove()
        for _ in range(3):
            with gw.autograd.context() as ctx:
                ctx.backward(plain.sum(), optimizer=there.optimizer)
    assert len({item.lineno for item in shown}) == len(shown) == 3
    assert {item.filename for item in shown} == {__file__}


def test_groups_have_their_own_options(cluster: Cluster) -> None:
    def made(distributed: Any, parameters: list[Any]) -> Any:
        groups = [{"params": parameters[:2], "lr": 0.5}, {"params": parameters[2], "momentum": 0.1}]
        return make(torch.optim.SGD, lr=0.01, momentum=0.9)(distributed, groups)

    here, there = worlds(cluster, made)
    for number in range(3):
        there.step(batches(number))
        here.step(batches(number))
        for world in (here, there):  # changed here, in force on the owners with the next step
            world.optimizer.param_groups[0]["lr"] *= 0.5
            world.optimizer.param_groups[1]["weight_decay"] = 0.1
    assert_same(there.values(), here.values())
    assert [group["lr"] for group in there.optimizer.param_groups] == [0.0625, 0.01]
    assert there.optimizer.defaults == here.optimizer.defaults


def test_a_learning_rate_may_be_a_tensor_that_is_changed_in_place(cluster: Cluster) -> None:
    here, there = worlds(cluster, make(torch.optim.Adam, lr=0.0))
    for world in (here, there):
        world.optimizer.param_groups[0].update(lr=torch.tensor(0.1), foreach=False)
    for number in range(3):
        for world in (here, there):
            world.step(batches(number))
            world.optimizer.param_groups[0]["lr"].fill_(0.1 / (number + 2))
    assert_same(there.values(), here.values())


def test_groups_are_added_also_on_workers_that_had_none(cluster: Cluster) -> None:
    def made(distributed: Any, parameters: list[Any]) -> Any:
        return MOMENTUM(distributed, parameters[:1])

    here, there = worlds(cluster, made)
    assert len(there.optimizer.remote_optimizers) == 1
    for number in range(3):
        for world in (here, there):
            world.step(batches(number))
            if number < 2:
                world.optimizer.add_param_group({"params": [world.parameters[number + 1]], "lr": 0.3})
    assert_same(there.values(), here.values())
    assert len(there.optimizer.remote_optimizers) == 3
    assert [name for name, _ in there.optimizer.named_parameters()] == ["0", "1", "2"]


def test_a_group_is_added_everywhere_or_nowhere(cluster: Cluster) -> None:
    here, there = worlds(cluster)
    more = rpc.remote("worker0", make_weight, (9,))
    text = r"(?s)the parameter group could not be added .*worker1: .*appear more than once.*; nothing was added"
    with pytest.raises(OptimizerNotMade, match=text) as caught:
        there.optimizer.add_param_group({"params": [("more", more), ("again", there.parameters[1])]})
    assert list(caught.value.failed) == ["worker1"]
    assert len(there.optimizer.param_groups) == 1
    there.step(batches(0))
    here.step(batches(0))
    assert_same(there.values(), here.values())
    there.optimizer.add_param_group({"params": [("more", more)]})
    assert [name for name, _ in there.optimizer.named_parameters()] == ["0", "1", "2", "more"]


def test_one_message_to_each_owner(cluster: Cluster) -> None:
    _, there = worlds(cluster)
    there.step(batches(0))
    agent = rpc.current_agent()

    def act(ctx: Any) -> None:
        before = agent.statistics().num_calls_made
        there.optimizer.step(ctx)
        assert agent.statistics().num_calls_made == before + 2  # and none to itself

    there.in_contexts([batches(1)], act)


def test_a_step_is_done_once(cluster: Cluster) -> None:
    """An owner that gets a request again answers it again, and does not step."""
    here, there = worlds(cluster)
    owners = list(there.optimizer._owners.values())

    def act(ctx: Any) -> None:
        for _ in range(3):
            answers = distributed.ask_all(owners, "step", lambda _: (0, (int(ctx),)), 10.0)
            assert answers.values == {"worker0": 1, "worker1": 1, "driver": 1}

    there.in_contexts([batches(0)], act)
    here.step(batches(0))
    assert_same(there.values(), here.values())


def test_a_step_that_failed_is_repeated_where_it_failed(cluster: Cluster) -> None:
    here, there = worlds(cluster, make(FailsAtFirst, lr=0.1, momentum=0.9))
    cluster.workers[1].call(fail, 2)

    def act(ctx: Any) -> None:
        for _ in range(2):
            with pytest.raises(
                OptimizerStepFailed, match=r"Stepped: driver, worker0\. Failed: worker1: Arith"
            ) as caught:
                there.optimizer.step(ctx)
            assert sorted(caught.value.stepped) == ["driver", "worker0"]
            assert isinstance(caught.value.failed["worker1"], ArithmeticError)
            there.optimizer.param_groups[0]["lr"] = 0.2  # heard of by all, also by those that do not step again
        there.optimizer.step(ctx)

    there.in_contexts([batches(0)], act)
    here.optimizer.param_groups[0]["lr"] = 0.1
    here.step(batches(0))
    expected = here.values()
    other = OneProcess(SEEDS)
    other.make_optimizer(make(torch.optim.SGD, lr=0.2, momentum=0.9))
    other.step(batches(0))
    expected[1] = other.values()[1]
    assert_same(there.values(), expected)


def test_after_a_failure_the_next_step_is_another(cluster: Cluster) -> None:
    here, there = worlds(cluster, make(FailsAtFirst, lr=0.1))
    cluster.workers[1].call(fail, 1)
    with pytest.raises(OptimizerStepFailed):
        there.step(batches(0))
    there.step(batches(1))
    here.loss(batches(0)).backward()
    here.parameters[1].grad = None  # the one on the worker where it failed
    here.optimizer.step()
    here.step(batches(1))
    assert_same(there.values(), here.values())
    assert there.optimizer._unfinished == {}


def test_hooks_run_around_every_step(cluster: Cluster) -> None:
    _, there = worlds(cluster)
    seen: list[str] = []
    there.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    handle = there.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    there.step(batches(0))
    assert seen == ["before", "after"]
    handle.remove()
    there.step(batches(1))
    assert seen == ["before", "after", "before"]


def test_hooks_see_and_change_what_step_was_given(cluster: Cluster) -> None:
    here, there = worlds(cluster)
    seen: list[Any] = []

    def choose(_: Any, args: Any, kwargs: Any) -> Any:
        seen.append((args[0] is there.optimizer, len(args), kwargs))
        return args, {"timeout": 20.0}

    there.optimizer.register_step_pre_hook(choose)
    there.optimizer.register_step_post_hook(lambda _, args, kwargs: seen.append(kwargs))
    there.step(batches(0))
    here.step(batches(0))
    assert seen == [(True, 2, {}), {"timeout": 20.0}]
    assert_same(there.values(), here.values())


def test_a_profiler_sees_steps(cluster: Cluster) -> None:
    _, there = worlds(cluster)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        there.step(batches(0))
    names = {event.key for event in profile.key_averages()}
    assert "Optimizer.step#DistributedOptimizer.step" in names
    assert any(name.startswith("Optimizer.step#") and "Distributed" not in name for name in names)  # this worker's part


def test_modules_pairs_and_local_parameters(cluster: Cluster) -> None:
    remote = cluster.workers[0].call(make_module)
    local = torch.nn.Sequential(torch.nn.Linear(2, 2), gw.nn.RemoteModule("worker1", torch.nn.Linear, (2, 3)))
    alone = torch.nn.Parameter(torch.ones(2))
    optimizer = optim.DistributedOptimizer(
        torch.optim.SGD,
        [
            gw.nn.RemoteModule("worker0", torch.nn.Linear, (2, 2)),
            local,
            remote,
            ("mine", alone),
            alone.new_ones(2).requires_grad_(),
        ],
        lr=0.1,
    )
    names = [name for name, _ in optimizer.named_parameters()]
    assert names == ["weight", "bias", "0.weight", "0.bias", "1.weight", "1.bias", "6", "mine", "8"]
    assert [rref.owner_name() for _, rref in optimizer.named_parameters()] == [
        "worker0",
        "worker0",
        "driver",
        "driver",
        "worker1",
        "worker1",
        "worker0",
        "driver",
        "driver",
    ]


def make_module() -> RRef[torch.nn.Parameter]:
    return RRef(torch.nn.Parameter(torch.ones(2)))


def test_a_remote_module_is_trained(cluster: Cluster) -> None:
    torch.manual_seed(0)
    module = gw.nn.RemoteModule("worker0", torch.nn.Linear, (4, 4))
    here = torch.nn.Linear(4, 4)
    here.load_state_dict(module.state_dict())
    there_opt = optim.DistributedOptimizer(torch.optim.AdamW, module, lr=0.1)
    here_opt = torch.optim.AdamW(here.parameters(), lr=0.1)
    for number in range(3):
        with gw.autograd.context() as ctx:
            ctx.backward(module(batches(number)).square().sum())
            there_opt.step(ctx)
        here_opt.zero_grad()
        here(batches(number)).square().sum().backward()
        here_opt.step()
    assert_same(list(module.state_dict().values()), list(here.state_dict().values()))


# -- steps that change nothing -------------------------------------------------------------------------------------------


def test_a_step_without_any_gradient_warns_and_says_what_to_check(cluster: Cluster) -> None:
    module = cluster.workers[0].module(torch.nn.Linear, 2, 1)
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, [module], lr=0.1)
    with gw.autograd.context() as ctx, gw.autograd.context() as other:
        with pytest.warns(UserWarning, match=r"none has a gradient in the context\. Check") as caught:
            optimizer.step(ctx)
        assert "the 2 parameters (on worker0)" in str(caught[0].message)
        assert caught[0].filename == __file__
        with pytest.warns(UserWarning, match=r"in any of the 2 contexts\. Check"):
            optimizer.step([ctx, other])


def test_a_step_with_a_gradient_for_one_of_several_owners_does_not_warn(cluster: Cluster) -> None:
    modules = [worker.module(torch.nn.Linear, 2, 1) for worker in cluster.workers[:2]]
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, modules, lr=0.1)
    with gw.autograd.context() as ctx:
        ctx.backward(modules[0](torch.ones(1, 2)).sum())
        optimizer.step(ctx)
