"""Faults in the middle of a pass: no worker waits for ever, and gradients are on all workers or on none."""

from __future__ import annotations

import builtins
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import msgspec
import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd import anomaly_mode as anomalies
from gradwire.autograd import backward_pass
from gradwire.autograd._backward_state import ComponentPhase
from gradwire.autograd.backward_pass import BackwardPass
from gradwire.autograd.engine import is_about_pass
from gradwire.autograd.messages import AbortPass, CommitPass, HoldsContext, ReleaseContext
from gradwire.errors import AutogradError, BackwardFailed, WorkerLost
from gradwire.rpc import Agent
from gradwire.rpc.reader import Reader
from gradwire.testing import wait_until
from gradwire.types import WorkerInfo
from gradwire.wire.messages import ErrorInfo
from unit.autograd import layers
from unit.autograd.layers import context_of, engine_of, entered, gate, held_layer, layer, num_contexts, pass_of, through
from unit.autograd.test_engine_commit import before_commit, expected

LIMIT_S = 20.0
QUICK_S = 5.0
"""Far less than the limit, and far more than a small pass takes on a busy machine."""


def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


def thread_name() -> str:
    return threading.current_thread().name


def gradient_on(agent: Agent, context_id: int) -> torch.Tensor:
    """What a worker has for the common weight, once the pass is decided there."""
    return context_of(agent, context_id).wait_gradients(QUICK_S)[layers.weight]


class Last(torch.autograd.Function):
    """Its backward lasts until nothing else of the pass is left, on any worker."""

    is_alone: Callable[[], bool]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        wait_until(Last.is_alone, QUICK_S, "that everybody else is done")
        return gradient


def make_root_last(a: Agent, b: Agent, ctx: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Last` on ``a`` goes on when ``b`` has reported, and ``a`` itself has nothing else to run."""

    def is_alone() -> bool:
        current = pass_of(a, ctx)
        has_reported = b.info.id in current.participants()  # nobody else has named it yet
        return has_reported and sum(item is not ComponentPhase.DONE for item in current.state.phases) == 1

    monkeypatch.setattr(Last, "is_alone", is_alone, raising=False)


# -- flags that are no booleans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("create", [1, None])
@pytest.mark.parametrize("retain", [None, 0, 1])
def test_flags_of_backward_may_be_anything_that_is_true_or_not(trio: list[Agent], retain: Any, create: Any) -> None:
    """They travel as booleans: a worker that got None took it for a message that is not valid."""
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", layer, args=(x,)).sum()
        ctx.backward(loss, retain_graph=retain, create_graph=create, timeout=LIMIT_S)
        found = ctx.gradients()[x]
        assert torch.allclose(found, expected(1)[0])
        assert found.requires_grad is bool(create)
        if retain or create:
            ctx.backward(loss, timeout=LIMIT_S)
            assert torch.allclose(ctx.gradients()[x], 2 * expected(1)[0])


@pytest.mark.parametrize("create", [1, None])
@pytest.mark.parametrize("retain", [None, 0, 1])
def test_flags_of_grad_may_be_anything_that_is_true_or_not(trio: list[Agent], retain: Any, create: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", layer, args=(x,)).sum()
        (found,) = gw.autograd.grad(ctx, loss, x, retain_graph=retain, create_graph=create, timeout=LIMIT_S)
        assert found is not None
        assert torch.allclose(found, expected(1)[0])
        assert found.requires_grad is bool(create)


# -- what went wrong elsewhere is heard of ----------------------------------------------------------------------------


class Exits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise SystemExit(3)


def exit_in_backward(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Exits.apply(x)  # type: ignore[no-untyped-call]
    return result


def _exit(_: torch.Tensor) -> None:
    raise SystemExit(3)


def exit_in_hook(x: torch.Tensor) -> torch.Tensor:
    result = x * 2
    result.register_hook(_exit)  # type: ignore[no-untyped-call]
    return result


def raise_in_hook(x: torch.Tensor, kind: str) -> torch.Tensor:
    def fail(_: torch.Tensor) -> None:
        raise getattr(builtins, kind)

    result = x * 2
    result.register_hook(fail)  # type: ignore[no-untyped-call]
    return result


def exit_in_last_hook(x: torch.Tensor) -> torch.Tensor:
    leaf = torch.ones(3, requires_grad=True)
    leaf.register_post_accumulate_grad_hook(_exit)  # type: ignore[no-untyped-call]
    return x * leaf


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_interrupt_in_a_hook_leaves_the_connection_open(
    trio: list[Agent], kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service thread runs the hook. What the hook raises belongs to the pass, and the thread goes on reading."""
    monkeypatch.setattr(Reader, "take_over_if_stuck", lambda *_: None)  # as if the hook were quicker than the clock
    lane = trio[0].peers.peer("b").lane("calls", time.monotonic() + QUICK_S)
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", raise_in_hook, args=(x, kind.__name__)).sum()
        with pytest.raises(BackwardFailed, match=kind.__name__):
            ctx.backward(loss, timeout=LIMIT_S)
        ctx.backward(rpc.rpc_sync("b", layer, args=(x,), timeout=QUICK_S).sum(), timeout=LIMIT_S)
        assert torch.allclose(ctx.gradients()[x], expected(1)[0])
    assert not lane.reader.has_ended


@pytest.mark.parametrize("function", [exit_in_backward, exit_in_hook, exit_in_last_hook])
def test_exit_in_remote_backward_fails_the_pass(trio: list[Agent], function: Callable[..., torch.Tensor]) -> None:
    """It is no `Exception`: it ended in the thread that ran it, and the root waited for its deadline."""
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", function, args=(x,)).sum()
        started = time.monotonic()
        with pytest.raises(BackwardFailed, match="SystemExit") as caught:
            ctx.backward(loss, timeout=LIMIT_S)
        assert time.monotonic() - started < QUICK_S
        assert caught.value.worker == "b"
        assert not ctx.gradients()
        ctx.backward(rpc.rpc_sync("b", layer, args=(x,)).sum(), timeout=LIMIT_S)
        assert torch.allclose(ctx.gradients()[x], expected(1)[0])


def break_rebuilding_once(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next gradients that a worker gets find no room there."""

    rebuild = agent.codec.rebuild_tensors

    def fail_once(frame: Any, message: Any, devices: Any = None) -> list[torch.Tensor]:
        if message.tensors and getattr(message, "function", "") == "~autograd.propagate":
            monkeypatch.setattr(agent.codec, "rebuild_tensors", rebuild)
            raise MemoryError("no room for the gradient")
        return rebuild(frame, message, devices)

    monkeypatch.setattr(agent.codec, "rebuild_tensors", fail_once)


@pytest.mark.parametrize("number", [0, 1], ids=["at the root", "at a participant"])
def test_gradient_that_cannot_be_rebuilt_fails_the_pass(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Nobody answers a notice, so the connection ends in its place; it was only logged."""
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", layer, args=(x,)).sum()
        break_rebuilding_once(trio[number], monkeypatch)
        started = time.monotonic()
        with pytest.raises(BackwardFailed, match="cut off"):
            ctx.backward(loss, timeout=LIMIT_S)
        assert time.monotonic() - started < QUICK_S
        assert not ctx.gradients()
        wait_until(lambda: not context_of(trio[1], ctx).passes, QUICK_S, "that b drops the pass")
        assert not context_of(trio[1], ctx).gradients


# -- whose work a waiting thread does ---------------------------------------------------------------------------------


def take_while_waiting(
    agent: Agent, send: Callable[[], object], pass_id: int, is_handled: Callable[[], object]
) -> None:
    """Lets this thread read what comes from worker b, as one does that waits for a pass; sends once it holds the reading."""
    sent: list[bool] = []

    def send_first() -> bool:
        if not sent:
            sent.append(True)
            send()
        return bool(is_handled())

    is_own = partial(is_about_pass, pass_id)
    wait_until(lambda: agent.server.take_notices({1}, QUICK_S, send_first, is_own), LIMIT_S, "that something is read")


def test_waiting_thread_handles_only_notices_of_its_own_pass(trio: list[Agent]) -> None:
    """Others' passes run their users' code, which may take longer than its own deadline; so do functions."""
    a, b, _ = trio
    ran_in: dict[int, str] = {}
    a.notices.register("review", lambda _, note, __: ran_in.update({note.pass_id: thread_name()}), CommitPass)
    assert b.call("a", torch.add, (1, 1)) == 2  # opens the lane
    for pass_id in (7, 8):
        take_while_waiting(a, partial(b.notices.send, "a", "review", [0, pass_id]), 7, partial(ran_in.get, pass_id))
    wait_until(lambda: 8 in ran_in, QUICK_S, "that a service thread handles the other one")
    assert ran_in[7] == thread_name()
    assert ran_in[8].startswith("gradwire-a-service")
    futures: list[Any] = []
    take_while_waiting(
        a, lambda: futures.append(b.submit("a", thread_name)), 7, lambda: bool(futures and futures[0].done())
    )
    assert futures[0].wait().startswith("gradwire-a-service")


class Noted(torch.autograd.Function):
    """Its backward notes the thread it runs in."""

    ran_in: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Noted.ran_in.append(threading.get_ident())
        return gradient


def test_thread_that_waits_for_one_pass_does_not_run_another(trio: list[Agent]) -> None:
    _, b, _ = trio
    assert b.call("a", torch.add, (1, 1)) == 2  # from now on b answers where a waiting thread may read
    Noted.ran_in.clear()
    x = torch.ones(3, requires_grad=True)

    def train_too() -> None:
        assert entered.wait(QUICK_S)  # the other pass is under way, and its thread waits
        with gw.autograd.context() as other:
            noted: torch.Tensor = Noted.apply(x)  # type: ignore[no-untyped-call]
            other.backward(rpc.rpc_sync("b", layer, args=(noted,)).sum(), timeout=LIMIT_S)
            found.append(other.gradients()[x])
        gate.set()

    found: list[torch.Tensor] = []
    thread = threading.Thread(target=train_too, name="trains-too")
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", held_layer, args=(x,)).sum()
        thread.start()
        ctx.backward(loss, timeout=LIMIT_S)
    thread.join(QUICK_S)
    assert len(Noted.ran_in) == 1
    assert threading.get_ident() not in Noted.ran_in
    assert torch.allclose(found[0], expected(1)[0])


def note_helpers(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[Any], bool]]:
    """What the threads that read for themselves say about which notes they take."""
    noted: list[Callable[[Any], bool]] = []
    take = agent.server.take_notices

    def take_and_note(ranks: Any, seconds: float, is_done: Callable[[], bool], wants: Callable[[Any], bool]) -> bool:
        noted.append(wants)
        return take(ranks, seconds, is_done, wants)

    monkeypatch.setattr(agent.server, "take_notices", take_and_note)
    return noted


def test_backward_asks_for_its_own_notices(trio: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    a = trio[0]
    helpers = note_helpers(a, monkeypatch)
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", held_layer, args=(x,)).sum()
        thread = threading.Thread(target=ctx.backward, args=(loss,), kwargs={"timeout": LIMIT_S}, name="runs-backward")
        thread.start()
        wait_until(lambda: helpers, QUICK_S, "that it reads for itself")
        own = pass_of(a, ctx).pass_id
        gate.set()
        thread.join(LIMIT_S)
        assert helpers[0](CommitPass(int(ctx), own))
        for other in (CommitPass(int(ctx), own + 1), HoldsContext(int(ctx)), ReleaseContext(int(ctx), "where")):
            assert not helpers[0](other)
        assert x in ctx.gradients()


# -- modes of the thread that calls backward ----------------------------------------------------------------------------


def test_grad_under_no_grad_keeps_the_graph_it_was_asked_for(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parts of a gradient were added up in the mode of whoever had the second one: here the caller."""
    x = torch.tensor([2.0], requires_grad=True)
    with gw.autograd.context() as ctx:
        own: torch.Tensor = Last.apply(cube(x))  # type: ignore[no-untyped-call]
        loss = (own + rpc.rpc_sync("b", cube, args=(x,))).sum()
        make_root_last(trio[0], trio[1], ctx, monkeypatch)
        with torch.no_grad():
            (found,) = gw.autograd.grad(ctx, loss, x, create_graph=True, timeout=LIMIT_S)
        assert found is not None
        assert found.requires_grad
        assert torch.equal(found, torch.tensor([24.0]))
        ctx.backward(found.sum(), timeout=LIMIT_S)
        assert torch.equal(ctx.gradients()[x], torch.tensor([24.0]))


@pytest.mark.parametrize(
    "make_mode",
    [lambda: torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad, torch.inference_mode],
    ids=["autocast", "no_grad", "inference_mode"],
)
def test_thread_in_a_mode_of_its_own_leaves_the_pass_to_service_threads(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch, make_mode: Callable[[], Any]
) -> None:
    """Gradients came out in half precision, or not, by which thread took them."""
    helpers = note_helpers(trio[0], monkeypatch)
    torch.manual_seed(0)
    x, factor = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", cube, args=(x @ factor,)).sum()
        with make_mode():
            ctx.backward(loss, timeout=LIMIT_S)
        assert not helpers
        (right,) = torch.autograd.grad(cube(x @ factor).sum(), x)
        assert torch.allclose(ctx.gradients()[x], right)


# -- who decides ------------------------------------------------------------------------------------------------------


def test_who_has_reported_does_not_take_the_word_of_another_participant(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", through, args=(x, ["c"])).sum()

        def abort(current: BackwardPass) -> None:
            note = AbortPass(int(ctx), current.pass_id, ErrorInfo("builtins:ValueError", "no", "", "c"))
            engine_of(b)._on_abort(c.info, note, [])

        before_commit(a, monkeypatch, abort)
        ctx.backward(loss, timeout=LIMIT_S)
        assert torch.allclose(gradient_on(b, ctx) + gradient_on(c, ctx), expected(2)[1])
        assert torch.allclose(ctx.gradients()[x], expected(2)[0])


def test_who_takes_the_root_for_dead_drops_only_its_own_gradients(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its own link is cut: the root lives, and tells the others that they count."""
    a, b, c = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", through, args=(x, ["c"])).sum()
        on_b, on_c, asked = context_of(b, ctx), context_of(c, ctx), list[str]()

        def note_and_answer(sender: WorkerInfo, *args: Any) -> None:
            asked.append(sender.name)
            engine_of(a)._on_holds(sender, *args)

        def lose_root(_: BackwardPass) -> None:
            c.on_worker_ended(a.address, "its link was cut", was_orderly=False)
            wait_until(lambda: not on_c.passes, QUICK_S, "that c drops the pass")
            wait_until(lambda: asked or on_b.released, QUICK_S, "that b asks whether a lives")

        a.notices.register("autograd.holds", note_and_answer, HoldsContext)
        before_commit(a, monkeypatch, lose_root)
        ctx.backward(loss, timeout=LIMIT_S)
        assert torch.allclose(ctx.gradients()[x], expected(2)[0])
        assert layers.weight in on_b.wait_gradients(LIMIT_S)
        assert not on_c.gradients
        assert asked == ["b"]
    wait_until(lambda: not num_contexts(trio), LIMIT_S, "that b is told of the end by a")


def test_failure_that_meets_the_report_leaves_the_end_to_the_root(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at how far the pass is and its end, it is reported, and the root decides."""
    a, b, _ = trio
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", held_layer, args=(x,)).sum()
        engine = engine_of(b)
        abort = engine._abort

        def abort_late(current: BackwardPass, *args: Any, **options: Any) -> None:
            gate.set()
            wait_until(lambda: not context_of(a, ctx).passes, QUICK_S, "that the root has decided")
            abort(current, *args, **options)

        def fail() -> None:
            assert entered.wait(QUICK_S)
            engine.fail(pass_of(b, ctx), WorkerLost("c is lost", "c"), "waiting")

        monkeypatch.setattr(engine, "_abort", abort_late)
        thread = threading.Thread(target=fail, name="fails")
        before_commit(a, monkeypatch, lambda _: thread.join(LIMIT_S))
        thread.start()
        ctx.backward(loss, timeout=LIMIT_S)
        thread.join(LIMIT_S)
        assert not thread.is_alive()
        assert torch.allclose(gradient_on(b, ctx), expected(1)[1])
        assert torch.allclose(ctx.gradients()[x], expected(1)[0])


@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupt_while_the_root_waits_leaves_gradients_everywhere_or_nowhere(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Ctrl-C is raised in the wait for the end of the pass, which another thread may have committed meanwhile."""
    a, b, _ = trio
    x = torch.ones(3, requires_grad=True)
    wait = backward_pass._interrupts.wait

    def interrupt(condition: threading.Condition, seconds: float) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return wait(condition, seconds)
        gate.set()
        while when == "after" and context_of(a, ctx).passes:
            assert wait(condition, QUICK_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(backward_pass._interrupts, "wait", interrupt)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", held_layer, args=(x,)).sum()
        with pytest.raises(KeyboardInterrupt):
            ctx.backward(loss, timeout=LIMIT_S)
        wait_until(lambda: not context_of(a, ctx).passes and not context_of(b, ctx).passes, QUICK_S, "that it is over")
        if when == "after":
            assert torch.allclose(gradient_on(b, ctx), expected(1)[1])
            assert torch.allclose(ctx.gradients()[x], expected(1)[0])
        else:
            assert not context_of(b, ctx).gradients
            assert not ctx.gradients()


# -- hooks, modes and contexts within each other ------------------------------------------------------------------------


def test_hook_may_run_a_pass_with_hooks(trio: list[Agent]) -> None:
    """One lock for all hooks stood in its own way."""
    seen: list[torch.Tensor | None] = []
    inner, x = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)

    def run_another(_: torch.Tensor) -> None:
        with gw.autograd.context() as other, torch.enable_grad():
            other.backward((inner * 2).sum(), timeout=LIMIT_S)

    inner.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad))  # type: ignore[no-untyped-call]
    x.register_post_accumulate_grad_hook(run_another)  # type: ignore[no-untyped-call]
    found: list[torch.Tensor] = []

    def run() -> None:
        with gw.autograd.context() as ctx:
            ctx.backward((x * 3).sum(), timeout=LIMIT_S)
            found.append(ctx.gradients()[x])

    thread = threading.Thread(target=run, name="runs-backward", daemon=True)
    thread.start()
    thread.join(QUICK_S)
    assert not thread.is_alive()
    assert torch.equal(found[0], torch.full((3,), 3.0))
    assert seen[0] is not None
    assert torch.equal(seen[0], torch.full((2,), 2.0))
    assert x.grad is None
    assert inner.grad is None


def test_anomaly_mode_ends_with_the_users_block_when_a_run_outlasts_it() -> None:
    """It was switched on again, as it was found, and stayed on for good."""
    run = anomalies.enabled()
    with torch.autograd.set_detect_anomaly(True):
        run.__enter__()
        assert torch.is_anomaly_enabled()
    run.__exit__(None, None, None)
    assert not torch.is_anomaly_enabled()


def test_context_cannot_be_entered_twice_and_stays_usable(trio: list[Agent]) -> None:
    """The first of its two contexts was never released."""
    x = torch.ones(3, requires_grad=True)
    context = gw.autograd.context()
    with context as ctx:
        with pytest.raises(AutogradError, match="can be entered only once"):
            context.__enter__()
        assert num_contexts(trio) == 1
        ctx.backward(rpc.rpc_sync("b", layer, args=(x,)).sum(), timeout=LIMIT_S)
        assert torch.allclose(ctx.gradients()[x], expected(1)[0])
    with pytest.raises(AutogradError, match="can be entered only once"):
        context.__enter__()
    wait_until(lambda: num_contexts(trio) == 0, QUICK_S, "that the one context is released")
    assert num_contexts(trio) == 0


def test_notice_that_fails_in_the_thread_it_was_handed_to_ends_the_connection(trio: list[Agent]) -> None:
    """Nobody would answer for it otherwise: whoever sent it would wait until its deadline."""
    a, b, _ = trio
    assert b.call("a", torch.add, (1, 1)) == 2

    def fail(*_: object) -> None:
        raise ValueError("cannot be handled")

    a.notices.register("review", fail, msgspec.Raw)
    before = b.peers.peer("a").lanes.get("calls")

    def has_ended() -> bool:
        return b.peers.peer("a").lanes.get("calls") is not before

    take_while_waiting(a, lambda: b.notices.send("a", "review", [0, 8]), 7, has_ended)
    wait_until(has_ended, 20.0, "that b hears of it")
    assert b.call("a", torch.add, (1, 1)) == 2
