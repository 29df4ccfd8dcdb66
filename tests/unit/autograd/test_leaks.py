"""A context or pass that a test leaves behind is found and named."""

from __future__ import annotations

import threading

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.rpc import Agent
from gradwire.testing import LeakCheck, LeakFound
from gradwire.testing.leaks import contexts_left
from unit.autograd.layers import engine_of, entered, gate, held_layer


def test_context_is_named_with_its_worker(trio: list[Agent]) -> None:
    check = LeakCheck(timeout_s=0.05)
    context = engine_of(trio[1]).container.new_context()
    assert check.leaks() == [f"autograd context {context.context_id} on worker b"]
    with pytest.raises(LeakFound, match=f"autograd context {context.context_id} on worker b"):
        check.check()
    engine_of(trio[1]).release(context.context_id)
    check.check()
    assert check.leaks() == []


def test_contexts_of_all_workers_and_passes_are_found(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", held_layer, args=(x,)).sum()
        rpc.rpc_sync("c", torch.neg, args=(x.detach(),))  # has no part in the pass
        thread = threading.Thread(target=ctx.backward, args=(loss,), name="runs-backward")
        thread.start()
        assert entered.wait(10)
        found = sorted(contexts_left())
        gate.set()
        thread.join(20)
    assert [text.rpartition(" ")[2] for text in found if text.startswith("pass")] == ["a", "b"]
    assert [text for text in found if not text.startswith("pass")] == [f"{int(ctx)} on worker {name}" for name in "abc"]


def test_workers_that_are_closed_do_not_count(trio: list[Agent]) -> None:
    engine_of(trio[2]).container.new_context()
    assert len(contexts_left()) == 1
    trio[2].close()
    assert contexts_left() == {}
