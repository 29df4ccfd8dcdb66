"""Who waits for whom: as text, as JSON, and from another thread while a pass is under way."""

from __future__ import annotations

import json
import re
import threading

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd._backward_state import PassSnapshot, WaitingSend
from gradwire.autograd.explanation import Explanation, waiting_text
from gradwire.errors import UnknownContext
from gradwire.rpc import Agent
from gradwire.testing import wait_until
from unit.autograd.layers import context_of, entered, gate, held_layer, layer, pass_of, through


def test_context_at_rest(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        rpc.rpc_sync("b", through, args=(x, ["c"]))
        explanation = gw.autograd.explain(ctx)
        assert isinstance(explanation, Explanation)
        assert [line.strip() for line in str(explanation).splitlines()] == [
            f"context {int(ctx)}:",
            "a: 1 send, 1 recv, gradients of 0 leaves, 0 passes in progress",
            "b: 2 sends, 2 recvs, gradients of 0 leaves, 0 passes in progress",
            "c: 1 send, 1 recv, gradients of 0 leaves, 0 passes in progress",
        ]
        found = json.loads(explanation.as_json())
        assert found["context_id"] == ctx
        (first, second, third) = found["workers"]
        assert (first["worker"], first["known_workers"]) == ("a", [1])
        assert [send["peer"] for send in second["sends"]] == ["c", "a"]
        assert third["recvs"][0]["function"] == "unit.autograd.layers:through"
        assert "in test_context_at_rest" in first["sends"][0]["site"]


def test_gradients_are_counted(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        ctx.backward(rpc.rpc_sync("b", layer, args=(x,)).sum())
        context_of(trio[1], ctx).wait_gradients(5.0)  # until b has heard of the commit
        views = {view.worker: view.num_gradients for view in ctx.explain().workers}
    assert views == {"a": 1, "b": 1}


@pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "at a gate"])
def test_pass_under_way(trio: list[Agent], is_gated: bool) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        hidden = x * 2
        loss = rpc.rpc_sync("b", held_layer, args=(hidden,)).sum()
        if is_gated:
            loss = loss + hidden.sum()
        thread = threading.Thread(target=ctx.backward, args=(loss,), name="runs-backward")
        thread.start()
        assert entered.wait(10)
        wait_until(lambda: bool(pass_of(trio[0], ctx)._gates) == is_gated, 20.0, "that a stands at its gate")
        explanation = ctx.explain()
        gate.set()
        thread.join(20)
        assert x in ctx.gradients()
    text = str(explanation)
    assert "1 pass in progress" in text
    assert "(smart, begun by a): running" in text
    assert "a waits for b: send 0x" in text
    assert "held_layer (test_explanation.py:" in text
    assert "b computes (1 run of the local engine)" in text
    assert ("a run of the local engine is blocked on it" in text) == is_gated
    (first, second) = json.loads(explanation.as_json())["workers"]
    (mine,), (theirs,) = first["passes"], second["passes"]
    assert mine["pass_id"] == theirs["pass_id"]
    assert mine["root"] == theirs["root"] == "a"
    (waiting,) = mine["waiting"]
    assert (first["worker"], waiting["peer"], waiting["is_gate"]) == ("a", "b", is_gated)
    assert theirs["num_running"] == 1


def test_shortcut_that_was_taken(trio: list[Agent]) -> None:
    """a passes on to c what came from b, so that b waits for c."""
    _, b, c = trio
    x = torch.ones(3, requires_grad=True)
    c.call("b", layer, (torch.ones(3),))  # shortcuts are taken to workers that are connected
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("c", held_layer, args=(rpc.rpc_sync("b", layer, args=(x,)),)).sum()
        thread = threading.Thread(target=ctx.backward, args=(loss,), name="runs-backward")
        thread.start()
        assert entered.wait(10)
        wait_until(lambda: bool(context_of(b, ctx).passes), 20.0, "that b joins")
        assert pass_of(c, ctx).state.taken
        text, graph = str(ctx.explain()), ctx.graph(loss)
        gate.set()
        thread.join(20)
        assert x in ctx.gradients()
    assert "b waits for c: send 0x" in text
    assert "on worker b to a, which forwarded it unchanged to c" in text
    assert {(item.waits_for, item.is_result) for item in graph.messages if item.waits_for} == {
        ("b", False),
        ("c", True),
    }


def test_shortcut_that_was_not_taken(trio: list[Agent]) -> None:
    """c is not connected to b, so its gradient comes to b through a, which waits for nothing of its own."""
    _, b, c = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("c", held_layer, args=(rpc.rpc_sync("b", layer, args=(x,)),)).sum()
        thread = threading.Thread(target=ctx.backward, args=(loss,), name="runs-backward")
        thread.start()
        assert entered.wait(10)
        wait_until(lambda: bool(context_of(b, ctx).passes), 20.0, "that b joins")
        is_taken = bool(pass_of(c, ctx).state.taken)
        text = str(ctx.explain())
        gate.set()
        thread.join(20)
        assert x in ctx.gradients()
    assert not is_taken
    assert "b waits for a: send 0x" in text
    assert re.search(r"a forwarded send 0x\w+ unchanged to c and waits for its reply", text)


def test_worker_that_is_gone(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        rpc.rpc_sync("b", through, args=(x, ["c"]))
        trio[1].close()
        text = str(ctx.explain())
        assert "b does not answer" in text
        assert "a: 1 send," in text


def test_worker_without_the_context(trio: list[Agent]) -> None:
    with gw.autograd.context() as ctx:
        with torch.no_grad(), pytest.raises(UnknownContext, match="Rank 1 has never taken part in it"):
            rpc.rpc_sync("b", gw.autograd.explain, args=(int(ctx),))
        assert "a: 0 sends, 0 recvs" in str(ctx.explain())


def test_waiting_in_one_sentence() -> None:
    send = WaitingSend(0xABC, "a", "b", "layers:layer", "train.py:3, in step")
    assert str(send) == "send 0xabc of layers:layer (train.py:3, in step) on worker a to b"
    waits, works = PassSnapshot("a", waiting=(send,)), PassSnapshot("b", num_running=1)
    assert waiting_text({0: waits, 1: works}) == f"no gradient has arrived for {send}; still computing: b"
    assert waiting_text({1: works}) == "still computing: b"
    assert waiting_text({0: PassSnapshot("a")}) == "no worker reports what it is waiting for"
