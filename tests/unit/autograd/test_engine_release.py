"""Contexts end on every worker that they have touched."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd.context import DistAutogradContext
from gradwire.autograd.messages import HoldsContext, ReleaseContext
from gradwire.errors import ConnectFailed, RpcTimeout, UnknownContext, WorkerLost
from gradwire.rpc import Agent
from gradwire.testing import LeakCheck, LeakFound, wait_until
from gradwire.testing.leaks import contexts_left
from unit.autograd.layers import (
    context_of,
    engine_of,
    entered,
    gate,
    held_layer,
    here,
    inside,
    layer,
    num_contexts,
    through,
)

# -- A context ends everywhere, whoever is gone by then -----------------------------------------------------------------


def wait_at_gate(x: torch.Tensor) -> torch.Tensor:
    entered.set()
    assert gate.wait(20)
    return layer(x)


def relay_after_gate(x: torch.Tensor, name: str) -> torch.Tensor:
    """Calls on when the context may be over."""
    entered.set()
    assert gate.wait(20)
    value: torch.Tensor = here().call(name, layer, (x,))
    return value


def test_release_reaches_workers_that_the_creator_never_talked_to(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        rpc.rpc_sync("b", through, args=(x, ["c"]))
        assert num_contexts(trio) == 3
        assert context_of(trio[0], ctx)._known_worker_ids() == {1}
    wait_until(lambda: not num_contexts(trio), 20.0, "that all have released it")
    with pytest.raises(
        UnknownContext, match=rf"id: {int(ctx)}. It was released on worker a at test_engine_release.py:\d+, in te"
    ):
        context_of(trio[2], ctx)


def test_release_reaches_those_behind_a_worker_that_is_gone(trio: list[Agent]) -> None:
    """Nobody else knows that the third has the context: it says so itself when the one in the middle ends."""
    a, b, c = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        rpc.rpc_sync("b", through, args=(x, ["c"]))
        b.close()
        wait_until(lambda: context_of(a, ctx)._known_worker_ids() == {1, 2}, 20.0, "that c asks to be told")
        assert len(engine_of(c).container) == 1
    wait_until(lambda: not num_contexts([a, c]), 20.0, "that c has released it")


def test_context_ends_when_neither_its_creator_nor_who_brought_it_is_left(trio: list[Agent]) -> None:
    a, b, c = trio
    x = torch.ones(3, requires_grad=True)
    context_id = engine_of(a).container.new_context().context_id
    with inside(context_id):
        rpc.rpc_sync("b", through, args=(x, ["c"]))
    a.notices._handlers.pop("~autograd.holds")  # it dies before it hears of it
    a.close()
    b.close()
    wait_until(lambda: not num_contexts([c]), 20.0, "that c gives it up")
    with pytest.raises(UnknownContext, match="released because rank"):
        context_of(c, context_id)


@pytest.mark.parametrize("error", [ConnectFailed("no route"), RpcTimeout("no answer", "a", "connect")])
def test_context_ends_when_its_maker_is_suspected_and_out_of_reach_here_too(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The one that suspects it is not believed; but one that cannot ask would keep the context for ever."""
    a, b, c = trio
    x = torch.ones(3, requires_grad=True)
    context_id = engine_of(a).container.new_context().context_id
    with inside(context_id):
        rpc.rpc_sync("b", through, args=(x, ["c"]))

    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(c.peers.peer("a"), "lane", refuse)
    b.notices.send("c", "autograd.release", ReleaseContext(context_id, "by b, which cannot reach a", True))
    wait_until(lambda: not num_contexts([c]), 20.0, "that c gives it up")
    wait_until(lambda: engine_of(a).release(context_id), 20.0)
    wait_until(lambda: not num_contexts(trio), 20.0, "that b is told of the end by a")


def test_who_asks_for_a_context_that_is_over_is_told_so(trio: list[Agent]) -> None:
    a, b, c = trio
    with gw.autograd.context() as ctx:
        pass
    made_late = engine_of(c).container.get_or_create(int(ctx), 0)
    assert made_late is not None
    engine_of(c).tell(0, "autograd.holds", HoldsContext(int(ctx)))
    wait_until(lambda: not num_contexts(trio))
    assert made_late.released is not None
    assert made_late.released.startswith("on worker a at test_engine_release.py")
    never_made = engine_of(b).container.get_or_create(int(ctx) + 1000, 0)
    assert never_made is not None
    engine_of(b).tell(0, "autograd.holds", HoldsContext(int(ctx) + 1000))
    wait_until(lambda: never_made.released, 20.0)
    assert never_made.released == "on worker a long ago"
    assert len(engine_of(a).container) == 0


def test_release_may_come_twice_and_before_the_call(trio: list[Agent]) -> None:
    a, b, _ = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        for _ in range(2):
            a.notices.send("b", "autograd.release", ReleaseContext(int(ctx), "by a test"))
        wait_until(lambda: engine_of(b).container.where_released(ctx))
        assert rpc.rpc_sync("b", torch.neg, args=(torch.ones(3),)).tolist() == [-1.0] * 3  # no gradient to be lost
        with pytest.raises(UnknownContext, match=r"on worker b when .*layer returned: it was released by a test"):
            rpc.rpc_sync("b", layer, args=(x,))
        assert num_contexts(trio) == 1
        with pytest.raises(UnknownContext, match="released by a test"):
            context_of(b, ctx)


def test_result_of_a_worker_that_released_the_context_is_refused(trio: list[Agent]) -> None:
    """It took the caller for dead, say: what comes back leads nowhere, and backward would miss what is behind it."""
    x = torch.ones(3, requires_grad=True)
    entered.clear()
    gate.clear()
    with gw.autograd.context() as ctx:
        direct = rpc.rpc_async("b", wait_at_gate, args=(x,))
        nested = rpc.rpc_async("c", relay_after_gate, args=(x, "b"))
        wait_until(lambda: num_contexts(trio) == 3)
        for agent in trio[1:]:
            engine_of(agent).container.release(ctx, "by mistake")
        gate.set()
        for future in (direct, nested):
            with pytest.raises(UnknownContext, match="it was released by mistake"):
                future.wait()


def test_context_released_while_a_call_is_under_way(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    entered.clear()
    gate.clear()
    with gw.autograd.context() as ctx:
        future = rpc.rpc_async("b", wait_at_gate, args=(x,))
        assert entered.wait(10)
    wait_until(lambda: not num_contexts(trio))
    gate.set()
    assert torch.allclose(future.wait().detach(), layer(x).detach())
    assert num_contexts(trio) == 0
    with pytest.raises(UnknownContext):
        gw.autograd.get_gradients(ctx)


def test_call_made_after_the_release_does_not_carry_the_context_on(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    entered.clear()
    gate.clear()
    with gw.autograd.context():
        future = rpc.rpc_async("b", relay_after_gate, args=(x, "c"))
        assert entered.wait(10)
    wait_until(lambda: not num_contexts(trio))
    gate.set()
    assert future.wait().shape == (3,)
    assert num_contexts(trio) == 0


def test_call_that_meets_the_release_does_not_carry_the_context_on(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds the context, and then the context is released, before the call has noted whom it goes to."""
    container = engine_of(trio[0]).container
    find = container.find
    with gw.autograd.context() as ctx:

        def find_and_lose(context_id: int) -> Any:
            context = find(context_id)
            if context is not None and threading.current_thread() is threading.main_thread():
                monkeypatch.setattr(container, "find", find)
                engine_of(trio[0]).release(ctx)
            return context

        monkeypatch.setattr(container, "find", find_and_lose)
        rpc.rpc_sync("b", layer, args=(torch.ones(3, requires_grad=True),))
    assert num_contexts(trio) == 0


# -- Workers that take each other for dead, and live: no context stays behind, and gradients are right once they are back ---


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
    assert where.startswith("on worker a at test_engine_release.py")


# -- A context or pass that a test leaves behind is found and named -----------------------------------------------------


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
