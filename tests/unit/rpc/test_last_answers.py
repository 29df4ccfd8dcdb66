"""A worker that leaves without waiting for the others still sends the answers that it owes, and they are read."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from conftest import MakeAgents
from gradwire.errors import WorkerLost
from gradwire.rpc.agent import Agent
from gradwire.rpc.connection import Connection, Request
from gradwire.rpc.pending_calls import PendingCall
from gradwire.testing import wait_until
from gradwire.wire.framing import Frame

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
    (there,) = [item for item in a.server._incoming if item.lane == "control"]
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
    (there,) = [item for item in b.server._incoming if item.lane == "control"]
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
