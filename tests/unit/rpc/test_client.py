"""Calls end once, whatever happens to their worker, their connection or the thread that waits."""

from __future__ import annotations

import errno
import operator
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from conftest import MakeAgents
from gradwire import _interrupts
from gradwire.errors import CallCancelled, ConnectionClosed, ConnectionLost, NotInitialized, RpcTimeout, WorkerLost
from gradwire.rpc.agent import Agent
from gradwire.rpc.client import Client
from gradwire.rpc.connection import Connection
from gradwire.rpc.interceptors import Envelope, Interceptor
from gradwire.rpc.peers import Peer
from gradwire.rpc.reactor import Reactor
from gradwire.rpc.reader import Reader
from gradwire.testing import wait_until
from gradwire.transports import unix
from gradwire.transports.stream import StreamConnection

gate = threading.Event()


def wait_at_gate() -> bool:
    return gate.wait(20)


@pytest.fixture(autouse=True)
def _open_gate() -> Iterator[None]:
    gate.clear()
    yield
    gate.set()


class Packed:
    """An argument that runs something while it is packed, and arrives as 1."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action

    def __reduce__(self) -> tuple[Any, ...]:
        self._action()
        return int, (1,)


def test_a_call_on_a_connection_that_has_just_ended_is_sent_on_another(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback makes it: small calls wait there for each other, to be sent together."""
    monkeypatch.setattr(Reader, "take_over_if_stuck", lambda *_: False)  # the machine may stand still for a moment
    a, _b = make_agents(2)
    assert a.call("b", operator.add, (1, 1)) == 2
    reader = a.peers.peer("b").lanes["calls"].reader
    made: list[Any] = []

    def end_lane() -> None:
        assert reader.will_flush
        reader.end(ConnectionClosed("by a test"))

    def callback(done: Any) -> None:
        made.append(a.submit("b", operator.add, (Packed(end_lane), 2), timeout_s=5.0))

    first = a.submit("b", wait_at_gate)
    first.add_done_callback(callback)
    gate.set()
    wait_until(lambda: made and made[0].done(), 20.0, "that the call has ended")
    assert made[0].wait() == 3


def test_a_call_that_is_held_back_while_others_are_sent_is_sent_too(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that sends what was held back may do so, and begin anew, just before one more call is held back."""
    a, _b = make_agents(2)
    assert a.call("b", operator.add, (1, 1)) == 2
    lane = a.peers.peer("b").lanes["calls"]
    reader, stream, hold_back = lane.reader, lane.stream, lane.stream._hold_back
    wait_until(lambda: not reader._held, 10.0, "that no service thread stays with the connection")

    def flush() -> None:
        """Do as a service thread that has handled the answers it had."""
        reader.will_flush = False
        if reader.must_flush:
            reader.must_flush = False
            stream.flush()

    def flush_first(buffers: list[Any]) -> bool:
        flush()
        reader.will_flush = True
        return bool(hold_back(buffers))

    monkeypatch.setattr(stream, "_hold_back", flush_first)
    reader.will_flush = True
    with reader._lock:  # as if that thread had the connection
        reader._held = True
    made = a.submit("b", operator.add, (1, 2), timeout_s=5.0)
    flush()
    reader._give_up(reader._epoch)
    assert made.wait() == 3


class FailsReplies(Interceptor):
    name = "fails"
    note_type = int

    def outgoing(self, envelope: Envelope, tensors: Sequence[torch.Tensor]) -> Any:
        if envelope.kind == "reply":
            raise TimeoutError("cannot record the reply")
        return 1


def test_an_interceptor_that_fails_on_a_reply_fails_the_call(make_agents: MakeAgents) -> None:
    a, b = make_agents(2)
    for agent in (a, b):
        agent.interceptors.append(FailsReplies())
    with pytest.raises(TimeoutError, match="cannot record the reply"):
        a.call("b", operator.add, (1, 2), timeout_s=5.0)
    wait_until(lambda: b.is_quiet, 10.0, "that no answer is owed")


def test_a_reply_that_cannot_be_read_fails_the_call(make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = make_agents(2)
    assert a.call("b", operator.add, (1, 2)) == 3
    (there,) = [item for item in b.server.incoming if item.lane == "calls"]
    send, num_failed = there.stream.send, 0

    def fail_once(*args: Any) -> None:
        nonlocal num_failed
        num_failed += 1
        monkeypatch.setattr(there.stream, "send", send)
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(there.stream, "send", fail_once)
    with pytest.raises(RuntimeError, match="CUDA error"):
        a.call("b", operator.add, (1, 2), timeout_s=5.0)
    assert num_failed == 1
    assert a.call("b", operator.add, (1, 2)) == 3


def test_a_deadline_counts_without_descriptors(make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch) -> None:
    """The callee cannot be asked how far the call got: there is no connection to ask it on, and none can be opened."""
    a, _b = make_agents(2)
    assert a.call("b", operator.add, (1, 2)) == 3
    late = a.submit("b", wait_at_gate, timeout_s=1.0)
    control = a.peers.peer("b").lanes.pop("control")

    def connect(*args: Any) -> StreamConnection:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(unix.UnixTransport, "connect", connect)
        wait_until(late.done, 20.0, "that the call has ended")
    a.peers.peer("b").lanes["control"] = control
    with pytest.raises(RpcTimeout) as caught:
        late.wait()
    assert caught.value.phase == "unknown"


@pytest.mark.parametrize("timeout_s", [0.0, 0.2])
def test_a_call_to_oneself_while_the_worker_closes(make_agents: MakeAgents, timeout_s: float) -> None:
    (a,) = make_agents(1)
    with pytest.raises(NotInitialized, match="has shut down"):
        a.submit("a", operator.add, (Packed(a.close), 2), timeout_s=timeout_s)
    assert a.client.num_pending == 0


def test_a_future_that_is_completed_while_the_worker_closes(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread has read the answer and wants a service thread for the callback; then the last of those ends."""
    a, _b = make_agents(2)
    assert a.call("b", operator.add, (1, 2)) == 3
    at, go_on, called = threading.Event(), threading.Event(), threading.Event()
    values: list[bool] = []
    run_soon = a.reactor.run_soon

    def run_late(task: Callable[[], None]) -> None:
        if threading.current_thread() is waiting:
            at.set()
            assert go_on.wait(10)
        run_soon(task)

    reader = a.peers.peer("b").lanes["calls"].reader
    wait_readable = reader._wait_readable

    def wait_here(timeout_s: float) -> bool:
        if threading.current_thread() is waiting:  # which reads now, so that nobody else does
            gate.set()
        return wait_readable(timeout_s)

    monkeypatch.setattr(a.reactor, "run_soon", run_late)
    monkeypatch.setattr(reader, "_wait_readable", wait_here)

    def wait() -> None:
        future = a.submit("b", wait_at_gate)
        future.add_done_callback(lambda done: called.set())
        values.append(future.wait())

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert at.wait(10)
    a.close()
    go_on.set()
    waiting.join(10)
    assert values == [True]
    assert called.wait(10)


def test_what_is_left_to_a_reactor_that_has_closed_is_done() -> None:
    reactor = Reactor("late", 2, lambda now: float("inf"))
    reactor.start()
    reactor.close()
    threads: list[str] = []
    lock = threading.Lock()  # whoever leaves a task may hold one that the task needs

    def task() -> None:
        with lock:
            threads.append(threading.current_thread().name)

    with lock:
        reactor.run_soon(task)
    wait_until(lambda: threads, 10.0, "that the task has run")
    assert threads == ["gradwire-late-last"]


def test_a_worker_that_is_back_at_once_takes_part_in_gatherings(make_agents: MakeAgents) -> None:
    """Its return is noticed while its end is still being told."""
    a, b = make_agents(2)
    a.on_connected(b.address)
    a._lost_callbacks.insert(0, lambda address, reason: a.on_connected(b.address))
    a.on_worker_ended(b.address, "by a test", was_orderly=False)
    assert not a.has_ended("b")
    theirs = threading.Thread(target=lambda: b.gathering.all_gather(2, None, time.monotonic() + 10))
    theirs.start()
    assert a.gathering.all_gather(1, None, time.monotonic() + 10) == {"a": 1, "b": 2}
    theirs.join(10)


# -- Ctrl-C in the middle of the work -----------------------------------------------------------------------------------


runs: list[str] = []


def note_run() -> int:
    runs.append(threading.current_thread().name)
    return len(runs)


@pytest.fixture(autouse=True)
def _forget_runs() -> None:
    runs.clear()


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
    (there,) = [item for item in b.server.incoming if item.lane == "calls"]
    wait_until(lambda: not there.reader._held, 10.0, "that no service thread stays with the connection")
    interrupt(Reactor, "_wake", lambda reactor: reactor is b.reactor)
    made: list[Any] = []

    def is_done() -> bool:
        if not made:
            made.append(a.submit("b", note_run))
        return False

    def read() -> None:
        while not made:  # a service thread may be with the connection once more, for a moment
            b.server.take_notices({0}, 10.0, is_done, lambda note: False)

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
