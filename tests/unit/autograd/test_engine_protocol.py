"""Messages that repeat, come late, go to the worker itself, or should not be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd._backward_state import Report
from gradwire.autograd.messages import (
    AbortPass,
    CommitPass,
    GradientItem,
    PassOptions,
    PropagateGradients,
    ReportDone,
)
from gradwire.errors import BackwardFailed, UnknownContext
from gradwire.rpc import Agent
from gradwire.rpc.oneway import Notices
from gradwire.testing import wait_until
from gradwire.types import WorkerInfo
from gradwire.wire.messages import ErrorInfo
from unit.autograd import layers
from unit.autograd.layers import context_of, engine_of, entered, gate, held_layer, layer, num_contexts, pass_of, through

# -- Messages that repeat, come late, or should not be: added once, ignored, or an error that names what is wrong -------


Change = Callable[[PropagateGradients, Sequence[torch.Tensor]], tuple[Any, Sequence[torch.Tensor]]]


def expected(num_layers: int) -> tuple[torch.Tensor, ...]:
    """Gradients of input and weight in one process."""
    x, weight = torch.ones(3, requires_grad=True), layers.weight.detach().clone().requires_grad_()
    value = x
    for _ in range(num_layers):
        value = torch.tanh(value * weight)
    return torch.autograd.grad(value.sum(), (x, weight))


def change_gradients(monkeypatch: pytest.MonkeyPatch, agent: Agent, change: Change) -> None:
    """Lets a worker send other gradients than it should, once."""
    send = agent.notices.send

    def send_changed(to: str, name: str, note: Any, tensors: Any = (), *args: Any, **options: Any) -> None:
        if name == "autograd.propagate" and note.items:
            monkeypatch.setattr(agent.notices, "send", send)
            note, tensors = change(note, tensors)
        send(to, name, note, tensors, *args, **options)

    monkeypatch.setattr(agent.notices, "send", send_changed)


def check_works(trio: list[Agent]) -> None:
    """A fresh forward and backward equals one process, and nothing is left of what was before."""
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        ctx.backward(rpc.rpc_sync("b", through, args=(x, ["c"])).sum(), timeout=20)
        assert torch.allclose(ctx.gradients()[x], expected(2)[0])
    wait_until(lambda: not num_contexts(trio), 20.0, "that no context is left")


# -- repeats -----------------------------------------------------------------------------------------------------------


def test_every_message_twice(trio: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients, reports and commits are sent twice by all; each gradient is added once."""
    send = Notices.send

    def send_twice(self: Notices, *args: Any, **kwargs: Any) -> None:
        send(self, *args, **kwargs)
        send(self, *args, **kwargs)

    monkeypatch.setattr(Notices, "send", send_twice)
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", through, args=(x, ["c"])).sum()
        for number in (1, 2):
            ctx.backward(loss, retain_graph=True, timeout=20)
            total = sum(context_of(agent, ctx).wait_gradients(5.0)[layers.weight] for agent in trio[1:])
            assert torch.allclose(ctx.gradients()[x], number * expected(2)[0])
            assert torch.allclose(torch.as_tensor(total), number * expected(2)[1])
    wait_until(lambda: not num_contexts(trio))


def test_gradient_that_comes_again_with_another_value_does_not_count(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, _ = trio
    x = torch.ones(3, requires_grad=True)
    send = a.notices.send

    def send_and_repeat(to: str, name: str, note: Any, tensors: Any = (), *args: Any, **options: Any) -> None:
        send(to, name, note, tensors, *args, **options)
        if name == "autograd.propagate":
            send(to, name, note, [tensor * 100 for tensor in tensors], *args, **options)

    monkeypatch.setattr(a.notices, "send", send_and_repeat)
    with gw.autograd.context() as ctx:
        ctx.backward(rpc.rpc_sync("b", layer, args=(x,)).sum(), timeout=20)
        assert torch.allclose(ctx.gradients()[x], expected(1)[0])


# -- gradients that cannot be ------------------------------------------------------------------------------------------


def as_unknown_send(note: PropagateGradients, tensors: Sequence[torch.Tensor]) -> tuple[Any, Sequence[torch.Tensor]]:
    (item,) = note.items
    other = GradientItem(item.message_id + 5000, item.defined)
    return PropagateGradients(note.context_id, note.pass_id, note.options, (other,), note.introduction), tensors


def as_too_many(note: PropagateGradients, tensors: Sequence[torch.Tensor]) -> tuple[Any, Sequence[torch.Tensor]]:
    (item,) = note.items
    other = GradientItem(item.message_id, (True, True))
    return PropagateGradients(note.context_id, note.pass_id, note.options, (other,), note.introduction), [*tensors] * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda note, tensors: (note, [tensors[0][:2]]), r"gradient 0 has shape \(2,\), not \(3,\)"),
        (lambda note, tensors: (note, [tensors[0].double()]), "gradient 0 has dtype torch.float64, not torch.float32"),
        (lambda note, tensors: (note, []), "a message from a is missing gradients"),
        (lambda note, tensors: (note, [*tensors, *tensors]), "carries 1 more gradients than it lists"),
        (as_too_many, "got 2 for 1 tensors"),
        (as_unknown_send, "which this worker did not send to rank 0 in this context"),
    ],
    ids=["shape", "dtype", "none", "one more", "two for one", "unknown send"],
)
def test_wrong_gradients_from_a_worker_fail_the_pass_by_name(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch, change: Change, words: str
) -> None:
    a, b, _ = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", layer, args=(x,)).sum()
        change_gradients(monkeypatch, a, change)
        with pytest.raises(BackwardFailed, match=words) as caught:
            ctx.backward(loss, timeout=20)
        assert (caught.value.worker, caught.value.operation) == ("b", "taking gradients from a")
        assert ctx.gradients() == {}
        assert not context_of(b, ctx).passes
        assert not context_of(b, ctx).gradients
        ctx.backward(loss, timeout=20)  # nothing was run there, so the graph is still there
        assert torch.allclose(ctx.gradients()[x], expected(1)[0])
    check_works(trio)


def test_gradient_for_a_send_to_somebody_else_is_refused(trio: list[Agent]) -> None:
    """The third worker answers for a message that only the second got."""
    a, _, c = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", held_layer, args=(x,)).sum()
        (message_id,) = context_of(a, ctx).sends

        def answer_for_another() -> None:
            assert entered.wait(10)
            note = PropagateGradients(
                int(ctx), pass_of(a, ctx).pass_id, PassOptions(), (GradientItem(message_id, (True,)),)
            )
            c.notices.send("a", "autograd.propagate", note, [torch.full((3,), 1e6)])

        c.reactor.run_soon(answer_for_another)
        with pytest.raises(BackwardFailed, match="which this worker did not send to rank 2") as caught:
            ctx.backward(loss, timeout=20)
        gate.set()
        assert caught.value.operation == "taking gradients from c"
        assert ctx.gradients() == {}
    check_works(trio)


# -- contexts and passes that are over -----------------------------------------------------------------------------------


def test_gradient_for_a_released_context_fails_the_pass(trio: list[Agent]) -> None:
    b = trio[1]
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", layer, args=(x,)).sum()
        engine_of(b).container.release(ctx, "by mistake")
        with pytest.raises(BackwardFailed, match="was released by mistake") as caught:
            ctx.backward(loss, timeout=20)
        assert caught.value.worker == "b"
    check_works(trio)


def test_gradient_for_a_context_that_never_was(trio: list[Agent]) -> None:
    """It is nobody's: the worker that is said to have made it says that it is over."""
    a, b, _ = trio
    own = engine_of(b).container.new_message_id()  # as if b had made a context of that number
    note = PropagateGradients(own, 1, PassOptions(), (GradientItem(5, (True,)),))
    a.notices.send("b", "autograd.propagate", note, [torch.ones(3)])
    rpc.rpc_sync("b", layer, args=(torch.ones(3),))
    check_works(trio)
    with pytest.raises(UnknownContext):
        context_of(b, own)


def test_messages_of_a_pass_that_is_over_are_ignored(trio: list[Agent]) -> None:
    a, b, _ = trio
    x = torch.ones(3, requires_grad=True)
    seen: list[tuple[PropagateGradients, list[torch.Tensor]]] = []
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", layer, args=(x,)).sum()
        handler = b.notices._handlers["~autograd.propagate"]

        def note_and_handle(sender: WorkerInfo, note: Any, tensors: list[torch.Tensor]) -> None:
            seen.append((note, tensors))
            handler(sender, note, tensors)

        b.notices.register("autograd.propagate", note_and_handle, PropagateGradients)
        ctx.backward(loss, retain_graph=True, timeout=20)
        found = context_of(b, ctx).wait_gradients(5.0)[layers.weight]
        (note, tensors) = seen[0]
        a.notices.send("b", "autograd.propagate", note, tensors)
        wait_until(lambda: len(seen) == 2)
        ctx.backward(loss, timeout=20)  # comes behind it
        wait_until(lambda: not context_of(b, ctx).passes)  # of both passes; the late message has begun none
        again = context_of(b, ctx).wait_gradients(5.0)[layers.weight]
        assert torch.allclose(again, 2 * found)


def test_abort_before_the_first_message_of_a_pass(trio: list[Agent]) -> None:
    """They come from different workers, so the order is open; the pass must not begin after its end."""
    a, b, c = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        rpc.rpc_sync("b", through, args=(x, ["c"]))
        pass_id = engine_of(a).container.new_message_id()
        abort = AbortPass(int(ctx), pass_id, ErrorInfo("builtins:ValueError", "no", "", "c"))
        c.notices.send("b", "autograd.abort", abort)
        wait_until(lambda: pass_id in context_of(b, ctx).ended_passes)
        message_id = max(context_of(b, ctx).sends)
        note = PropagateGradients(int(ctx), pass_id, PassOptions(), (GradientItem(message_id, (True,)),))
        a.notices.send("b", "autograd.propagate", note, [torch.ones(3)])
        assert rpc.rpc_sync("b", layer, args=(x,)).shape == (3,)
        a.notices.send("b", "autograd.commit", CommitPass(int(ctx), pass_id))
        ctx.backward(rpc.rpc_sync("b", layer, args=(x,)).sum(), timeout=20)
        assert torch.allclose(ctx.gradients()[x], expected(1)[0])
        found = context_of(b, ctx).wait_gradients(5.0)[layers.weight]
        assert torch.allclose(found, expected(1)[1])


def test_only_the_root_commits_and_only_it_counts_reports(trio: list[Agent]) -> None:
    _, b, c = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", held_layer, args=(x,)).sum()

        def interfere() -> None:
            assert entered.wait(10)
            key = int(ctx), pass_of(b, ctx).pass_id
            c.notices.send("b", "autograd.commit", CommitPass(*key))
            c.notices.send("b", "autograd.report", ReportDone(*key, Report(())))
            c.notices.send("a", "autograd.report", ReportDone(*key, Report(())))
            assert c.call("b", int, ("1",)) == 1
            gate.set()

        c.reactor.run_soon(interfere)
        ctx.backward(loss, timeout=20)
        assert torch.allclose(ctx.gradients()[x], expected(1)[0])
        found = context_of(b, ctx).wait_gradients(5.0)[layers.weight]
        assert torch.allclose(found, expected(1)[1])


def test_note_that_is_no_message_ends_the_connection_and_nothing_else(
    trio: list[Agent], caplog: pytest.LogCaptureFixture
) -> None:
    a, b, _ = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx, caplog.at_level(logging.ERROR, "gradwire"):
        loss = rpc.rpc_sync("b", layer, args=(x,)).sum()

        def has_refused(number: int) -> bool:
            return sum("not a valid" in str(record.exc_info) for record in caplog.records) == number

        def is_cut(before: object) -> bool:
            return a.peers.peer("b").lanes.get("calls") is not before

        for number, name in enumerate(["propagate", "report", "abort", "commit", "release", "holds"], 1):
            before = a.peers.peer("b").lanes["calls"]
            a.notices.send("b", f"autograd.{name}", ["no", "such", "message"])
            wait_until(partial(has_refused, number), 20.0, "that b refuses it")
            wait_until(partial(is_cut, before), 20.0, "that a hears of it")
            rpc.rpc_sync("b", torch.add, args=(1, 1))
        ctx.backward(loss, timeout=20)
        assert torch.allclose(ctx.gradients()[x], expected(1)[0])
        assert len(context_of(b, ctx).sends) == 1


# -- A worker that calls itself: gradients come back as from anybody else -----------------------------------------------


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def test_gradients_of_two_leaves_share_no_memory(trio: list[Agent]) -> None:
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    with gw.autograd.context() as ctx:
        ctx.backward(rpc.rpc_sync("a", add, args=(x, y)).sum())
        gradients = ctx.gradients()
        gradients[x].mul_(2)
        assert gradients[x].tolist() == [2.0] * 3
        assert gradients[y].tolist() == [1.0] * 3


def test_gradient_given_for_a_root_is_left_alone(trio: list[Agent]) -> None:
    x, given = torch.ones(3, requires_grad=True), torch.ones(3)
    with gw.autograd.context() as ctx:
        gw.autograd.backward(ctx, [rpc.rpc_sync("a", add, args=(x, torch.zeros(3)))], gradients=[given])
        ctx.gradients()[x].mul_(2)
        assert given.tolist() == [1.0] * 3


def test_sparse_gradients(trio: list[Agent]) -> None:
    weight = torch.ones(4, 2, requires_grad=True)
    with gw.autograd.context() as ctx:
        ctx.backward(rpc.rpc_sync("a", look_up, args=(weight,)).sum())
        gradient = ctx.gradients()[weight]
        assert gradient.is_sparse
        assert gradient.to_dense().tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]


def look_up(weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(torch.tensor([1, 3]), weight, sparse=True)
