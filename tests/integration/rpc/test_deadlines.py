"""Deadlines are inherited, timeouts say where the call was, and work that nobody wants is dropped."""

from __future__ import annotations

import operator
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradwire.errors import CallCancelled, RpcTimeout
from gradwire.rpc import Agent
from rpc import handlers
from rpc.puppets import Puppet, PuppetError, wait_until


def _record_error(here: str, there: str) -> None:
    """Calls a function that does not end, with a long timeout, and keeps what came of it."""
    try:
        handlers.agents[here].call(there, handlers.wait_gate, (), None, 30.0)
    except Exception as error:
        handlers.seen.append((error, time.monotonic()))


def test_nested_call_inherits_the_deadline(make_agents: Any) -> None:
    a, _b, c = make_agents("a", "b", "c")
    started = time.monotonic()
    with pytest.raises(RpcTimeout):
        a.call("b", _record_error, ("b", "c"), None, 1.0)
    assert wait_until(lambda: handlers.seen)
    error, ended = handlers.seen[0]
    assert isinstance(error, RpcTimeout | CallCancelled)
    assert ended - started < 10.0  # not the 30 s of the inner call
    assert wait_until(lambda: c.statistics().num_pending == 0)


def test_function_past_its_deadline_makes_no_calls(make_agents: Any) -> None:
    a, _b, c = make_agents("a", "b", "c")

    def wait_then_call() -> None:
        handlers.gate.wait(10)
        try:
            handlers.agents["b"].call("c", handlers.note, ("called",))
        except Exception as error:
            handlers.note(error)

    with pytest.raises(RpcTimeout):
        a.call("b", wait_then_call, (), None, 1.0)
    handlers.gate.set()
    assert wait_until(lambda: handlers.seen)
    assert isinstance(handlers.seen[0], RpcTimeout | CallCancelled)
    assert c.server.num_served == 0


def test_phase_queue_and_the_call_never_runs(make_agents: Any) -> None:
    a, b = make_agents("a", "b", num_worker_threads=1)
    busy = a.submit("b", handlers.spin_until_gate)
    with pytest.raises(RpcTimeout, match="waiting for a free worker thread") as caught:
        a.call("b", handlers.note, ("too late",), None, 1.0)
    assert caught.value.phase == "queue"
    handlers.gate.set()
    busy.wait()
    assert wait_until(lambda: b.is_quiet)
    assert handlers.seen == []


def test_phase_run(make_agents: Any) -> None:
    a, _b = make_agents("a", "b")
    with pytest.raises(RpcTimeout, match="still running") as caught:
        a.call("b", handlers.wait_gate, (), None, 0.5)
    assert caught.value.phase == "run"


def test_late_result_is_dropped(make_agents: Any) -> None:
    a, b = make_agents("a", "b")
    with pytest.raises(RpcTimeout):
        a.call("b", handlers.wait_gate, (), None, 0.05)
    handlers.gate.set()
    assert wait_until(lambda: b.is_quiet)
    assert a.call("b", operator.add, (1, 2)) == 3
    assert a.is_quiet


@pytest.mark.parametrize("to", ["a", "b"])
def test_cancel_ends_the_call_here_and_there(make_agents: Any, to: str) -> None:
    a, b = make_agents("a", "b", num_worker_threads=1)
    busy = a.submit(to, handlers.spin_until_gate)
    queued = a.submit(to, handlers.note, ("must not run",))
    there = {"a": a, "b": b}[to]
    assert wait_until(lambda: there.statistics().num_queued == 1)
    assert queued.cancel() is True
    assert queued.cancel() is False
    with pytest.raises(CallCancelled, match=rf"note on worker {to} was cancelled by the caller"):
        queued.wait()
    assert wait_until(lambda: there.statistics().num_queued == 0)
    handlers.gate.set()
    busy.wait()
    assert wait_until(lambda: a.is_quiet and b.is_quiet)
    assert handlers.seen == []


def test_cancel_of_a_running_call_lets_others_be(make_agents: Any) -> None:
    a, b = make_agents("a", "b")
    first, second = a.submit("b", handlers.wait_gate), a.submit("b", handlers.wait_gate)
    assert first.cancel()
    with pytest.raises(CallCancelled):
        first.wait()
    handlers.gate.set()
    assert second.wait() is True
    assert second.cancel() is False
    assert wait_until(lambda: b.is_quiet)


def test_cancel_reaches_nested_calls(make_agents: Any) -> None:
    """The function that waits for a third worker learns that nobody waits for it."""
    a, _b, _c = make_agents("a", "b", "c")
    future = a.submit("b", _record_error, ("b", "c"))
    assert handlers.entered.acquire(timeout=10)
    assert future.cancel()
    assert wait_until(lambda: handlers.seen, 20.0), "the nested call still waits"
    assert isinstance(handlers.seen[0][0], CallCancelled)


def test_death_of_the_caller_reaches_nested_calls(workers: Callable[..., list[Puppet]]) -> None:
    first, second, third = workers(3)
    first.start("rpc.rpc_sync('w1', h.pass_on, args=('w2', h.wait_gate, 60))")
    third.do("assert h.entered.acquire(timeout=10)")
    first.kill()
    assert wait_until(lambda: second.do("rpc.current_agent().is_quiet"), 20.0)


def test_stopped_worker_gives_phase_unknown_and_works_again(workers: Callable[..., list[Puppet]]) -> None:
    first, second = workers(2)
    assert first.do("rpc.rpc_sync('w1', operator.add, args=(1, 2))") == 3
    second.signal(signal.SIGSTOP)
    with pytest.raises(PuppetError) as caught:
        first.do("rpc.rpc_sync('w1', operator.add, args=(1, 2), timeout=0.2)")
    assert caught.value.fields["phase"] == "unknown"
    assert caught.value.kinds[:3] == ["RpcTimeout", "RpcError", "GradwireError"]
    second.signal(signal.SIGCONT)
    assert first.do("rpc.rpc_sync('w1', operator.add, args=(1, 2))") == 3


def test_stopped_worker_that_was_never_called_gives_phase_connect(workers: Callable[..., list[Puppet]]) -> None:
    _first, second, third = workers(3)
    third.signal(signal.SIGSTOP)
    with pytest.raises(PuppetError) as caught:
        second.do("rpc.rpc_sync('w2', operator.add, args=(1, 2), timeout=0.3)")
    assert caught.value.fields["phase"] == "connect"
    third.signal(signal.SIGCONT)
    assert second.do("rpc.rpc_sync('w2', operator.add, args=(1, 2))") == 3


@pytest.mark.parametrize("transports", [("unix",), ("tcp",)])
def test_request_that_does_not_fit_gives_phase_send(
    workers: Callable[..., list[Puppet]], transports: tuple[str, ...]
) -> None:
    """Half a request is out when time ends; the connection cannot be used any more, but the worker can."""
    first, second = workers(2, transports=transports, shared_memory_from=1 << 40)
    assert first.do("rpc.rpc_sync('w1', operator.add, args=(1, 2))") == 3
    second.signal(signal.SIGSTOP)
    with pytest.raises(PuppetError) as caught:
        first.do("rpc.rpc_sync('w1', h.total, args=(torch.ones(32 << 20, dtype=torch.uint8),), timeout=0.5)")
    assert (caught.value.kind, caught.value.fields["phase"]) == ("RpcTimeout", "send")
    second.signal(signal.SIGCONT)
    assert first.do("rpc.rpc_sync('w1', operator.add, args=(1, 2))") == 3


def test_reply_that_is_too_late_does_not_end_the_worker(workers: Callable[..., list[Puppet]]) -> None:
    """The caller stops while a large reply is under way, past its deadline; other calls must not suffer."""
    first, second = workers(2, transports=("tcp",))
    first.do("other = rpc.rpc_async('w1', h.wait_gate, args=(60,), timeout=0)")
    second.do("assert h.entered.acquire(timeout=10)")
    first.do("big = rpc.rpc_async('w1', torch.ones, args=(64 << 20,), timeout=0.3)")
    first.signal(signal.SIGSTOP)
    stopped = time.monotonic()
    assert wait_until(lambda: time.monotonic() > stopped + 1.0)  # the fault is that it lasts longer than the deadline
    first.signal(signal.SIGCONT)
    with pytest.raises(PuppetError) as caught:
        first.do("big.wait()")
    assert caught.value.kind == "RpcTimeout"
    second.do("h.open_gate()")
    assert first.do("other.wait()") is True


def test_deadline_is_sent_as_what_is_left(pair: list[Agent]) -> None:
    """Clocks differ between machines, so no absolute time may travel."""
    future = pair[0].submit("b", handlers.wait_gate, (), None, 5.0)
    assert handlers.entered.acquire(timeout=10)
    (request,) = [r for item in pair[1].server.incoming for r in item.requests.values() if item.lane == "calls"]
    assert 0 < request.deadline - time.monotonic() <= 5.0
    handlers.gate.set()
    assert future.wait() is True


def test_no_timeout_leaves_a_watch_on_the_tables(pair: list[Agent]) -> None:
    """Ten thousand deadlines that never come leave nothing behind."""
    for _ in range(300):
        pair[0].call("b", torch.add, (torch.ones(2), 1), None, 100.0)
    assert pair[0].statistics().num_pending == 0
    assert len(pair[0].client.loopback.calls) == 0
