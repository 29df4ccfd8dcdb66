"""Who has reported waits for the root's word, and always gets it."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd._backward_state import PassPhase, Report
from gradwire.autograd.backward_pass import BackwardPass
from gradwire.autograd.messages import AbortPass, PassOptions, PropagateGradients, ReportDone
from gradwire.errors import BackwardFailed
from gradwire.rpc import Agent
from gradwire.testing import wait_until
from unit.autograd.layers import (
    context_of,
    engine_of,
    entered,
    from_elsewhere,
    gate,
    held_layer,
    num_contexts,
    through,
    weight,
)


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
