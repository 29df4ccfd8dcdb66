"""All or nothing: the root decides once, and who has reported waits for its word."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd import engine as endings
from gradwire.autograd import worker
from gradwire.autograd.backward_pass import BackwardPass
from gradwire.autograd.local_engine import add_gradient
from gradwire.errors import BackwardFailed, UnknownContext, WorkerLost
from gradwire.rpc import Agent
from gradwire.testing import wait_until
from unit.autograd import layers
from unit.autograd.layers import context_of, from_elsewhere, gate, held_layer, pass_of, through


def before_commit(agent: Agent, monkeypatch: pytest.MonkeyPatch, act: Callable[[BackwardPass], object]) -> None:
    """Does something between the root's decision and the moment when anybody hears of it."""
    engine = worker.of(agent).engine
    commit = engine.endings.commit

    def act_first(current: BackwardPass, others: Iterable[int]) -> None:
        act(current)
        commit(current, others)

    monkeypatch.setattr(engine.endings, "commit", act_first)


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
            engine = worker.of(b).engine
            engine._without_worker(pass_of(b, ctx), c.info.id, "c", "killed in a test")
            assert pass_of(b, ctx).is_undecided

        before_commit(a, monkeypatch, lose_third)
        ctx.backward(loss, timeout=20)
        wait_until(lambda: not context_of(b, ctx).passes)
        found = worker.of(b).gradients_of(context_of(b, ctx), 5.0)
        assert layers.weight in found
        total = found[layers.weight] + worker.of(c).gradients_of(context_of(c, ctx), 5.0)[layers.weight]
        assert torch.allclose(total, expected(2)[1])
        assert torch.allclose(ctx.gradients()[x], expected(2)[0])


def test_failure_after_the_decision_does_not_fail_the_root_alone(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", through, args=(x, [])).sum()
        engine = worker.of(a).engine
        before_commit(a, monkeypatch, lambda current: engine.endings.fail(current, ValueError("too late"), "testing"))
        ctx.backward(loss, timeout=20)
        assert torch.allclose(ctx.gradients()[x], expected(1)[0])
        assert torch.allclose(worker.of(b).gradients_of(context_of(b, ctx), 5.0)[layers.weight], expected(1)[1])


def test_root_hears_of_a_death_from_one_who_has_reported(trio: list[Agent]) -> None:
    """The root has never talked to the worker that dies, and would wait for its report for ever."""
    _, b, c = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", from_elsewhere, args=(x, "c", held_layer)).sum()

        def lose_third() -> None:
            wait_until(lambda: context_of(b, ctx).has_undecided_pass, 10.0, "that b has reported")
            worker.of(b).engine._on_worker_lost(c.address, "killed in a test")

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
            worker.of(b).engine._on_worker_lost(a.address, "killed in a test")

        b.reactor.run_soon(lose_root)
        with pytest.raises(BackwardFailed):  # b tells c, which tells a
            ctx.backward(loss, timeout=20)
        gate.set()
        wait_until(lambda: not context_of(b, ctx).passes and not context_of(c, ctx).passes)
        assert not context_of(b, ctx).gradients
        assert not context_of(c, ctx).gradients
        worker.of(b).engine.lost.discard(a.info.id)  # it lives, after all


def test_release_ends_a_pass_that_is_not_decided(trio: list[Agent]) -> None:
    """Whoever waits for its gradients on a participant must not wait for a root that has forgotten the context."""
    _, b, _ = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", from_elsewhere, args=(x, "c", held_layer)).sum()
        errors: list[BaseException] = []

        def release() -> None:
            worker.of(b).release(ctx)

        def read() -> None:
            wait_until(lambda: context_of(b, ctx).has_undecided_pass)
            context = context_of(b, ctx)
            b.reactor.run_soon(release)
            try:
                worker.of(b).gradients_of(context, 20.0)
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
        worker.of(a).engine._on_worker_lost(b.address, "said somebody")
        with pytest.raises(BackwardFailed, match="worker b is lost") as caught:
            ctx.backward(loss, retain_graph=True, timeout=20)
        assert caught.value.worker == "b"
        assert not ctx.gradients()
        worker.of(a).engine.lost.discard(b.info.id)
        ctx.backward(loss, timeout=20)
        assert torch.allclose(ctx.gradients()[x], expected(1)[0])


@pytest.mark.parametrize(
    ("problem", "error", "num_counted"), [(KeyboardInterrupt, KeyboardInterrupt, 2), (RuntimeError, BackwardFailed, 1)]
)
def test_gradients_join_the_context_all_or_none(
    trio: list[Agent],
    monkeypatch: pytest.MonkeyPatch,
    problem: type[BaseException],
    error: type[BaseException],
    num_counted: int,
) -> None:
    """Ctrl-C comes when one of two has joined: then that is done again. Without memory for a sum, the pass fails."""
    one, two = (torch.ones(3, requires_grad=True) for _ in range(2))
    num_added = itertools.count(1)

    def add(*args: Any) -> None:
        if next(num_added) == 2:
            raise problem("in a test")
        add_gradient(*args)

    with gw.autograd.context() as ctx:
        ctx.backward((one * two).sum())
        monkeypatch.setattr(endings, "add_gradient", add)
        with pytest.raises(error, match="in a test"):
            ctx.backward((one * two).sum())
        assert [ctx.gradients()[leaf].tolist() for leaf in (one, two)] == [[float(num_counted)] * 3] * 2
        assert not context_of(trio[0], ctx).passes
