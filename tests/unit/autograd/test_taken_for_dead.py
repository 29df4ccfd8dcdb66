"""Workers that take each other for dead, and live: no context stays behind, and gradients are right once they are back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd.context import DistAutogradContext
from gradwire.errors import WorkerLost
from gradwire.rpc import Agent
from gradwire.testing import wait_until
from unit.autograd.layers import context_of, engine_of, layer, num_contexts


def wait_released(agents: list[Agent]) -> None:
    wait_until(lambda: not num_contexts(agents), 20.0, "that all have released the context")


def test_end_is_told_to_one_that_was_connected_again_before_its_loss_was_noted(trio: list[Agent]) -> None:
    a, b, _ = trio
    with gw.autograd.context() as ctx:
        rpc.rpc_sync("b", layer, args=(torch.ones(3, requires_grad=True),))
        engine_of(a)._on_worker_lost(b.address, "noted late")
        assert engine_of(a).lost == {b.info.id}
        assert context_of(b, ctx).recvs
    wait_released(trio)


def test_worker_taken_for_dead_between_recording_a_call_and_sending_it(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call opens a new connection, and all is well: neither the pass nor the end of the context leaves it out."""
    a, b, _ = trio
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    rpc.rpc_sync("b", torch.neg, args=(torch.ones(1),))
    record_send = DistAutogradContext.record_send

    def record_and_lose(self: DistAutogradContext, *args: Any) -> None:
        record_send(self, *args)
        monkeypatch.undo()
        a.on_worker_ended(b.address, "its connection ended", was_orderly=False)
        wait_until(lambda: b.has_ended("a"), 20.0, "that b takes a for dead, too")

    monkeypatch.setattr(DistAutogradContext, "record_send", record_and_lose)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", layer, args=(x,)).sum()
        ctx.backward(loss, timeout=20)
        found = ctx.gradients()[x]
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    assert torch.equal(found, expected)
    wait_released(trio)


@pytest.mark.parametrize("is_back", [False, True], ids=["gone", "connected again"])
def test_call_that_is_unpacked_after_the_loss_of_its_caller(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch, is_back: bool
) -> None:
    """The contexts of the caller have been looked through by then, so nobody would come for this one."""
    a, b, _ = trio
    container = engine_of(b).container
    get_or_create = container.get_or_create

    def lose_and_create(context_id: int, sender: int) -> DistAutogradContext | None:
        monkeypatch.undo()
        b.on_worker_ended(a.address, "its connection ended", was_orderly=False)
        if is_back:
            b.on_connected(a.address)
        return get_or_create(context_id, sender)

    monkeypatch.setattr(container, "get_or_create", lose_and_create)
    with gw.autograd.context() as ctx, pytest.raises(WorkerLost, match="layer on worker b failed"):
        rpc.rpc_sync("b", layer, args=(torch.ones(3, requires_grad=True),))
    wait_until(lambda: container.where_released(int(ctx)), 20.0, "that b has released the context")
    wait_released(trio)


def test_end_of_a_context_that_is_lost_with_its_connection(trio: list[Agent]) -> None:
    """The receiver gives the connection up, and knows that something may have been on it: it asks."""
    _, b, _ = trio
    handlers = b.notices._handlers
    on_release = handlers["~autograd.release"]

    def refuse(*_: Any) -> None:
        handlers["~autograd.release"] = on_release
        raise ValueError("on purpose")

    with gw.autograd.context() as ctx:
        rpc.rpc_sync("b", layer, args=(torch.ones(3, requires_grad=True),))
        handlers["~autograd.release"] = refuse
    wait_released(trio)
    where = engine_of(b).container.where_released(int(ctx))
    assert where is not None
    assert where.startswith("on worker a at test_taken_for_dead.py")
