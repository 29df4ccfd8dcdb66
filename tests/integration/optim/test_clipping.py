"""Clipping over all owners is clipping in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradwire as gw
from closeness import assert_close
from gradwire import rpc
from gradwire.cluster.api import Cluster
from gradwire.errors import ConfigurationError, OptimizerError, OptimizerStepFailed
from optim.programs import Distributed, OneProcess, assert_same, batches, make

SEEDS = (1, 2, 3, 4)


def worlds(cluster: Cluster, kind: str = "dense") -> tuple[OneProcess, Distributed]:
    here, there = OneProcess(SEEDS, kind), Distributed(SEEDS, cluster.workers, kind)
    for world in (here, there):
        world.make_optimizer(make(torch.optim.SGD, lr=0.1, momentum=0.9))
    return here, there


def step_here(here: OneProcess, clip: Callable[[list[Any]], Any], *inputs: torch.Tensor) -> Any:
    here.optimizer.zero_grad()
    for x in inputs:
        here.loss(x).backward()
    found = clip(here.parameters)
    here.optimizer.step()
    return found


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_by_norm(cluster: Cluster, norm_type: float, max_norm: float) -> None:
    here, there = worlds(cluster)
    found: list[torch.Tensor] = []

    def act(ctx: Any) -> None:
        found.append(there.optimizer.clip_grad_norm_(ctx, max_norm, norm_type))
        there.optimizer.step(ctx)

    for number in range(2):
        inputs = [batches(number), batches(number + 10)]
        expected = step_here(here, lambda params: torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type), *inputs)
        there.in_contexts(inputs, act)
        assert torch.equal(found[-1], expected)
    assert_same(there.values(), here.values())


def test_by_value_and_then_by_norm(cluster: Cluster) -> None:
    here, there = worlds(cluster)

    def clip(params: list[Any]) -> None:
        torch.nn.utils.clip_grad_value_(params, 0.05)
        torch.nn.utils.clip_grad_norm_(params, 0.1)

    step_here(here, clip, batches(0))

    def act(ctx: Any) -> None:
        there.optimizer.clip_grad_value_(ctx, 0.05)
        there.optimizer.clip_grad_norm_(ctx, 0.1)
        there.optimizer.step(ctx)

    there.in_contexts([batches(0)], act)
    assert_same(there.values(), here.values())


def test_it_takes_one_round_trip(cluster: Cluster) -> None:
    _, there = worlds(cluster)
    agent = rpc.current_agent()

    def act(ctx: Any) -> None:
        before = agent.statistics().num_calls_made
        there.optimizer.clip_grad_norm_(ctx, 1.0)
        there.optimizer.clip_grad_value_(ctx, 1.0)
        assert agent.statistics().num_calls_made == before + 2  # one to each of the two other owners

    there.in_contexts([batches(0)], act)


def test_what_is_not_finite(cluster: Cluster) -> None:
    _, there = worlds(cluster)
    before = there.values()

    def act(ctx: Any) -> None:
        with pytest.raises(OptimizerError, match="non-finite"):
            there.optimizer.clip_grad_norm_(ctx, 1.0, error_if_nonfinite=True)
        assert torch.isnan(there.optimizer.clip_grad_norm_(ctx, 1.0))

    there.in_contexts([batches(0).fill_(float("nan"))], act)
    assert_same(there.values(), before)


def test_without_gradients_the_norm_is_zero(cluster: Cluster) -> None:
    _, there = worlds(cluster)
    with gw.autograd.context() as ctx:
        assert there.optimizer.clip_grad_norm_(ctx, 1.0) == 0.0


def test_sparse_gradients_are_clipped_by_norm(cluster: Cluster) -> None:
    """Torch cannot do that; the measure is the same gradient, made dense."""
    here, there = worlds(cluster, "sparse")
    here.loss(batches(0)).backward()
    for weight in here.parameters:
        weight.grad = weight.grad.to_dense()
    expected = torch.nn.utils.clip_grad_norm_(here.parameters, 0.1)
    here.optimizer.step()

    def act(ctx: Any) -> None:
        assert_close(there.optimizer.clip_grad_norm_(ctx, 0.1), expected)
        there.optimizer.step(ctx)

    there.in_contexts([batches(0)], act)
    for got, want in zip(there.values(), here.values(), strict=True):
        assert_close(got, want)


def test_contexts_that_were_clipped_together_are_used_together(cluster: Cluster) -> None:
    _, there = worlds(cluster)

    def act(contexts: Any) -> None:
        there.optimizer.clip_grad_value_(contexts, 1.0)
        with pytest.raises(ConfigurationError, match="clipped or unscaled together"):
            there.optimizer.step(contexts[0])
        there.optimizer.step(contexts)

    there.in_contexts([batches(0), batches(1)], act)
    there.step(batches(2))
    assert there.optimizer._edits._edits == {}


def test_when_one_of_them_is_over_the_other_may_be_used_alone(cluster: Cluster) -> None:
    here, there = worlds(cluster)
    with gw.autograd.context() as ctx:
        ctx.backward(there.loss(batches(0)))
        with gw.autograd.context() as other:
            there.optimizer.clip_grad_value_([ctx, other], 1e-3)
        there.optimizer.step(ctx)
    here.step(batches(0))
    assert_same(there.values(), here.values())


def test_it_ends_with_the_step(cluster: Cluster) -> None:
    """Gradients of the context grow; the second step has them whole, as the passes left them."""
    here, there = worlds(cluster)
    with gw.autograd.context() as ctx:
        ctx.backward(there.loss(batches(0)))
        there.optimizer.clip_grad_value_(ctx, 1e-3)
        there.optimizer.step(ctx)
        ctx.backward(there.loss(batches(1)))
        there.optimizer.step(ctx)
    here.loss(batches(0)).backward()
    whole = [weight.grad.clone() for weight in here.parameters]
    torch.nn.utils.clip_grad_value_(here.parameters, 1e-3)
    here.optimizer.step()
    for weight, gradient in zip(here.parameters, whole, strict=True):
        weight.grad = gradient
    here.loss(batches(1)).backward()
    here.optimizer.step()
    assert_same(there.values(), here.values())


_failures: list[Exception] = []


def fail_next() -> None:
    _failures.append(LookupError("not now"))


class Failing(torch.optim.SGD):
    """Fails once for every failure that is prepared on its worker."""

    def step(self, closure: Any = None) -> Any:
        if _failures:
            raise _failures.pop()
        return super().step(closure)


def test_a_step_that_is_repeated_has_it_still(cluster: Cluster) -> None:
    here, there = OneProcess(SEEDS), Distributed(SEEDS, cluster.workers)
    for world in (here, there):
        world.make_optimizer(make(Failing, lr=0.1))
    cluster.workers[1].call(fail_next)

    def act(ctx: Any) -> None:
        there.optimizer.clip_grad_value_(ctx, 0.01)
        with pytest.raises(OptimizerStepFailed, match="not now"):
            there.optimizer.step(ctx)
        there.optimizer.step(ctx)

    there.in_contexts([batches(0)], act)
    step_here(here, lambda params: torch.nn.utils.clip_grad_value_(params, 0.01), batches(0))
    assert_same(there.values(), here.values())


def test_sparse_gradients_are_clipped_by_value(cluster: Cluster) -> None:
    """Entries of one row count together, as they do in the same gradient made dense."""
    here, there = worlds(cluster, "sparse")
    here.loss(batches(0)).backward()
    for weight in here.parameters:
        weight.grad = weight.grad.to_dense()
    torch.nn.utils.clip_grad_value_(here.parameters, 0.05)
    here.optimizer.step()

    def act(ctx: Any) -> None:
        there.optimizer.clip_grad_value_(ctx, 0.05)
        there.optimizer.step(ctx)

    there.in_contexts([batches(0)], act)
    for got, want in zip(there.values(), here.values(), strict=True):
        assert_close(got, want)
