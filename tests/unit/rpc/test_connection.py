"""Connections that end, or begin, at the wrong moment."""

from __future__ import annotations

import logging
import operator
import sys
import threading
import time
from typing import Any

import pytest
import torch

from conftest import MakeAgents
from gradwire.errors import ConnectionClosed, ConnectionLost, RpcError, RpcTimeout, WorkerLost
from gradwire.rpc import connection as incoming
from gradwire.rpc.connection import Connection
from gradwire.rpc.reader import Reader
from gradwire.testing import wait_until
from gradwire.wire.framing import Frame
from gradwire.wire.messages import Goodbye, Proof


def echo(value: Any) -> Any:
    return value


def make_large() -> torch.Tensor:
    return torch.ones(4_000_000)


class Exiting:
    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, ()


def make_exiting() -> Exiting:
    return Exiting()


def stand_still(reader: Reader) -> None:
    """Nobody reads that connection any more, as if its process had been stopped."""
    wait_until(lambda: not reader._held, 10.0, "that no thread stays with the connection")
    with reader._lock:
        reader._held = True


def ends_of(a: Any, b: Any) -> tuple[Connection, Connection]:
    """Both ends of the connection for the calls of one worker to the other."""
    assert a.call("b", operator.add, (1, 1)) == 2
    (there,) = [item for item in b.server.incoming if item.lane == "calls"]
    return a.peers.peer("b").lanes["calls"], there


def test_a_notice_that_is_cut_off_ends_its_lane_at_once(make_agents: MakeAgents) -> None:
    """Its descriptor is closed by then: a reader that ended later would take the number from its next owner."""
    a, b = make_agents(2, "inproc")
    cut: list[str] = []
    a.notices.on_cut(cut.append)
    b.notices.register("x", lambda sender, note, tensors: None, None)
    lane, there = ends_of(a, b)
    stand_still(there.reader)
    with pytest.raises(RpcTimeout):
        a.notices.send("b", "x", None, [make_large()], time.monotonic() + 0.2)
    assert lane.stream.is_closed
    assert lane.reader.has_ended
    assert a.peers.peer("b").lanes.get("calls") is not lane
    wait_until(lambda: cut == ["b"], 10.0, "that it is told")  # a service thread may have ended the lane
    there.reader._held = False


def test_a_reply_that_is_cut_off_ends_its_connection_at_once(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_agents(2, "inproc")
    lane, there = ends_of(a, b)
    stand_still(lane.reader)
    monkeypatch.setattr(incoming, "_REPLY_S", 0.2)
    a.client.start("b", make_large, (), None, 0.0)
    wait_until(lambda: there.stream.is_closed and there not in b.server.incoming, 10.0, "that it has ended")
    assert there.reader.has_ended
    lane.reader._held = False


def test_a_call_to_a_worker_that_has_left_loses_no_answer(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be sent. The answer to an earlier call, and that the worker said goodbye, are still to be read."""
    a, b = make_agents(2)
    lane, there = ends_of(a, b)
    end_when_read = lane.reader.end_when_read

    def go_on_reading(error: ConnectionLost, deadline: float) -> None:
        lane.reader._give_up(lane.reader._epoch)
        end_when_read(error, deadline)

    monkeypatch.setattr(lane.reader, "end_when_read", go_on_reading)
    stand_still(lane.reader)
    earlier = a.submit("b", operator.add, (1, 2))
    wait_until(lambda: b.server.num_served == 2 and b.is_quiet, 10.0, "that the answer was sent")
    there.say_goodbye("shutdown")
    there.end(ConnectionClosed("shutdown"))
    with pytest.raises(WorkerLost, match="it has shut down"):
        a.call("b", operator.add, (1, 2), timeout_s=5.0)
    assert earlier.wait() == 3


def test_a_result_that_ends_the_program_when_it_is_unpickled_fails_its_call(make_agents: MakeAgents) -> None:
    a, _b = make_agents(2)
    words = r"the result of .*make_exiting from worker b could not be rebuilt: unpickling it raised SystemExit"
    with pytest.raises(RpcError, match=words) as caught:
        a.call("b", make_exiting)
    assert caught.type is RpcError
    assert a.call("b", operator.add, (1, 2)) == 3


def test_a_lane_that_ends_before_it_is_listed_is_not_listed(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _b = make_agents(2)
    start, ended = Reader.start, []

    def start_and_end(reader: Reader) -> None:
        start(reader)
        if not ended and threading.current_thread() is threading.main_thread():
            ended.append(reader)
            reader.end(ConnectionClosed("by a test"))

    monkeypatch.setattr(Reader, "start", start_and_end)
    first = a.peers.peer("b").lane("calls", time.monotonic() + 10)
    assert ended == [first.reader]
    assert list(a.peers.peer("b").lanes) == ["control"]
    assert a.call("b", operator.add, (1, 2)) == 3


def test_a_cancelled_call_on_a_connection_that_ends(make_agents: MakeAgents) -> None:
    """The call was given up before it arrived, and the connection ends while that is looked up."""
    a, b = make_agents(2)
    lane, there = ends_of(a, b)

    class Ending(dict[int, None]):
        def __contains__(self, call_id: object) -> bool:
            there.requests.clear()
            return True

    there.cancelled = Ending({0: None})
    a.client.start("b", echo, (1,), None, 0.2)
    wait_until(lambda: not lane.calls, 10.0, "that the call has ended")
    there.cancelled = {}
    assert a.call("b", echo, (2,)) == 2
    assert not there.stream.is_closed


def test_a_frame_that_arrives_with_the_handshake_is_handled_as_after_it(make_agents: MakeAgents) -> None:
    """A thread waits for notices on a connection whose handshake is not quite over."""
    a, b = make_agents(2)
    got: list[str] = []
    b.notices.register("x", lambda sender, note, tensors: got.append(sender.name), None)
    assert a.call("b", operator.add, (1, 1)) == 2
    (there,) = [item for item in b.server.incoming if item.lane == "calls"]
    wait_until(lambda: not there.reader._held, 10.0, "that no service thread stays with the connection")
    there.reader.on_frame = there._on_handshake

    def is_done() -> bool:
        if there.reader.on_frame == there._on_handshake:  # here the handshake ends, in another thread
            there.reader.on_frame = there._on_request
            a.notices.send("b", "x", None)
        return bool(got)

    deadline = time.monotonic() + 10.0
    while not got and time.monotonic() < deadline:  # a service thread may hold the connection once more
        b.server.take_notices({0}, 1.0, is_done, lambda note: True)
    assert got == ["a"]


# -- connections that are given up --------------------------------------------------------------------------------------


def test_caller_that_gives_up_connecting_is_not_taken_for_dead(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has shown who it is, and does not wait for the last word: the listener holds the connection for open."""
    a, b = make_agents(2)
    lost: list[str] = []
    b.on_worker_lost(lambda address, reason: lost.append(address.info.name))
    go_on, num_held = threading.Event(), 0
    on_handshake = Connection._on_handshake

    def answer_late(self: Connection, frame: Frame) -> None:
        nonlocal num_held
        if isinstance(frame.message, Proof) and self._handshake is not None and self._handshake.hello.lane == "control":
            num_held += 1
            assert go_on.wait(10)
        on_handshake(self, frame)

    monkeypatch.setattr(Connection, "_on_handshake", answer_late)
    with caplog.at_level(logging.INFO, "gradwire"):
        with pytest.raises(RpcTimeout) as caught:
            a.call("b", operator.add, (1, 2), timeout_s=1.0)
        assert caught.value.phase == "connect"
        assert num_held == 1
        go_on.set()
        wait_until(lambda: "the connection attempt was abandoned" in caplog.text or "out of order" in caplog.text, 20.0)
    assert a.call("b", operator.add, (1, 2)) == 3
    assert b.call("a", operator.add, (1, 2)) == 3
    assert lost == []


@pytest.mark.parametrize(
    ("reason", "is_end"), [("shutdown", True), ("it cannot read the received data", False), (None, True)]
)
def test_only_some_ends_of_a_connection_are_the_end_of_its_worker(
    make_agents: MakeAgents, reason: str | None, is_end: bool
) -> None:
    a, b = make_agents(2)
    lost: list[str] = []
    b.on_worker_lost(lambda address, reason: lost.append(address.info.name))
    assert a.call("b", operator.add, (1, 2)) == 3
    lane = a.peers.peer("b").lanes["control"]
    if reason is not None:
        lane.stream.send(Goodbye(reason))
    lane.reader.end(ConnectionClosed("by a test"))
    wait_until(lambda: not any(item.lane == "control" for item in list(b.server.incoming)), 20.0)
    if is_end:
        wait_until(lambda: lost == ["a"], 20.0)
        wait_until(
            lambda: "calls" not in a.peers.peer("b").lanes, 5.0, "that a has noticed that b closed the other lane"
        )
    assert a.call("b", operator.add, (1, 2), timeout_s=5.0) == 3
    assert lost == (["a"] if is_end else [])
