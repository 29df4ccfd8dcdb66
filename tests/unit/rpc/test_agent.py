"""One worker: calls, its statistics, its end."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from conftest import MakeAgents
from gradwire.config import Limits, WorkerConfig
from gradwire.errors import ConfigurationError, RemoteCallFailed, RpcTimeout, TransportError, WorkerLost
from gradwire.rpc.agent import Agent
from gradwire.rpc.connection import Connection, Request
from gradwire.rpc.functions import async_execution
from gradwire.rpc.peers import StaticDirectory
from gradwire.rpc.pending_calls import PendingCall, new_call_id
from gradwire.runtime import start_worker
from gradwire.testing import LeakCheck, local_agents, wait_until
from gradwire.testing.transports import write_raw
from gradwire.transports.handshake import CALLER_ACCEPTS, CallerHandshake
from gradwire.types import WorkerInfo
from gradwire.wire import framing
from gradwire.wire.framing import Frame
from gradwire.wire.messages import Call, Goodbye, Message


class Crowd:
    """Counts who is inside at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the numbers
        self._inside = 0
        self.most = 0

    def enter(self, change: int) -> None:
        with self._lock:
            self._inside += change
            self.most = max(self.most, self._inside)


crowd = Crowd()
gate = threading.Event()
later: list[torch.futures.Future[int]] = []


@pytest.fixture(autouse=True)
def _open_gate() -> Iterator[None]:
    gate.clear()
    later.clear()
    yield
    gate.set()


def add(left: int, right: int) -> int:
    return left + right


def name_thread() -> str:
    return threading.current_thread().name


def wait_at_gate() -> bool:
    return gate.wait(20)


def open_gate() -> None:
    gate.set()


def visit_crowd() -> None:
    crowd.enter(+1)
    threading.Event().wait(0.002)
    crowd.enter(-1)


@async_execution
def promise() -> torch.futures.Future[int]:
    later.append(torch.futures.Future())
    return later[-1]


@pytest.mark.parametrize("transport", ["inproc", "unix", "tcp"])
def test_workers_of_one_process_call_each_other(make_agents: MakeAgents, transport: str) -> None:
    first, second = make_agents(2, transport)
    assert first.call("b", add, (1, 2)) == 3
    assert second.call("a", add, (3, 4)) == 7
    assert second.submit(second.info, add, (5, 6)).wait() == 11
    wait_until(lambda: second.statistics().num_calls_served == 2, 10.0, "that both calls count")  # after their replies
    statistics = second.statistics()
    assert statistics.num_pending == 0
    assert statistics.num_calls_made >= 2
    assert repr(first) == "<Agent a rank 0 open>"


def test_the_thread_that_reads_is_the_thread_that_runs(make_agents: MakeAgents) -> None:
    first, _second = make_agents(2)
    assert first.call("b", name_thread).startswith("gradwire-b-service-")
    assert first.call("a", name_thread).startswith("gradwire-a-service-")


def test_no_thread_stays_with_a_control_lane(make_agents: MakeAgents) -> None:
    first, second = make_agents(2)
    assert first.call("b", threading.get_ident) > 0
    ours = {kind: lane.reader.is_lingered_on for kind, lane in first.peers.peer("b").lanes.items()}
    theirs = {incoming.lane: incoming.reader.is_lingered_on for incoming in second.server.incoming}
    assert ours == theirs == {"calls": True, "control": False}


def test_a_blocked_function_holds_up_nobody(make_agents: MakeAgents) -> None:
    first, _second = make_agents(2)
    blocked = [first.submit("b", wait_at_gate) for _ in range(10)]
    assert first.call("b", add, (1, 1), timeout_s=20) == 2
    assert not any(future.done() for future in blocked)
    first.call("b", open_gate)
    assert [future.wait() for future in blocked] == [True] * 10


def test_threads_go_when_they_are_no_longer_needed(make_agents: MakeAgents) -> None:
    first, second = make_agents(2, num_worker_threads=40)
    futures = [first.submit("b", wait_at_gate) for _ in range(40)]
    wait_until(lambda: second.statistics().num_running == 40, 20, "all of them run")
    assert second.statistics().num_threads > 40
    gate.set()
    assert all(future.wait() for future in futures)
    wait_until(lambda: second.statistics().num_threads <= 42, 20, "the threads beyond the limit end")
    wait_until(lambda: second.statistics().num_running == 0, 20, "all functions have ended")


@pytest.mark.parametrize("timeout_s", [0, 30])
@pytest.mark.parametrize("to", ["a", "b"])
def test_waiting_that_cannot_be_seen_is_overcome(make_agents: MakeAgents, to: str, timeout_s: float) -> None:
    """One slot, taken by a function that waits for what only a queued one does: for oneself and for others."""
    first, _second = make_agents(2, num_worker_threads=1)
    stuck = first.submit(to, wait_at_gate, timeout_s=timeout_s)
    freeing = first.submit(to, open_gate, timeout_s=timeout_s)
    wait_until(stuck.done, 10, "the queued function was let through")
    assert stuck.wait()
    assert freeing.wait() is None


def test_no_more_run_than_configured(make_agents: MakeAgents) -> None:
    first, second = make_agents(2, num_worker_threads=2)
    crowd.most = 0
    futures = [first.submit("b", visit_crowd) for _ in range(60)]
    assert [future.wait() for future in futures] == [None] * 60
    assert 1 <= crowd.most <= 3  # a third one only if the machine stood still for so long that it looked like a stall
    wait_until(lambda: second.statistics().num_running == 0, 10)


def test_an_answer_that_comes_later_occupies_no_thread(make_agents: MakeAgents) -> None:
    first, second = make_agents(2, num_worker_threads=1)
    futures = [first.submit("b", promise) for _ in range(20)]
    wait_until(lambda: len(later) == 20, 20, "all promises are made")
    wait_until(lambda: second.statistics().num_running == 0, 20, "no function runs")
    for number, promised in enumerate(later):
        promised.set_result(number)
    assert sorted(future.wait() for future in futures) == list(range(20))


def test_a_cancellation_that_overtakes_its_call_counts(make_agents: MakeAgents) -> None:
    """Calls and control travel on two connections; which one is read first is chance."""
    first, second = make_agents(2)
    assert first.call("b", add, (1, 1)) == 2
    lane = first.peers.peer("b").lanes["calls"]
    overtaken = new_call_id()
    assert second.server.cancel(first.info, overtaken) == "send"
    packed = first.codec.pack_call(open_gate, (), {}, "b")[1]
    message = Call(overtaken, f"{__name__}:open_gate", 0.0, packed.codec, len(packed.body))
    lane.stream.send(message, packed.body)
    assert first.call("b", add, (1, 2)) == 3  # behind it on the same connection
    assert not gate.is_set()
    wait_until(lambda: second.is_quiet, 10, "nothing is owed for the call that was given up")


def test_cancellations_of_nothing_are_not_hoarded(make_agents: MakeAgents) -> None:
    first, second = make_agents(2, limits=Limits(calls_in_flight=10))
    assert first.call("b", add, (1, 1)) == 2
    for call_id in range(10**6, 10**6 + 1000):
        second.server.cancel(first.info, call_id)
    kept = [len(incoming.cancelled) for incoming in second.server.incoming]
    assert max(kept) == 10


@pytest.mark.parametrize("to", ["a", "b"])
def test_closing_completes_every_future(make_agents: MakeAgents, to: str) -> None:
    first, _second = make_agents(2)
    plain = first.submit(to, wait_at_gate)
    told: list[str] = []
    chained = first.submit(to, wait_at_gate)
    derived = chained.then(lambda done: told.append("then") or done.wait())
    watched = first.submit(to, wait_at_gate)
    watched.add_done_callback(lambda done: told.append("callback"))
    wait_until(lambda: first.statistics().num_pending == 3, 10)
    gate_opener = threading.Timer(0.5, gate.set)  # the functions need not outlive the test
    gate_opener.start()
    first.close()
    for future in (plain, chained, derived, watched):
        wait_until(future.done, 10, "the future is completed")
        with pytest.raises(WorkerLost):
            future.wait()
    assert sorted(told) == ["callback", "then"]
    gate_opener.join(10)


def test_the_end_of_a_worker_is_told(make_agents: MakeAgents) -> None:
    first, second = make_agents(2)
    assert first.call("b", add, (1, 2)) == 3
    lost: list[str] = []
    first.on_worker_lost(lambda address, reason: lost.append(f"{address.info.name}: {reason}"))
    second.close()
    wait_until(lambda: lost, 10, "the loss is told")
    with pytest.raises(WorkerLost, match="worker b"):
        first.call("b", add, (1, 2))
    assert lost == ["b: it has shut down"]


@pytest.mark.parametrize("repeats", [["Hello"], ["Proof"], ["Hello", "Proof"]])
def test_a_handshake_out_of_turn_ends_only_its_connection(
    make_agents: MakeAgents, repeats: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Messages sent twice in one write, by somebody who knows the token."""
    first, second = make_agents(2, "inproc")
    assert first.call("b", add, (1, 1)) == 2
    rogue = first.transports["inproc"].connect(second.address.uris[0], time.monotonic() + 10)
    rogue.decoder.accept = CALLER_ACCEPTS
    handshake = CallerHandshake(first.identity, second.address, "calls")
    answer: Message | None = handshake.begin()
    with caplog.at_level(logging.INFO, "gradwire"), pytest.raises(TransportError):  # noqa: PT012
        while True:
            copies = 2 if type(answer).__name__ in repeats else 1
            write_raw(rogue, framing.encode(answer) * copies if answer is not None else b"")
            answer = handshake.on_message(rogue.receive(time.monotonic() + 10).message, None)
    rogue.close()
    assert "please report" not in caplog.text
    assert first.call("b", add, (1, 2)) == 3


@pytest.mark.parametrize("num_messages", [1, 2])
def test_a_caller_may_give_up_during_the_handshake(
    make_agents: MakeAgents, num_messages: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Its goodbye is read together with its first or its last message."""
    first, second = make_agents(2, "inproc")
    stream = first.transports["inproc"].connect(second.address.uris[0], time.monotonic() + 10)
    stream.decoder.accept = CALLER_ACCEPTS
    handshake = CallerHandshake(first.identity, second.address, "calls")
    message: Message | None = handshake.begin()
    sent = b""
    for number in range(num_messages):
        assert message is not None
        sent = framing.encode(message)
        if number + 1 < num_messages:
            write_raw(stream, sent)
            message = handshake.on_message(stream.receive(time.monotonic() + 10).message, None)
    with caplog.at_level(logging.INFO, "gradwire"):
        write_raw(stream, sent + framing.encode(Goodbye("the connection attempt was abandoned")))
        stream.close()
        wait_until(lambda: not second.server.incoming, 10, "that the connection is forgotten")
        assert caplog.text == ""
    assert first.call("b", add, (1, 2)) == 3


@pytest.mark.parametrize("transport", ["inproc", "unix", "tcp"])
def test_closing_ends_everything(transport: str) -> None:
    with LeakCheck(5.0) as check:
        with local_agents(3, transport) as agents:
            for agent in agents:
                for other in agents:
                    assert agent.call(other.info, add, (1, 2)) == 3
            value = torch.ones(200_000)
            assert torch.equal(agents[0].call("b", torch.clone, (value,)), value)
        assert all(agent.is_closed for agent in agents)
        for agent in agents:
            agent.close()
            assert agent.wait_closed(1)
    assert check.leaks() == []


def start(name: str, directory: StaticDirectory, **config: object) -> Agent:
    return start_worker(WorkerInfo(name, 0), WorkerConfig(token=b"x", **config), directory)  # type: ignore[arg-type]


def test_a_callback_that_fails_does_not_keep_a_worker_from_closing(
    make_agents: MakeAgents, caplog: pytest.LogCaptureFixture
) -> None:
    (a,) = make_agents(1)
    told: list[str] = []

    def fail() -> None:
        a.before_close.remove(fail)  # the callback after it is called nevertheless
        raise ValueError("no exporter")

    a.before_close += [fail, lambda: told.append("next")]
    a.close()
    assert a.wait_closed(0.0)
    assert told == ["next"]
    assert "a: a callback failed while the worker was being closed" in caplog.text
    assert "no exporter" in caplog.text


def test_ctrl_c_in_a_callback_does_not_keep_a_worker_from_closing(make_agents: MakeAgents) -> None:
    (a,) = make_agents(1)

    def interrupt() -> None:
        raise KeyboardInterrupt

    a.before_close.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        a.close()
    assert a.wait_closed(0.0)


def test_a_worker_that_cannot_start_leaves_nothing() -> None:
    directory = StaticDirectory()
    first = start("same", directory, transports=("inproc",))
    with LeakCheck(2.0), pytest.raises(ConfigurationError, match="in use"):
        start("same", directory, transports=("unix", "inproc"))
    first.close()


@pytest.mark.parametrize("name", ["", "a b", "x" * 200, "a/b", "new\nline"])
def test_names_that_confuse_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"(?i)worker('s)? name"):
        start(name, StaticDirectory(), transports=("unix",))


# -- answers of a worker that leaves ------------------------------------------------------------------------------------


_MOMENT_S = 0.3  # closing takes a few milliseconds where it does not wait


class HeldReplies:
    """Holds the replies of one worker back until `release`, as if their threads got no processor time."""

    def __init__(self, agent: Agent, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.may_go = threading.Event(), threading.Event()
        send = Connection.reply

        def reply(incoming: Connection, request: Request, value: Any) -> None:
            if incoming.server.agent is agent and request.function == function:
                self.has_begun.set()
                assert self.may_go.wait(20.0)
            send(incoming, request, value)

        monkeypatch.setattr(Connection, "reply", reply)


def ask(agent: Agent, to: str, operation: str) -> list[PendingCall]:
    """Start a control operation; the list holds it as soon as it has ended."""
    ended: list[PendingCall] = []
    agent.control(to, operation, (), 0.0, ended.append)
    return ended


def close_held(agent: Agent, held: HeldReplies) -> None:
    """Close a worker whose replies are held back, which it has to wait for."""
    closer = threading.Thread(target=agent.close)
    closer.start()
    try:
        wait_until(lambda: agent.is_closed, 10.0, "that the worker begins to close")
        has_closed = agent.wait_closed(_MOMENT_S)
    finally:
        held.may_go.set()
        closer.join(20.0)
    assert not has_closed, "the worker has closed before it sent its answer"


class Interrupted(dict[str, int]):
    """A table with Ctrl-C on the first look."""

    is_pressed = False

    def get(self, *args: Any) -> Any:
        if not self.is_pressed:
            self.is_pressed = True
            signal.raise_signal(signal.SIGINT)
        return super().get(*args)


def test_ctrl_c_ends_the_wait_until_an_earlier_end_is_told(make_agents: MakeAgents) -> None:
    """The main thread connects to a worker while another thread still tells of the worker's end."""
    a, b = make_agents(2)
    a._telling = Interrupted(b=-1)
    began = time.monotonic()

    def connect_and_wait() -> None:
        a.on_connected(b.address)
        threading.Event().wait(10.0)  # an interrupt that the first wait does not let in comes here

    with pytest.raises(KeyboardInterrupt):
        connect_and_wait()
    assert time.monotonic() - began < 4.5  # the wait itself ends after 5 s
    a._telling = {}
    assert a.call("b", max, (1, 2)) == 2


def test_a_control_operation_that_exits_is_answered(make_agents: MakeAgents) -> None:
    """It runs in the thread that reads: those that come after it must be answered, too."""
    a, b = make_agents(2)
    b.server.register_control("exit", lambda source: sys.exit(3))
    b.server.register_control("decide", lambda source: 7)
    with pytest.raises(RemoteCallFailed, match="SystemExit"):
        a.ask("b", "exit", (), 5.0).wait()
    assert a.ask("b", "decide", (), 5.0).wait() == 7


def test_a_worker_that_closes_sends_the_answer_of_a_control_operation_first(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_agents(2)
    a.server.register_control("decide", lambda source: 7)
    held = HeldReplies(a, "~decide", monkeypatch)
    ended = ask(b, "a", "decide")
    assert held.has_begun.wait(10.0)
    close_held(a, held)
    wait_until(lambda: ended, 10.0, "that the answer is read")
    assert ended[0].error is None
    assert ended[0].value == 7


def test_a_collector_that_leaves_after_a_gathering_sends_its_answers_first(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its own values as soon as the last worker has come, and that worker's answer is still to be written."""
    a, b = make_agents(2)
    held = HeldReplies(a, "~gather", monkeypatch)
    values: dict[str, Any] = {}

    def gather(agent: Agent) -> None:
        try:
            values[agent.info.name] = agent.gathering.all_gather(agent.info.id, ["a", "b"], float("inf"))
        except WorkerLost as error:
            values[agent.info.name] = error

    threads = [threading.Thread(target=gather, args=(agent,)) for agent in (a, b)]
    threads[0].start()
    wait_until(lambda: a.gathering._rounds, 10.0, "that the collector waits")
    threads[1].start()
    assert held.has_begun.wait(10.0)
    threads[0].join(10.0)
    close_held(a, held)
    threads[1].join(10.0)
    assert values == {"a": {"a": 0, "b": 1}, "b": {"a": 0, "b": 1}}


def test_a_goodbye_does_not_overtake_an_answer_on_another_connection(make_agents: MakeAgents) -> None:
    """The answer lies unread in the connection that b opened, while b reads the goodbye in the one that a opened."""
    a, b = make_agents(2)
    a.server.register_control("decide", lambda source: 7)
    b.server.register_control("nothing", lambda source: None)
    ended = ask(a, "b", "nothing")
    wait_until(lambda: ended, 10.0, "that a has a connection to b")
    ended = ask(b, "a", "decide")
    wait_until(lambda: ended, 10.0, "that b has a connection to a")
    lane = b.peers.peer("a").lanes["control"]
    wait_until(lambda: lane.reader._armed, 10.0, "that no thread reads the connection")
    b.reactor.remove(lane.stream.fileno())  # no event tells b of what comes
    (there,) = [item for item in a.server.incoming if item.lane == "control"]
    num_sent = there.stream.bytes_sent
    ended = ask(b, "a", "decide")
    wait_until(lambda: there.stream.bytes_sent > num_sent, 10.0, "that a has answered")
    assert not ended
    a.close()
    wait_until(lambda: ended, 10.0, "that the call ends")
    assert ended[0].error is None
    assert ended[0].value == 7
    wait_until(lambda: b.has_ended("a"), 10.0, "that b knows the end of a")


def test_the_end_of_a_connection_does_not_overtake_an_answer_that_is_being_read(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that takes long over an answer is not waited for: another one reads on, and finds the end."""
    a, b = make_agents(2)
    a.server.register_control("decide", lambda source: 7)
    load, has_begun, may_go = b.codec.load, threading.Event(), threading.Event()

    def load_slowly(*args: Any) -> Any:
        has_begun.set()
        assert may_go.wait(20.0)
        return load(*args)

    monkeypatch.setattr(b.codec, "load", load_slowly)
    ended = ask(b, "a", "decide")
    try:
        assert has_begun.wait(10.0)
        a.close()
        wait_until(lambda: b.has_ended("a") and not b.peers.peer("a").lanes, 10.0, "that b knows the end of a")
    finally:
        may_go.set()
    wait_until(lambda: ended, 10.0, "that the call ends")
    assert ended[0].error is None
    assert ended[0].value == 7


def test_the_end_of_a_connection_does_not_overtake_the_goodbye_that_is_being_read(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the worker would count as dead, and what it sent before it left would not be read."""
    a, b = make_agents(2)
    b.server.register_control("nothing", lambda source: None)
    ended = ask(a, "b", "nothing")
    wait_until(lambda: ended, 10.0, "that a has a connection to b")
    (there,) = [item for item in b.server.incoming if item.lane == "control"]
    handle, may_go, num_handled = there.reader.on_frame, threading.Event(), 0

    def handle_slowly(frame: Frame) -> None:
        nonlocal num_handled
        num_handled += 1
        if num_handled == 1:
            may_go.wait(0.1)  # never set: a thread that gets no processor time, for longer than the clock waits
        handle(frame)

    there.reader.on_frame = handle_slowly
    reasons: list[str] = []
    b.on_worker_lost(lambda address, reason: reasons.append(reason))
    a.close()
    wait_until(lambda: reasons, 10.0, "that b knows the end of a")
    assert reasons == ["it has shut down"]


def test_a_shutdown_that_times_out_says_which_calls_are_in_progress(make_agents: MakeAgents) -> None:
    a, _b = make_agents(2)
    called = a.submit("b", wait_at_gate)
    words = r"timed out in rpc.shutdown: calls of worker a are still in progress \(made: 1, served: 0\)"
    with pytest.raises(RpcTimeout, match=f"{words}; pass a larger timeout"):
        a.gathering.wait_all_quiet(time.monotonic())
    gate.set()
    assert called.wait()


def test_asking_all_returns_the_valid_answers_by_worker_in_the_order_given(make_agents: MakeAgents) -> None:
    a, b, c, d = make_agents(4)
    c.server.register_control("number", lambda source, more: 7 + more, int)
    b.server.register_control("number", lambda source, more: 8 + more, int)
    d.server.register_control("number", lambda source, more: "seven", int)
    assert list(a.ask_all(["c", "b"], "number", (1,), 10.0, int).items()) == [("c", 8), ("b", 9)]
    assert a.ask_all(["unknown", "d", "c"], "number", (0,), 10.0, int) == {"c": 7}


def test_one_deadline_counts_for_all_that_are_asked(make_agents: MakeAgents) -> None:
    a, b, c = make_agents(3)
    b.server.register_control("number", lambda source: torch.futures.Future())
    c.server.register_control("number", lambda source: 7)
    a.ask_all(["b", "c"], "number", (), 0.2, int)  # connects
    began = time.monotonic()
    assert a.ask_all(["b", "c"], "number", (), 2.0, int) == {"c": 7}
    assert time.monotonic() - began < 10.0
