"""All or nothing: the root decides once, and a worker that has reported waits for its word, and gets it."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd._backward_state import Action, PassPhase, Report
from gradwire.autograd.backward_pass import BackwardPass
from gradwire.autograd.messages import AbortPass, PassOptions, PropagateGradients, ReportDone
from gradwire.errors import BackwardFailed, UnknownContext, WorkerLost
from gradwire.params.grads import add_gradient
from gradwire.rpc import Agent
from gradwire.testing import wait_until
from unit.autograd import layers
from unit.autograd.layers import (
    context_of,
    engine_of,
    entered,
    from_elsewhere,
    gate,
    held_layer,
    num_contexts,
    pass_of,
    through,
    weight,
)

# -- All or nothing: the root decides once, and who has reported waits for its word -------------------------------------


def before_commit(agent: Agent, monkeypatch: pytest.MonkeyPatch, act: Callable[[BackwardPass], object]) -> None:
    """Does something between the root's decision and the moment when anybody hears of it."""
    engine = engine_of(agent)
    owe = engine.owe_commit

    def act_first(context_id: int, pass_id: int, ranks: Collection[int]) -> None:
        act(made[pass_id])
        owe(context_id, pass_id, ranks)

    made: dict[int, BackwardPass] = {}
    perform = engine._perform

    def note(current: BackwardPass, actions: Sequence[Action]) -> None:
        made[current.pass_id] = current
        perform(current, actions)

    monkeypatch.setattr(engine, "_perform", note)
    monkeypatch.setattr(engine, "owe_commit", act_first)


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
            waiting = pass_of(b, ctx)
            assert waiting.is_undecided
            engine_of(b)._without_worker(waiting, c.info.id, "c", "killed in a test")
            assert waiting.phase is not PassPhase.ABORTED

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


def double(x: torch.Tensor, watch: str = "") -> torch.Tensor:
    """Reach no leaf here; with hooks on what came, or on its node."""
    node: Any = x.grad_fn
    if watch == "tensor":
        x.register_hook(lambda gradient: gradient * 3)  # type: ignore[no-untyped-call]
    elif watch == "node":
        node.register_hook(lambda *_: None)
    return x * 2


@pytest.mark.parametrize(
    ("watch", "names"),
    [
        ("", ["autograd.propagate"]),
        ("tensor", ["autograd.propagate", "autograd.report"]),
        ("node", ["autograd.propagate", "autograd.report"]),
    ],
)
def test_report_goes_with_the_last_answer_unless_hooks_may_follow_it(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch, watch: str, names: list[str]
) -> None:
    _, b, _ = trio
    sent: list[str] = []
    send = b.notices.send

    def noted(to: str, name: str, *args: Any) -> None:
        sent.append(name)
        send(to, name, *args)

    monkeypatch.setattr(b.notices, "send", noted)
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        ctx.backward(rpc.rpc_sync("b", double, args=(x, watch)).sum(), timeout=20)
        assert sent == names
        assert torch.equal(ctx.gradients()[x], torch.full((3,), 6.0 if watch == "tensor" else 2.0))


def test_hook_that_fails_after_the_last_answer_fails_the_pass(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", fail_at_the_end, args=(x,)).sum()
        with pytest.raises(BackwardFailed, match="a hook that fails"):
            ctx.backward(loss, timeout=20)
        assert ctx.gradients() == {}


def fail_at_the_end(x: torch.Tensor) -> torch.Tensor:
    def fail(*_: Any) -> None:
        raise ValueError("a hook that fails")

    node: Any = x.grad_fn
    node.register_hook(fail)
    return x * 2


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


# -- Who has reported waits for the root's word, and always gets it -----------------------------------------------------


def test_root_answers_the_one_that_told_it_of_a_death(trio: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    """The dead worker is the only other one that the reporter has talked to, so nobody else can tell it."""
    _, b, c = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", from_elsewhere, args=(x, "c", held_layer)).sum()

        def lose_third() -> None:
            wait_until(lambda: context_of(b, ctx).has_undecided_pass)
            assert entered.wait(10)
            monkeypatch.setattr(engine_of(c), "tell", lambda *_, **__: False)  # it passes nothing on, like the dead
            engine_of(b)._on_worker_lost(c.address, "killed in a test")

        b.reactor.run_soon(lose_third)
        with pytest.raises(BackwardFailed, match="worker c is lost"):
            ctx.backward(loss, timeout=20)
        wait_until(lambda: not context_of(b, ctx).passes, 20.0, "that b drops the pass")
        gate.set()
        wait_until(lambda: not context_of(c, ctx).passes, 20.0, "that c drops the pass")
        assert not context_of(b, ctx).gradients
    wait_until(lambda: not num_contexts(trio), 20.0, "that c, which is not dead, hears of the end of the context")


def test_report_of_a_pass_that_has_failed_is_answered(trio: list[Agent]) -> None:
    """One that joins by a late message of a dead worker reports to a root that has told everybody it knew."""
    a, b, _ = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", through, args=(x, [])).sum()
        ctx.backward(loss, retain_graph=True, timeout=20)
        (committed,) = context_of(a, ctx).ended_passes
        loss.register_hook(_raise)
        with pytest.raises(BackwardFailed, match="on purpose"):
            ctx.backward(loss, timeout=20)
        _, failed = context_of(a, ctx).ended_passes
        wait_until(lambda: not context_of(b, ctx).passes)
        ended = context_of(b, ctx).ended_passes
        ended.clear()
        for pass_id in (committed, failed):
            b.notices.send("a", "autograd.report", ReportDone(int(ctx), pass_id, Report(())))
        wait_until(lambda: ended.get(failed) is False, 20.0, "that b is told")
        assert committed not in ended


def test_who_asks_for_the_end_of_a_pass_that_is_over_is_told_how_it_ended(trio: list[Agent]) -> None:
    """Its report, or the answer to it, may have been on a connection that was cut off: it minds nobody but the root."""
    a, b, _ = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", through, args=(x, [])).sum()
        ctx.backward(loss, retain_graph=True, timeout=20)
        loss.register_hook(_raise)
        with pytest.raises(BackwardFailed, match="on purpose"):
            ctx.backward(loss, timeout=20)
        committed, failed = context_of(a, ctx).ended_passes
        at_b = context_of(b, ctx)
        wait_until(lambda: not at_b.passes)
        at_b.gradients.clear()
        at_b.ended_passes.clear()
        engine = engine_of(b)
        waiting = {pass_id: _make_waiting_pass(b, ctx, pass_id) for pass_id in (committed, failed)}
        for current in waiting.values():
            engine.fail(current, ValueError("its connection was cut off"), "waiting")
        wait_until(lambda: not at_b.passes, 20.0, "that b is told of both")
        assert waiting[committed].phase is PassPhase.COMMITTED
        assert waiting[failed].phase is PassPhase.ABORTED
        assert list(at_b.gradients) == [weight]


def _make_waiting_pass(agent: Agent, context_id: int, pass_id: int) -> BackwardPass:
    """A pass that is done on a worker, with a gradient, and not decided."""
    context = context_of(agent, context_id)
    make = partial(BackwardPass, agent.info.id, pass_id, context, PassOptions(timeout_s=20.0))
    current = context.begin_pass(pass_id, make)
    assert current is not None
    current.gradients = {weight: torch.ones(3)}
    current.run_hooks()
    return current


def test_abort_that_overtakes_the_message_it_is_about(trio: list[Agent]) -> None:
    """The pass is not begun when that message comes."""
    a, b, _ = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        rpc.rpc_sync("b", through, args=(x, []))
        at_b, engine = context_of(b, ctx), engine_of(b)
        pass_id = engine_of(a).container.new_message_id()
        failure = engine_of(a).describe(BackwardFailed("on purpose", "a", "waiting"))
        engine._on_abort(a.info, AbortPass(int(ctx), pass_id, failure), [])
        engine._on_propagate(a.info, PropagateGradients(int(ctx), pass_id, PassOptions(timeout_s=20.0), ()), [])
        assert not at_b.passes
        assert at_b.ended_passes == {pass_id: False}


def _raise(_: torch.Tensor) -> None:
    raise ValueError("on purpose")


def test_two_passes_of_a_context_that_end_at_once_are_both_committed(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second ends while the first looks up what is due; it must wait until the first has replaced that."""
    engine = engine_of(trio[0])
    told: list[int] = []
    second = threading.Thread(target=lambda: engine.owe_commit(context_id, 2, [1]))

    class Due(dict[int, tuple[int, frozenset[int], float]]):
        def get(self, *args: Any) -> Any:
            found = super().get(*args)
            if second.ident is None:
                second.start()
                wait_until(lambda: not second.is_alive() or engine._owing.locked(), 30.0, "the second")
            return found

    def note(ranks: Collection[int], _: str, message: Any) -> None:
        told.extend([message.pass_id] if ranks else [])

    monkeypatch.setattr(engine, "_tell_all", note)
    monkeypatch.setattr(engine, "due", Due())
    with gw.autograd.context() as ctx:
        context_id = int(ctx)
        engine.owe_commit(context_id, 1, [1])
        second.join(30.0)
        engine.tell_due()
        assert sorted(told) == [1, 2]
