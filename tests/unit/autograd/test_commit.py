"""All or nothing: the root decides once, and who has reported waits for its word."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd.backward_pass import BackwardPass
from gradwire.errors import BackwardFailed, UnknownContext, WorkerLost
from gradwire.params.grads import add_gradient
from gradwire.rpc import Agent
from gradwire.testing import wait_until
from unit.autograd import layers
from unit.autograd.layers import context_of, engine_of, from_elsewhere, gate, held_layer, pass_of, through


def before_commit(agent: Agent, monkeypatch: pytest.MonkeyPatch, act: Callable[[BackwardPass], object]) -> None:
    """Does something between the root's decision and the moment when anybody hears of it."""
    engine = engine_of(agent)
    tell = engine._tell_committed

    def act_first(current: BackwardPass, others: Collection[int]) -> None:
        act(current)
        tell(current, others)

    monkeypatch.setattr(engine, "_tell_committed", act_first)


def expected(num_layers: int) -> tuple[torch.Tensor, ...]:
    """Gradients of input and weight in one process."""
    x, weight = torch.ones(3, requires_grad=True), layers.weight.detach().clone().requires_grad_()
    value = x
    for _ in range(num_layers):
        value = torch.tanh(value * weight)
    return torch.autograd.grad(value.sum(), (x, weight))


def test_worker_that_dies_after_all_have_reported_takes_nobody_elses_gradients(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks the root to give up, which has decided already: dropping its own part would lose it for good."""
    a, b, c = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", through, args=(x, ["c"])).sum()

        def lose_third(_: BackwardPass) -> None:
            engine = engine_of(b)
            engine._without_worker(pass_of(b, ctx), c.info.id, "c", "killed in a test")
            assert pass_of(b, ctx).is_undecided

        before_commit(a, monkeypatch, lose_third)
        ctx.backward(loss, timeout=20)
        wait_until(lambda: not context_of(b, ctx).passes)
        found = context_of(b, ctx).wait_gradients(5.0)
        assert layers.weight in found
        total = found[layers.weight] + context_of(c, ctx).wait_gradients(5.0)[layers.weight]
        assert torch.allclose(total, expected(2)[1])
        assert torch.allclose(ctx.gradients()[x], expected(2)[0])


def test_failure_after_the_decision_does_not_fail_the_root_alone(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", through, args=(x, [])).sum()
        engine = engine_of(a)
        before_commit(a, monkeypatch, lambda current: engine.fail(current, ValueError("too late"), "testing"))
        ctx.backward(loss, timeout=20)
        assert torch.allclose(ctx.gradients()[x], expected(1)[0])
        assert torch.allclose(context_of(b, ctx).wait_gradients(5.0)[layers.weight], expected(1)[1])


def test_root_hears_of_a_death_from_one_who_has_reported(trio: list[Agent]) -> None:
    """The root has never talked to the worker that dies, and would wait for its report for ever."""
    _, b, c = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", from_elsewhere, args=(x, "c", held_layer)).sum()

        def lose_third() -> None:
            wait_until(lambda: context_of(b, ctx).has_undecided_pass, 10.0, "that b has reported")
            engine_of(b)._on_worker_lost(c.address, "killed in a test")

        b.reactor.run_soon(lose_third)
        with pytest.raises(BackwardFailed, match="worker c is lost: killed in a test") as caught:
            ctx.backward(loss, timeout=20)
        gate.set()
        assert caught.value.worker == "c"
        assert "WorkerLost" in str(caught.value)
        wait_until(lambda: not context_of(b, ctx).passes, 20.0, "that b drops the pass")
        assert not context_of(b, ctx).gradients
        assert not ctx.gradients()
        c.close()  # nobody tells it of the end of the context: it counts as dead


def test_who_has_reported_drops_the_pass_of_a_root_that_dies(trio: list[Agent]) -> None:
    """Whether it has committed elsewhere is not to be known any more; nobody is left to ask for the gradients."""
    a, b, c = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", from_elsewhere, args=(x, "c", held_layer)).sum()

        def lose_root() -> None:
            wait_until(lambda: context_of(b, ctx).has_undecided_pass)
            engine_of(b)._on_worker_lost(a.address, "killed in a test")

        on_b, on_c = context_of(b, ctx), context_of(c, ctx)
        b.reactor.run_soon(lose_root)
        with pytest.raises(BackwardFailed):  # b tells c, which tells a
            ctx.backward(loss, timeout=20)
        gate.set()
        wait_until(lambda: not on_b.passes and not on_c.passes)
        assert not on_b.gradients
        assert not on_c.gradients
        engine_of(b).lost.discard(a.info.id)  # it lives, after all


def test_release_ends_a_pass_that_is_not_decided(trio: list[Agent]) -> None:
    """Whoever waits for its gradients on a participant must not wait for a root that has forgotten the context."""
    _, b, _ = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", from_elsewhere, args=(x, "c", held_layer)).sum()
        errors: list[BaseException] = []

        def release() -> None:
            engine_of(b).release(ctx)

        def read() -> None:
            wait_until(lambda: context_of(b, ctx).has_undecided_pass)
            context = context_of(b, ctx)
            b.reactor.run_soon(release)
            try:
                context.wait_gradients(20.0)
            except UnknownContext as error:
                errors.append(error)

        b.reactor.run_soon(read)
        with pytest.raises(BackwardFailed, match="released") as caught:
            ctx.backward(loss, timeout=20)
        gate.set()
        wait_until(lambda: errors, 20.0, "that the reader is told")
        assert "was released on worker b" in str(errors[0])
        assert not isinstance(caught.value.__cause__, WorkerLost)


def test_gradient_for_a_worker_that_is_taken_for_dead_fails_the_pass(trio: list[Agent]) -> None:
    """It may live, and take the gradient; but what it sends back was given up already, and would be missing."""
    a, b, _ = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", through, args=(x, [])).sum()
        engine_of(a)._on_worker_lost(b.address, "said somebody")
        with pytest.raises(BackwardFailed, match="worker b is lost") as caught:
            ctx.backward(loss, retain_graph=True, timeout=20)
        assert caught.value.worker == "b"
        assert not ctx.gradients()
        engine_of(a).lost.discard(b.info.id)
        ctx.backward(loss, timeout=20)
        assert torch.allclose(ctx.gradients()[x], expected(1)[0])


@pytest.mark.parametrize("problem", [MemoryError, RuntimeError])
def test_gradients_join_the_context_all_or_none(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch, problem: type[Exception]
) -> None:
    """There is no memory for the second of two sums: the pass fails, and the first is not kept either."""
    one, two = (torch.ones(3, requires_grad=True) for _ in range(2))
    num_added = itertools.count(1)

    def add(*args: Any) -> None:
        if next(num_added) == 2:
            raise problem("in a test")
        add_gradient(*args)

    with gw.autograd.context() as ctx:
        ctx.backward((one * two).sum())
        monkeypatch.setattr(sys.modules["gradwire.autograd.context"], "add_gradient", add)
        with pytest.raises(BackwardFailed, match="in a test"):
            ctx.backward((one * two).sum())
        assert [ctx.gradients()[leaf].tolist() for leaf in (one, two)] == [[1.0] * 3] * 2
        assert not context_of(trio[0], ctx).passes
