"""Who has reported waits for the root's word, and always gets it."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd import worker
from gradwire.autograd.messages import ReportDone
from gradwire.errors import BackwardFailed
from gradwire.rpc import Agent
from gradwire.testing import wait_until
from unit.autograd.layers import context_of, entered, from_elsewhere, gate, held_layer, num_contexts, through


def test_root_answers_the_one_that_told_it_of_a_death(trio: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    """The dead worker is the only other one that the reporter has talked to, so nobody else can tell it."""
    _, b, c = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", from_elsewhere, args=(x, "c", held_layer)).sum()

        def lose_third() -> None:
            wait_until(lambda: context_of(b, ctx).has_undecided_pass)
            assert entered.wait(10)
            monkeypatch.setattr(
                worker.of(c).engine.endings, "tell", lambda *_: False
            )  # it passes nothing on, like the dead
            worker.of(b).engine._on_worker_lost(c.address, "killed in a test")

        b.reactor.run_soon(lose_third)
        with pytest.raises(BackwardFailed, match="worker c is lost"):
            ctx.backward(loss, timeout=20)
        wait_until(lambda: not context_of(b, ctx).passes, 5.0, "that b drops the pass")
        gate.set()
        wait_until(lambda: not context_of(c, ctx).passes, 5.0, "that c drops the pass")
        assert not context_of(b, ctx).gradients
    wait_until(lambda: not num_contexts(trio), 5.0, "that c, which is not dead, hears of the end of the context")


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
            b.notices.send("a", "autograd.report", ReportDone(int(ctx), pass_id, ()))
        wait_until(lambda: ended.get(failed) is False, 5.0, "that b is told")
        assert committed not in ended


def _raise(_: torch.Tensor) -> None:
    raise ValueError("on purpose")
