"""Waiting threads look after the pass: no wait outlives its deadline, its worker, or the last thing that could move."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd import stall_detector
from gradwire.autograd.engine import _Run
from gradwire.autograd.local_engine import Found
from gradwire.errors import BackwardFailed, NotInitialized, RpcTimeout, UnsettledSend
from gradwire.rpc import Agent
from gradwire.testing import wait_until
from unit.autograd.layers import context_of, engine_of, entered, gate, held_layer, layer, pass_of

# -- Whoever waits looks after the pass: no wait outlives its deadline, its worker, or the last thing that could move ---


def test_fast_finds_an_unused_result_while_the_root_itself_stands_at_a_gate(trio: list[Agent]) -> None:
    """The send shares a node with the loss, so the run that began with the loss waits for it."""
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        hidden = x * 2
        rpc.rpc_sync("b", layer, args=(hidden,))
        with pytest.raises(UnsettledSend, match="layer") as caught:
            ctx.backward(hidden.sum(), mode="fast", timeout=20.0)
        assert caught.value.worker == "a"
        assert not ctx.gradients()
        ctx.backward(hidden.sum())
        assert torch.equal(ctx.gradients()[x], torch.full((3,), 2.0))


@pytest.mark.parametrize("is_gated", [False, True], ids=["waiting for the end", "standing at a gate"])
def test_deadline_holds_and_says_who_was_waited_for(trio: list[Agent], is_gated: bool) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        hidden = x * 2
        loss = rpc.rpc_sync("b", held_layer, args=(hidden,)).sum()
        if is_gated:
            loss = loss + hidden.sum()
        started = time.monotonic()
        with pytest.raises(
            BackwardFailed, match=r"timed out after 3 s.*held_layer.*to b.*still computing: b"
        ) as caught:
            ctx.backward(loss, timeout=3.0)
        assert time.monotonic() - started < 10.0
        assert isinstance(caught.value.__cause__, RpcTimeout)
        assert entered.is_set()
        gate.set()
        assert not ctx.gradients()


def test_pass_ends_with_its_worker(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    errors: list[BaseException] = []
    context = gw.autograd.context()
    ctx = context.__enter__()
    loss = rpc.rpc_sync("b", held_layer, args=(x,)).sum()

    def run_backward() -> None:
        try:
            ctx.backward(loss)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run_backward, name="runs-backward")
    thread.start()
    assert entered.wait(10)
    started = time.monotonic()
    trio[0].close()
    wait_until(lambda: not thread.is_alive(), 20.0, "that backward returns")
    assert time.monotonic() - started < 10.0
    (error,) = errors
    assert isinstance(error, BackwardFailed)
    assert isinstance(error.__cause__, NotInitialized)
    gate.set()
    context.__exit__()


def test_answer_that_another_thread_gives_does_not_wait_for_the_report(trio: list[Agent]) -> None:
    """What has no part in the loss is answered at once, while the rest still runs."""
    a = trio[0]
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", held_layer, args=(x,)).sum()
        rpc.rpc_sync("b", layer, args=(x,))  # not used: b says so at once
        thread = threading.Thread(target=ctx.backward, args=(loss,), name="runs-backward")
        thread.start()
        assert entered.wait(10)
        unused = list(context_of(a, ctx).sends)[1]
        wait_until(lambda: pass_of(a, ctx).state.is_settled(unused), 20.0, "that b's answer arrives")
        gate.set()
        thread.join(20)
        assert x in ctx.gradients()


# -- What is decided but has not begun yet is no stall ------------------------------------------------------------------


def count_probes(root: Agent, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with every probe of a root that is over."""
    prober = engine_of(root).prober
    probe, found = prober.probe, []

    def count(*args: Any) -> Any:
        found.append(probe(*args))
        return found[-1]

    monkeypatch.setattr(prober, "probe", count)
    return found


def test_run_that_waits_for_a_thread(trio: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, _ = trio
    probes = count_probes(a, monkeypatch)
    run = _Run.run

    def run_late(self: _Run) -> Found:
        if self._pass.own == b.info.id:
            wait_until(lambda: len(probes) >= 4, 10.0, "that the root has asked four times")
        return run(self)

    monkeypatch.setattr(_Run, "run", run_late)
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        ctx.backward(rpc.rpc_sync("b", layer, args=(x,)).sum(), mode="fast", timeout=20)
        assert len(probes) >= 4
        assert probes[2][b.info.id].num_running == 1
        assert x in ctx.gradients()


def test_pass_without_progress_is_logged_once(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stall_detector, "LONG_WAIT_S", 0.3)
    monkeypatch.setattr(stall_detector, "_PROBE_AFTER_S", {False: 0.1, True: 0.1})
    probes = count_probes(trio[0], monkeypatch)
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", held_layer, args=(x,)).sum()
        opener = threading.Thread(target=_open_gate_after, args=(probes, 12))
        opener.start()
        ctx.backward(loss, timeout=20.0)
        opener.join()
    (record,) = [record for record in caplog.records if "no progress" in record.getMessage()]
    text = record.getMessage()
    assert text.startswith("the backward pass has made no progress for 0 s: no gradient has arrived")
    assert (record.worker, record.context_id) == ("a", int(ctx))  # type: ignore[attr-defined]
    assert "held_layer" in text
    assert "still computing: b" in text


def _open_gate_after(probes: list[Any], count: int) -> None:
    wait_until(lambda: len(probes) >= count, 20.0, "the probes of the pass")
    gate.set()
