"""A worker of the cluster that was taken over: it cannot touch contexts and passes of others, nor use up their memory."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd._backward_state import Introduction, Report
from gradwire.autograd.context import (
    CONTEXT_BYTES,
    ENDED_PASS_BYTES,
    MESSAGE_BYTES,
    PASS_BYTES,
    DistAutogradContext,
    Quotas,
)
from gradwire.autograd.messages import (
    AbortPass,
    CommitPass,
    GradientItem,
    HoldsContext,
    PassOptions,
    PropagateGradients,
    RecordedCall,
    ReleaseContext,
    ReportDone,
)
from gradwire.config import KIB, Limits
from gradwire.errors import AutogradError, DecodeError, LimitExceeded
from gradwire.rpc import Agent, set_current_agent
from gradwire.rpc.interceptors import Envelope, Interceptor
from gradwire.rpc.pending_calls import PendingCall
from gradwire.testing import wait_until
from gradwire.wire.messages import ErrorInfo, read_note
from unit.autograd.layers import context_of, engine_of, entered, gate, pass_of

LIMIT = 256 * KIB
ERROR = ErrorInfo("builtins:ValueError", "made up", "", "c")


@rpc.expose(name="hostile.layer")
def layer(x: torch.Tensor | None = None) -> torch.Tensor | None:
    return None if x is None else torch.tanh(x)


@rpc.expose(name="hostile.held")
def held(x: torch.Tensor) -> torch.Tensor:
    """Its backward waits at the gate."""
    result: torch.Tensor = _Held.apply(x)  # type: ignore[no-untyped-call]
    return result


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        entered.set()
        assert gate.wait(20)
        return gradients[0] * 2


@pytest.fixture
def trio(make_agents: Callable[..., list[Agent]]) -> Iterator[list[Agent]]:
    """Workers ``a`` and ``b``, which are honest, and ``c``, which is not."""
    agents = make_agents(3, trust="data", limits=Limits(autograd_bytes=LIMIT))
    entered.clear()
    gate.clear()
    set_current_agent(agents[0])
    yield agents
    set_current_agent(None)
    gate.set()
    agents[2].close()  # what it has made up goes with it


def send(sender: Agent, to: str, name: str, note: Any) -> None:
    """Sends a notice on the lane of the calls, and waits until it was handled: a call behind it is answered."""
    sender.call(to, "hostile.layer")
    sender.notices.send(to, f"autograd.{name}", note)
    sender.call(to, "hostile.layer")


def call_with_note(sender: Agent, to: str, note: Any, *tensors: torch.Tensor) -> Exception | None:
    """Calls a function with any note of autograd; returns what was raised."""
    call = sender.client.start(to, "hostile.layer", tensors, None, 10.0, notes={"autograd": note})
    if not call.is_done:
        sender.client.wait(call)
    return call.error


def some_id(rank: int) -> int:
    return (rank << 48) | secrets.randbits(48)


def refused_on(agent: Agent) -> int:
    return engine_of(agent).statistics().num_refused


def check_gradient(ctx: gw.autograd.context, loss: torch.Tensor, x: torch.Tensor) -> None:
    ctx.backward(loss, timeout=20)
    expected = x.detach().clone().requires_grad_()
    torch.tanh(expected).sum().backward()  # type: ignore[no-untyped-call]
    assert expected.grad is not None
    assert torch.equal(ctx.gradients()[x], expected.grad)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_contexts_of_one_worker_are_limited_and_those_of_others_are_not_concerned(trio: list[Agent]) -> None:
    _, b, c = trio
    makers = (0, 2, 2, 7)  # a, c itself, and a worker that is not there
    errors = [call_with_note(c, "b", [some_id(makers[number % 4]), 0, 0]) for number in range(200)]
    refused = [error for error in errors if error is not None]
    assert len(engine_of(b).container) == 200 - len(refused) == LIMIT // CONTEXT_BYTES
    assert all(isinstance(error, LimitExceeded) for error in refused)
    assert "of rank 2 would take more than 262144 bytes here (Limits.autograd_bytes)" in str(refused[0])
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        check_gradient(ctx, rpc.rpc_sync("b", "hostile.layer", args=(x,)).sum(), x)
    c.close()
    wait_until(lambda: not list(engine_of(b).container), 20.0, "that b drops what c has brought")
    assert engine_of(b).container.quotas.used.get(2, 0) == 0


def test_messages_of_one_worker_are_limited(trio: list[Agent]) -> None:
    _, b, c = trio
    container, context_id = engine_of(c).container, some_id(2)
    x = torch.ones(3, requires_grad=True)
    errors = [call_with_note(c, "b", [context_id, container.new_message_id(), 1], x) for _ in range(200)]
    assert len(context_of(b, context_id).recvs) == (LIMIT - CONTEXT_BYTES) // MESSAGE_BYTES
    assert isinstance(errors[-1], LimitExceeded)
    send(c, "b", "release", ReleaseContext(context_id, "by a test"))
    assert engine_of(b).container.quotas.used.get(2, 0) == 0
    assert call_with_note(c, "b", [some_id(2), container.new_message_id(), 1], x) is None


def test_passes_of_one_worker_are_limited_and_the_root_is_told(trio: list[Agent]) -> None:
    _, b, c = trio
    context_id, told = some_id(2), []
    c.notices.register("autograd.abort", lambda sender, note, _: told.append(note), AbortPass)
    c.notices.register("autograd.report", lambda *_: None, ReportDone)  # it does not say how they end
    for _ in range(100):
        send(
            c, "b", "propagate", PropagateGradients(context_id, engine_of(c).container.new_message_id(), PassOptions())
        )
    assert len(context_of(b, context_id).passes) == (LIMIT - CONTEXT_BYTES) // (PASS_BYTES + ENDED_PASS_BYTES)
    wait_until(lambda: told, 20.0, "that c is told")
    assert "Limits.autograd_bytes" in told[0].error.message
    for current in list(context_of(b, context_id).passes.values()):
        send(c, "b", "abort", AbortPass(context_id, current.pass_id, ERROR))
    kept = CONTEXT_BYTES + len(context_of(b, context_id).ended_passes) * ENDED_PASS_BYTES
    assert engine_of(b).container.quotas.used.get(2, 0) == kept


def test_aborts_of_passes_that_never_were_are_limited(trio: list[Agent]) -> None:
    _, b, c = trio
    context_id = some_id(2)
    assert call_with_note(c, "b", [context_id, 0, 0]) is None
    for _ in range(LIMIT // ENDED_PASS_BYTES + 100):
        c.notices.send("b", "autograd.abort", AbortPass(context_id, engine_of(c).container.new_message_id(), ERROR))
    num_kept = (LIMIT - CONTEXT_BYTES) // ENDED_PASS_BYTES
    wait_until(lambda: refused_on(b) == 100 + CONTEXT_BYTES // ENDED_PASS_BYTES, 20.0, "that b has refused the rest")
    assert len(context_of(b, context_id).ended_passes) == num_kept


def test_shortcuts_to_workers_that_are_not_there_are_not_tried(trio: list[Agent]) -> None:
    _, b, c = trio
    routes = tuple((5, ((rank, 5, 0, 1),)) for rank in range(100, 2000))
    note = PropagateGradients(some_id(2), some_id(2), PassOptions(), (), Introduction((), (), routes))
    send(c, "b", "propagate", note)
    assert not engine_of(b)._tried


class TestQuotas:
    def test_what_a_context_took_is_given_back_once(self) -> None:
        quotas, context = Quotas(0, 100), DistAutogradContext(1)
        quotas.charge(1, context, 60)
        quotas.charge(2, context, 100)
        quotas.refund(context, 1, 10)
        with pytest.raises(LimitExceeded, match=r"of rank 1 would take more than 100 bytes here"):
            quotas.charge(1, context, 51)
        quotas.settle(context)
        quotas.settle(context)
        quotas.refund(context, 1, 10)
        quotas.charge(1, context, 1000)  # it is released: nothing is kept
        assert quotas.used.get(1, 0) == quotas.used.get(2, 0) == 0

    def test_own_messages_do_not_count(self) -> None:
        quotas, context = Quotas(3, 100), DistAutogradContext(1)
        quotas.charge(3, context, 1000)
        quotas.refund(context, 3, 1000)
        assert quotas.used.get(3, 0) == 0


# -- words about what is not the sender's -----------------------------------------------------------------------------


def test_release_by_a_worker_that_has_no_part_in_the_context(trio: list[Agent]) -> None:
    a, b, c = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", "hostile.layer", args=(x,)).sum()
        for name in "ab":
            send(c, name, "release", ReleaseContext(int(ctx), "by c"))
        wait_until(lambda: refused_on(a) == refused_on(b) == 1, 10.0, "that both have refused it")
        check_gradient(ctx, loss, x)
    wait_until(lambda: not list(engine_of(b).container), 20.0, "that a has released it")


def test_abort_by_a_worker_that_has_no_part_in_the_pass(trio: list[Agent]) -> None:
    a, b, c = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", "hostile.held", args=(x,)).sum()

        def interfere() -> None:
            assert entered.wait(10)
            abort = AbortPass(int(ctx), pass_of(b, ctx).pass_id, ERROR)
            for name in "ab":
                send(c, name, "abort", abort)
            gate.set()

        c.reactor.run_soon(interfere)
        ctx.backward(loss, timeout=20)
        assert ctx.gradients()[x].tolist() == [2.0] * 3
        wait_until(lambda: refused_on(a) == refused_on(b) == 1, 10.0, "that both have refused it")


def test_abort_counts_at_the_root_when_another_worker_has_named_its_sender(trio: list[Agent]) -> None:
    """The root may hear of a failure before it hears that the worker takes part."""
    _, b, c = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", "hostile.held", args=(x,)).sum()

        def fail_early() -> None:
            assert entered.wait(10)
            key = int(ctx), pass_of(b, ctx).pass_id
            send(c, "a", "abort", AbortPass(*key, ERROR))
            send(b, "a", "report", ReportDone(*key, Report((2,))))
            gate.set()

        c.reactor.run_soon(fail_early)
        with pytest.raises(ValueError, match="made up"):
            ctx.backward(loss, timeout=20)


def test_worker_that_nobody_has_named_is_told_how_the_pass_has_ended(trio: list[Agent]) -> None:
    """Its report may be lost with a connection, and its abort come before the end or after it: only the root can tell it."""
    _, b, c = trio
    heard: list[int] = []
    c.notices.register("autograd.commit", lambda sender, note, _: heard.append(note.pass_id), CommitPass)
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", "hostile.held", args=(x,)).sum()

        def abort_early() -> None:
            assert entered.wait(10)
            send(c, "a", "abort", AbortPass(int(ctx), pass_of(b, ctx).pass_id, ERROR))
            gate.set()

        c.reactor.run_soon(abort_early)
        ctx.backward(loss, timeout=20)
        wait_until(lambda: len(heard) == 1, 20.0, "that c is told with the others")
        send(c, "a", "abort", AbortPass(int(ctx), heard[0], ERROR))
        wait_until(lambda: len(heard) == 2, 20.0, "that c is told when it asks")
        assert ctx.gradients()[x].tolist() == [2.0] * 3


def test_report_by_a_worker_that_has_no_part_in_the_pass(trio: list[Agent]) -> None:
    """It names ranks that are not there: whoever waited for them would wait for ever."""
    _, b, c = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", "hostile.held", args=(x,)).sum()

        def interfere() -> None:
            assert entered.wait(10)
            key = int(ctx), pass_of(b, ctx).pass_id
            send(c, "a", "report", ReportDone(*key, Report((700, 1), (1,))))
            gate.set()

        c.reactor.run_soon(interfere)
        ctx.backward(loss, timeout=20)
        assert ctx.gradients()[x].tolist() == [2.0] * 3


def test_pass_that_its_root_never_began_is_ended_by_it(trio: list[Agent]) -> None:
    """Otherwise workers that were made to join it would wait for its end whenever they are asked for gradients."""
    _, b, c = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", "hostile.layer", args=(x,)).sum()
        made_up = some_id(0)
        (message_id,) = context_of(b, ctx).sends
        items = (GradientItem(message_id, via=0),)
        c.notices.send("b", "autograd.propagate", PropagateGradients(int(ctx), made_up, PassOptions(), items))
        wait_until(lambda: made_up in context_of(b, ctx).ended_passes, 20.0, "that a ends it")
        assert context_of(b, ctx).ended_passes[made_up] is False
        check_gradient(ctx, loss, x)


def test_questions_about_contexts_and_passes_of_others_are_refused(trio: list[Agent]) -> None:
    _, _, c = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        rpc.rpc_sync("b", "hostile.layer", args=(x,))
        assert isinstance(ask(c, "b", "explain", (int(ctx),)), AutogradError)
        assert isinstance(ask(c, "b", "probe", (int(ctx), some_id(0))), AutogradError)
        assert "b: 1 send, 1 recv," in str(gw.autograd.explain(ctx))


@pytest.mark.parametrize("args", [(), ("x",), (1.5,), (-1,), (torch.ones(2),), (None, 1), (1, 2, 3)])
@pytest.mark.parametrize("operation", ["probe", "explain"])
def test_questions_with_other_arguments_are_refused(trio: list[Agent], operation: str, args: tuple[Any, ...]) -> None:
    assert isinstance(ask(trio[2], "b", operation, args), DecodeError)


def ask(sender: Agent, to: str, operation: str, args: tuple[Any, ...]) -> Exception | None:
    """The error that a control operation is answered with."""
    done: list[PendingCall] = []
    sender.control(to, f"autograd.{operation}", args, 10.0, done.append)
    wait_until(lambda: done, 20.0, "an answer")
    return done[0].error


def test_holder_asks_the_maker_of_a_context_alone(trio: list[Agent]) -> None:
    _, b, c = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        rpc.rpc_sync("b", "hostile.layer", args=(x,))
        send(c, "b", "holds", HoldsContext(int(ctx)))
        wait_until(lambda: refused_on(b) == 1, 10.0, "that b has refused it")
        assert context_of(b, ctx).known_workers == {0}


def test_message_under_the_id_of_another_worker_is_refused(trio: list[Agent]) -> None:
    """It would take the place of a message that worker has sent."""
    _, b, c = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", "hostile.layer", args=(x,)).sum()
        (message_id,) = context_of(b, ctx).recvs
        error = call_with_note(c, "b", [int(ctx), message_id, 1], torch.ones(3, requires_grad=True))
        assert isinstance(error, DecodeError)
        assert "c recorded a message with an id of another worker" in str(error)
        check_gradient(ctx, loss, x)


class _Liar(Interceptor):
    """Answers with a note about any context."""

    name = "autograd"

    def __init__(self, note: Any) -> None:
        self._note = note

    def outgoing(self, envelope: Envelope, tensors: Any) -> Any:
        return self._note if envelope.kind == "reply" else None


def test_answer_makes_no_context_and_joins_no_other(trio: list[Agent]) -> None:
    a, _, c = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as other:
        rpc.rpc_sync("b", "hostile.layer", args=(x,))
        for context_id in (some_id(1), int(other)):
            c.interceptors[:] = [_Liar(RecordedCall(context_id, engine_of(c).container.new_message_id(), 1))]
            with gw.autograd.context():
                rpc.rpc_sync("c", "hostile.layer", args=(x,))
        assert len(engine_of(a).container) == 1
        assert context_of(a, other).known_workers == {1}
        assert len(context_of(a, other).recvs) == 1


# -- fields -----------------------------------------------------------------------------------------------------------

OPTIONS = [False, False, False, False, False, 600.0]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (RecordedCall, [-1]),
        (RecordedCall, [1, -1]),
        (RecordedCall, [1, 0, -1]),
        (RecordedCall, [1, 0, 0, False, "x" * 1000]),
        (ReleaseContext, [1, "x" * 1000]),
        (ReleaseContext, [-1, ""]),
        (HoldsContext, [-1]),
        (HoldsContext, [1.0]),
        (PropagateGradients, [-1, 1, OPTIONS]),
        (PropagateGradients, [1, -1, OPTIONS]),
        (PropagateGradients, [1, 1, [*OPTIONS[:5], float("nan")]]),
        (PropagateGradients, [1, 1, [*OPTIONS[:5], 0.0]]),
        (PropagateGradients, [1, 1, OPTIONS, [[-1]]]),
        (PropagateGradients, [1, 1, OPTIONS, [[1, None, 0, [], 65_536]]]),
        (PropagateGradients, [1, 1, OPTIONS, [], [[-1]]]),
        (PropagateGradients, [1, 1, OPTIONS, [], [[], [], [[1, [[65_536, 1, 1, 1]]]]]]),
        (ReportDone, [1, 1, [[65_536]]]),
        (ReportDone, [1, 1, [[], [-1]]]),
    ],
)
def test_fields_that_cannot_be(kind: Any, fields: list[Any]) -> None:
    with pytest.raises(DecodeError, match=f"not a valid {kind.__name__}"):
        read_note(msgspec.Raw(msgspec.msgpack.encode(fields)), kind)
