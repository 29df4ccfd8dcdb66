"""``backward(..., optimizer=opt)``: the step at once, with one message less to each owner."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd.api import current_engine
from gradwire.cluster.api import Cluster
from gradwire.errors import BackwardFailed, ConfigurationError, OptimizerStepFailed
from gradwire.optim import DistributedOptimizer
from gradwire.testing import wait_until
from optim.programs import Distributed, OneProcess, assert_same, batches, make
from optim.test_steps import FailsAtFirst, fail

SEEDS = (1, 2, 3)


def worlds(cluster: Cluster, made: Any = None) -> tuple[OneProcess, Distributed]:
    here, there = OneProcess(SEEDS), Distributed(SEEDS, cluster.workers)
    for world in (here, there):
        world.make_optimizer(made or make(torch.optim.SGD, lr=0.1, momentum=0.9))
    return here, there


def num_passes() -> int:
    return current_engine().statistics().num_passes_under_way


def refuse(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.register_hook(_raise)
    return x


def _raise(_: Any) -> None:
    raise ArithmeticError("no gradient today")


@pytest.mark.parametrize("used", [None, [0, 2], [2]])
def test_same_as_backward_and_step(cluster: Cluster, used: list[int] | None) -> None:
    """Also for owners that have no part in the pass, and if only the driver has one."""
    here, there = worlds(cluster)
    for number in range(3):
        with gw.autograd.context() as ctx:
            ctx.backward(there.loss(batches(number), used), optimizer=there.optimizer)
            with torch.no_grad():
                assert [item.call(num_passes) for item in cluster.workers] == [0, 0]
        here.step(batches(number), used=used)
    assert_same(there.values(), here.values())


def test_one_message_less(cluster: Cluster) -> None:
    _, there = worlds(cluster)
    agent, sent = rpc.current_agent(), []
    send = agent.notices.send

    def send_noted(to: str, name: str, *args: Any, **kwargs: Any) -> Any:
        sent.append((to, name))
        return send(to, name, *args, **kwargs)

    agent.notices.send = send_noted  # type: ignore[method-assign]
    try:
        with gw.autograd.context() as ctx:
            loss = there.loss(batches(0))
            before = agent.statistics().num_calls_made
            ctx.backward(loss, optimizer=there.optimizer)
            assert agent.statistics().num_calls_made == before + 2
            assert [item for item in sent if item[1] == "autograd.commit"] == []
    finally:
        del agent.notices.send


def test_hooks_and_schedulers_see_the_step(cluster: Cluster) -> None:
    _, there = worlds(cluster)
    seen: list[int] = []
    there.optimizer.register_step_post_hook(lambda *_: seen.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(there.optimizer, 1)
    with gw.autograd.context() as ctx:
        ctx.backward(there.loss(batches(0)), optimizer=there.optimizer)
    scheduler.step()  # warns if it has seen no step
    assert seen == [1]


def test_a_step_that_fails_leaves_the_gradients(cluster: Cluster) -> None:
    here, there = worlds(cluster, make(FailsAtFirst, lr=0.1))
    cluster.workers[1].call(fail, 1)
    with gw.autograd.context() as ctx:
        with pytest.raises(OptimizerStepFailed, match="worker1: ArithmeticError") as caught:
            ctx.backward(there.loss(batches(0)), optimizer=there.optimizer)
        assert sorted(caught.value.stepped) == ["driver", "worker0"]
        there.optimizer.step(ctx)  # again: those that have stepped do not
        with torch.no_grad():
            assert [item.call(num_passes) for item in cluster.workers] == [0, 0]
    here.step(batches(0))
    assert_same(there.values(), here.values())


def test_a_hook_that_raises_leaves_nobody_waiting(cluster: Cluster) -> None:
    _, there = worlds(cluster)
    before = there.values()
    handle = there.optimizer.register_step_pre_hook(_raise_before)
    with gw.autograd.context() as ctx:
        with pytest.raises(ArithmeticError):
            ctx.backward(there.loss(batches(0)), optimizer=there.optimizer)
        for item in cluster.workers:
            wait_until(lambda item=item: not _passes_of(item), 20.0, "that the commit has arrived")
        assert_same(there.values(), before)
        handle.remove()
        there.optimizer.step(ctx)
    assert not torch.equal(there.values()[0], before[0])


def _passes_of(item: Any) -> int:
    with torch.no_grad():
        found: int = item.call(num_passes)
        return found


def _raise_before(*_: Any) -> None:
    raise ArithmeticError("not before noon")


def test_a_pass_that_fails_steps_nobody(cluster: Cluster) -> None:
    _, there = worlds(cluster)
    before = there.values()
    with gw.autograd.context() as ctx:
        x = cluster.workers[0].call(refuse, batches(0).requires_grad_())
        with pytest.raises(BackwardFailed, match="no gradient today"):
            ctx.backward(there.loss(x), optimizer=there.optimizer)
    assert_same(there.values(), before)


def test_not_an_optimizer(cluster: Cluster) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    with gw.autograd.context() as ctx, pytest.raises(ConfigurationError, match="not a SGD"):
        ctx.backward(weight.sum(), optimizer=torch.optim.SGD([weight], lr=0.1))


class HasOwnStep(DistributedOptimizer):
    """Has a step of its own, around which torch puts its wrapper."""

    def step(self, context_id: Any, **options: Any) -> None:  # type: ignore[override]
        super().step(context_id, **options)


def test_hooks_of_a_subclass_run_once(cluster: Cluster) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, seen = HasOwnStep(torch.optim.SGD, [weight], lr=0.1), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    with gw.autograd.context() as ctx:
        ctx.backward((weight * 2).sum())
        optimizer.step(ctx)
    assert seen == ["pre", "post"]
    assert weight.tolist() == [pytest.approx(0.8)] * 2
