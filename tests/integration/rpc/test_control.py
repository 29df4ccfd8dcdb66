"""Control operations and connections of a worker that was taken over: every field is checked, every table has an end."""

from __future__ import annotations

import contextlib
import gc
import operator
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gradwire.config import Limits
from gradwire.errors import DecodeError, RpcTimeout
from gradwire.rpc import Agent
from gradwire.rpc import connection as incoming
from gradwire.rpc.functions import CallId
from gradwire.rpc.pending_calls import PendingCall
from gradwire.testing import wait_until
from gradwire.testing.transports import receive_frames
from gradwire.transports.stream import StreamConnection
from gradwire.wire import serialization as objects
from gradwire.wire.messages import Call, Failure, Goodbye, Reply
from rpc import handlers
from rpc.by_hand import connect, receive, send_control
from rpc.fixtures import MakeAgents

LIMIT_S = 20.0


@pytest.fixture
def agent(make_agents: MakeAgents) -> Iterator[Agent]:
    """A worker that another one calls before and after."""
    limits = Limits(frame_bytes=1 << 22, calls_in_flight=8)
    a, b = make_agents("a", "b", trust="data", limits=limits)
    assert a.call("b", "double", (1,)) == 2
    yield b
    assert a.call("b", "double", (2,)) == 4


@pytest.fixture
def control(agent: Agent) -> Iterator[StreamConnection]:
    with contextlib.closing(connect(agent, "control")) as made:
        yield made


@pytest.fixture
def calls(agent: Agent) -> Iterator[StreamConnection]:
    with contextlib.closing(connect(agent, "calls")) as made:
        yield made


TENSOR = torch.ones(2)
GROUP = ["b", "mallory"]
BAD_FIELDS = [
    ("~cancel", ()),
    ("~cancel", (1, 2)),
    ("~cancel", ("1",)),
    ("~cancel", (b"x" * (1 << 20),)),
    ("~cancel", ("x" * (1 << 20),)),
    ("~cancel", ([1],)),
    ("~cancel", ({},)),
    ("~cancel", (None,)),
    ("~cancel", (True,)),
    ("~cancel", (1.0,)),
    ("~cancel", (TENSOR,)),
    ("~cancel", (0,)),
    ("~cancel", (-1,)),
    ("~cancel", (2**63,)),
    ("~cancel", (2**200,)),
    ("~gather", ()),
    ("~gather", (GROUP, 1, b"", [])),
    ("~gather", ("b", 1, b"", [], 0.0, False)),
    ("~gather", ([], 1, b"", [], 0.0, False)),
    ("~gather", ([b"b", b"mallory"], 1, b"", [], 0.0, False)),
    ("~gather", (["b", "mallory", "x" * 10_000], 1, b"", [], 0.0, False)),
    ("~gather", (["a", "b"], 1, b"", [], 0.0, False)),
    ("~gather", (["a", "mallory"], 1, b"", [], 0.0, False)),
    ("~gather", (["mallory", "b"], 1, b"", [], 0.0, False)),
    ("~gather", (["b", "b", "mallory"], 1, b"", [], 0.0, False)),
    ("~gather", (["b", "mallory", "unknown"], 1, b"", [], 0.0, False)),
    ("~gather", (GROUP, 6, b"", [], 0.0, False)),
    ("~gather", (GROUP, -1, b"", [], 0.0, False)),
    ("~gather", (GROUP, 1, "text", [], 0.0, False)),
    ("~gather", (GROUP, 1, b"", [1], 0.0, False)),
    ("~gather", (GROUP, 1, b"", TENSOR, 0.0, False)),
    ("~gather", (GROUP, 1, b"", [], -1.0, False)),
    ("~gather", (GROUP, 1, b"", [], float("nan"), False)),
    ("~gather", (GROUP, 1, b"", [], float("inf"), False)),
    ("~gather", (GROUP, 1, b"", [], "1", False)),
    ("~gather", (GROUP, 1, b"", [], 0.0, 1)),
    ("~join", (b"", 2, [])),
    ("~met", ()),
    ("~", ()),
    ("~no such operation", (1,)),
]


@pytest.mark.parametrize(("function", "args"), BAD_FIELDS, ids=range(len(BAD_FIELDS)))
def test_fields_that_are_not_what_they_must_be_change_nothing(
    agent: Agent, control: StreamConnection, calls: StreamConnection, function: str, args: tuple[Any, ...]
) -> None:
    send_control(control, 1, function, *args)
    answer = receive(control)
    assert isinstance(answer, Failure)
    assert len(answer.error.message) < 2000
    assert not any(item.cancelled for item in agent.server.incoming)
    assert agent.gathering._rounds == []
    send_control(control, 2, "~cancel", 5)  # the connection goes on
    assert isinstance(receive(control), Reply)


def test_control_operations_come_without_notes(control: StreamConnection) -> None:
    send_control(control, 1, "~cancel", 5, autograd=[1, 2, 3])
    answer = receive(control)
    assert isinstance(answer, Failure)
    assert "notes" in answer.error.message


def test_cancellations_are_forgotten(agent: Agent, control: StreamConnection, calls: StreamConnection) -> None:
    for number in range(1, 101):
        send_control(control, number, "~cancel", 1000 + number)
        assert isinstance(receive(control), Reply)
    (there,) = [item for item in agent.server.incoming if item.lane == "calls" and item.info.name == "mallory"]
    assert len(there.cancelled) == agent.config.limits.calls_in_flight


def test_connections_of_one_worker_are_bounded(agent: Agent) -> None:
    made = []
    try:
        for _ in range(12):
            made.append(connect(agent, "calls"))
            made.append(connect(agent, "control"))
        wait_until(lambda: len([item for item in agent.server.incoming if item.info.name == "mallory"]) == 8, LIMIT_S)
        oldest = receive(made[0])
        assert isinstance(oldest, Goodbye)
        assert "connections" in oldest.reason
        send_control(made[-1], 1, "~cancel", 5)  # the newest one is served
        assert isinstance(receive(made[-1]), Reply)
    finally:
        for connection in made:
            connection.close()


def test_a_call_id_cannot_be_used_twice_at_once(agent: Agent, calls: StreamConnection) -> None:
    """Requests are counted by their ids: with one id for all they would be without bound."""
    packed = objects.pack(((), {}), "data", agent.config.limits)
    held = handlers.exposed_gate
    for _ in range(2):
        calls.send(Call(1, held, 0.0, packed.codec, 0), b"", (), time.monotonic() + 5)
    answer = receive(calls)
    assert isinstance(answer, Goodbye)
    assert "call 1 was received again" in answer.reason
    handlers.gate.set()


def test_control_operations_that_wait_are_bounded(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for a worker that does not come."""
    monkeypatch.setattr(incoming, "_MAX_CONTROL", 8)
    group = ["a", "b", "mallory"]
    with contextlib.closing(connect(agent, "control")) as control:
        for number in range(1, 21):
            send_control(control, number, "~gather", group, objects.NONE, b"", [], 0.0, False)
        answers = [frame.message for frame in receive_frames(control, 12)]
        assert all(isinstance(item, Failure) and "in flight" in item.error.message for item in answers)
        assert len(agent.gathering._rounds) == 8
    wait_until(lambda: agent.gathering._rounds == [], LIMIT_S)


def test_a_worker_that_waits_at_a_barrier_can_give_up_calls(make_agents: MakeAgents) -> None:
    """However few calls may be in flight: what waits at the barrier is none of them."""
    a, b = make_agents("a", "b", trust="data", limits=Limits(calls_in_flight=1))
    deadline = time.monotonic() + LIMIT_S
    b.reactor.run_soon(lambda: b.gathering.all_gather(None, None, deadline))
    wait_until(lambda: len(a.gathering._rounds) == 1, LIMIT_S)
    with pytest.raises(RpcTimeout, match="phase: run"):
        b.call("a", handlers.exposed_gate, timeout_s=2.0)
    handlers.gate.set()
    a.gathering.all_gather(None, None, deadline)


def test_gatherings_of_one_worker_are_bounded(make_agents: MakeAgents) -> None:
    b = make_agents("a", "b", trust="data")[1]
    with contextlib.closing(connect(b, "control")) as control:
        for number in range(1, 71):
            send_control(control, number, "~gather", ["a", "b", "mallory"], objects.NONE, b"", [], 0.0, False)
        answers = [frame.message for frame in receive_frames(control, 6)]
        assert all(isinstance(item, Failure) and "64 collectives" in item.error.message for item in answers)
        assert len(b.gathering._rounds) == 64


@pytest.mark.parametrize("as_tensor", [False, True])
def test_bytes_in_gatherings_are_bounded(agent: Agent, control: StreamConnection, as_tensor: bool) -> None:
    values: tuple[Any, ...] = (b"", [torch.ones(700_000)]) if as_tensor else (bytes(2_800_000), [])
    for number in (1, 2):
        send_control(control, number, "~gather", ["a", "b", "mallory"], objects.PLAIN, *values, 0.0, False)
    answer = receive(control)
    assert isinstance(answer, Failure)
    assert "exceed Limits.frame_bytes" in answer.error.message
    assert len(agent.gathering._rounds) == 1


def test_a_collector_that_answers_for_others_is_not_believed(make_agents: MakeAgents) -> None:
    a, b = make_agents("a", "b")
    for answer in ({"b": (objects.NONE, b"", [])}, {"a": 1, "b": 2}, ["a", "b"], None):
        a.server.register_control("gather", lambda *_, answer=answer: answer, Any, Any, Any, Any, Any, Any)
        with pytest.raises(DecodeError, match=r"worker a sent an invalid result|a returned"):
            b.gathering.all_gather(1, None, time.monotonic() + LIMIT_S)


@pytest.mark.parametrize("phase", ["nowhere", b"x", ["run"], None])
def test_a_callee_that_answers_nonsense_when_asked_how_far_a_call_got(make_agents: MakeAgents, phase: Any) -> None:
    a, b = make_agents("a", "b")
    b.server.register_control("cancel", lambda *_: phase, CallId)
    with pytest.raises(RpcTimeout) as caught:
        a.call("b", handlers.wait_gate, (), None, 0.5)
    assert caught.value.phase == "unknown"
    handlers.gate.set()
    assert a.call("b", operator.add, (1, 2)) == 3


@pytest.mark.parametrize("notes", [{}, {"notice": [1, 2]}, {"notice": "x"}, {"notice": [5], "more": 1}])
def test_a_notice_that_is_not_of_its_type_does_not_reach_its_handler(agent: Agent, notes: dict[str, Any]) -> None:
    seen: list[Any] = []
    agent.notices.register("test.notice", lambda sender, note, tensors: seen.append(note), tuple[CallId])
    with contextlib.closing(connect(agent)) as connection:
        connection.send(Call(0, "~test.notice", 0.0, objects.EMPTY, 0, (), notes), b"", (), time.monotonic() + 5)
        assert isinstance(receive(connection), Goodbye)
    with contextlib.closing(connect(agent)) as connection:
        connection.send(
            Call(0, "~test.notice", 0.0, objects.EMPTY, 0, (), {"notice": [5]}), deadline=time.monotonic() + 5
        )
        wait_until(lambda: seen, LIMIT_S)
    assert seen == [(5,)]


def test_the_last_words_of_a_worker_are_harmless_to_print(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "gradwire"), contextlib.closing(connect(agent, "control")) as connection:
        connection.send(Goodbye("\x1b[2Jbye\n" + "x" * 50_000), deadline=time.monotonic() + 5)
        connection.close()
        wait_until(lambda: "bye" in caplog.text, LIMIT_S)
    assert "\x1b" not in caplog.text
    assert len(caplog.text) < 10_000


@pytest.mark.parametrize("kind", [dict[str, int], list[int], int, str])
def test_an_answer_of_another_type_fails_the_operation(make_agents: MakeAgents, kind: Any) -> None:
    """Whatever it is: a tensor looks like a mapping, but has no keys."""
    a, b = make_agents("a", "b", trust="data")
    b.server.register_control("ask", lambda _: TENSOR)
    ended: list[PendingCall] = []
    a.control("b", "ask", (), LIMIT_S, ended.append, kind)
    wait_until(lambda: bool(ended), LIMIT_S)
    assert isinstance(ended[0].error, DecodeError)
    assert "worker b sent an invalid result for ~ask" in str(ended[0].error)


def test_an_operation_that_ended_is_not_kept_by_the_future_that_waits_for_it(make_agents: MakeAgents) -> None:
    """The future is in C++, where the collector of cycles does not look."""
    a, b = make_agents("a", "b", trust="data")
    b.server.register_control("ask", lambda _: 5)

    def ask(kind: Any) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        a.control("b", "ask", (), LIMIT_S, future.set_result, kind)
        return future.wait().value

    assert [ask(kind) for kind in (int, int, str)] == [5, 5, None]  # the last one fails

    def kept() -> list[object]:
        gc.collect()
        return [item for item in gc.get_objects() if type(item) is PendingCall and item.function == "~ask"]

    wait_until(lambda: not kept(), LIMIT_S)
