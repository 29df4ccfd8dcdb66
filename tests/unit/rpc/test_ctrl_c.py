"""Ctrl-C in the middle of gradwire's work: the work is done first, and once; the interrupt is raised afterwards."""

from __future__ import annotations

import operator
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from conftest import MakeAgents
from gradwire import _interrupts
from gradwire.errors import CallCancelled, ConnectionLost, WorkerLost
from gradwire.rpc.agent import Agent
from gradwire.rpc.client import Client
from gradwire.rpc.connection import Connection
from gradwire.rpc.peers import Peer
from gradwire.rpc.reactor import Reactor
from gradwire.testing import wait_until

gate = threading.Event()
runs: list[str] = []


def wait_at_gate() -> bool:
    return gate.wait(20)


def note_run() -> int:
    runs.append(threading.current_thread().name)
    return len(runs)


@pytest.fixture(autouse=True)
def _open_gate() -> Iterator[None]:
    gate.clear()
    runs.clear()
    yield
    gate.set()


Interrupt = Callable[..., None]


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupt]:
    """``interrupt(Class, "method")``: Ctrl-C when the main thread enters that method for the first time."""
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell may have told its background jobs to ignore it
    _interrupts.install()

    def prepare(owner: Any, name: str, is_meant: Callable[[Any], bool] = lambda self: True) -> None:
        original, has_hit = getattr(owner, name), False

        def entered(self: Any, *args: Any) -> Any:
            nonlocal has_hit
            if not has_hit and is_meant(self) and threading.current_thread() is threading.main_thread():
                has_hit = True
                signal.raise_signal(signal.SIGINT)
            return original(self, *args)

        monkeypatch.setattr(owner, name, entered)

    yield prepare
    _interrupts.uninstall()
    signal.signal(signal.SIGINT, before)


def expect_interrupt(work: Callable[[], object]) -> None:
    """Do something that is interrupted on its way; the interrupt comes while it waits, or right after it."""

    def work_and_wait() -> None:
        work()
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:  # in small steps: a signal handler runs between two of them
            time.sleep(0.001)

    with pytest.raises(KeyboardInterrupt):
        work_and_wait()


def lane_of(agent: Agent, name: str = "b") -> Connection:
    return agent.peers.peer(name).lanes["calls"]


def test_a_call_that_is_passed_on_runs_once(make_agents: MakeAgents, interrupt: Interrupt) -> None:
    """The main thread waits in backward, say, and reads for others: what it may not run goes to a service thread."""
    a, b = make_agents(2)
    assert a.call("b", note_run) == 1
    (there,) = [item for item in b.server._incoming if item.lane == "calls"]
    wait_until(lambda: not there.reader._held, 10.0, "that no service thread stays with the connection")
    interrupt(Reactor, "_wake", lambda reactor: reactor is b.reactor)
    made: list[Any] = []

    def is_done() -> bool:
        if not made:
            made.append(a.submit("b", note_run))
        return False

    def read() -> None:
        while not made:  # a service thread may be with the connection once more, for a moment
            b.server.take_notices("a", 10.0, is_done, lambda note: False)

    expect_interrupt(read)
    assert made[0].wait() == 2
    assert a.call("b", note_run) == 3
    wait_until(lambda: not b.reactor._tasks, 10.0, "that nothing is left to do")
    assert a.call("b", note_run) == 4


def test_a_future_that_had_not_got_its_value(
    make_agents: MakeAgents, interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _b = make_agents(2)
    assert a.call("b", operator.add, (1, 1)) == 2
    future = a.submit("b", wait_at_gate)
    interrupt(torch.futures.Future, "set_result")
    reader = lane_of(a).reader
    wait_readable = reader._wait_readable

    def wait_here(timeout_s: float) -> bool:
        if threading.current_thread() is threading.main_thread():  # which reads now, so that no other thread does
            gate.set()
        return wait_readable(timeout_s)

    monkeypatch.setattr(reader, "_wait_readable", wait_here)
    expect_interrupt(future.wait)
    assert future.done()
    assert future.wait() is True
    wait_until(lambda: a.is_quiet, 10.0)
    assert future.call is not None
    assert future.call.is_done


def test_the_end_of_a_connection_ends_all_its_calls(make_agents: MakeAgents, interrupt: Interrupt) -> None:
    a, _b = make_agents(2)
    futures = [a.submit("b", wait_at_gate) for _ in range(5)]
    interrupt(Peer, "lost")
    expect_interrupt(lambda: lane_of(a).reader.end(ConnectionLost("by a test")))
    assert all(future.done() for future in futures)
    for future in futures:
        with pytest.raises(WorkerLost):
            future.wait()
    assert a.client.num_pending == 0


def test_cancelling_ends_the_call(make_agents: MakeAgents, interrupt: Interrupt) -> None:
    a, _b = make_agents(2)
    future = a.submit("b", wait_at_gate)
    interrupt(Client, "control")
    expect_interrupt(future.cancel)
    assert future.done()
    with pytest.raises(CallCancelled):
        future.wait()


def test_the_clock_wakes_all_the_same(interrupt: Interrupt) -> None:
    sweeps: list[float] = []

    def sweep(now: float) -> float:
        sweeps.append(now)
        return float("inf")

    reactor = Reactor("w", 2, sweep)
    reactor.start()
    try:
        interrupt(type(reactor.clock), "wake")
        expect_interrupt(lambda: reactor.expect(0.0))
        wait_until(lambda: sweeps, 10.0, "that the clock looks after what is expected")
        assert len(sweeps) >= 1
    finally:
        reactor.close()


def test_closing_is_not_cut_off(make_agents: MakeAgents, interrupt: Interrupt) -> None:
    a, _b = make_agents(2)
    assert a.call("b", operator.add, (1, 1)) == 2
    future = a.submit("a", wait_at_gate)
    interrupt(Peer, "close")
    gate.set()
    expect_interrupt(a.close)
    assert a.wait_closed(0.0)
    assert a.peers.lanes() == []
    wait_until(lambda: future.done() and not a.reactor.num_threads, 10.0, "that nothing is left")
