"""Connections that end, or begin, at the wrong moment."""

from __future__ import annotations

import operator
import threading
import time
from typing import Any

import pytest
import torch

from conftest import MakeAgents
from gradwire.errors import ConnectionClosed, RpcTimeout
from gradwire.rpc import connection as incoming
from gradwire.rpc.connection import Connection
from gradwire.rpc.reader import Reader
from gradwire.testing import wait_until


def echo(value: Any) -> Any:
    return value


def make_large() -> torch.Tensor:
    return torch.ones(4_000_000)


def stand_still(reader: Reader) -> None:
    """Nobody reads that connection any more, as if its process had been stopped."""
    wait_until(lambda: not reader._held, 10.0, "that no thread stays with the connection")
    with reader._lock:
        reader._held = True


def ends_of(a: Any, b: Any) -> tuple[Connection, Connection]:
    """Both ends of the connection for the calls of one worker to the other."""
    assert a.call("b", operator.add, (1, 1)) == 2
    (there,) = [item for item in b.server._incoming if item.lane == "calls"]
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
    assert cut == ["b"]
    there.reader._held = False


def test_a_reply_that_is_cut_off_ends_its_connection_at_once(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_agents(2, "inproc")
    lane, there = ends_of(a, b)
    stand_still(lane.reader)
    monkeypatch.setattr(incoming, "_REPLY_S", 0.2)
    a.client.start("b", make_large, (), None, 0.0)
    wait_until(lambda: there.stream.is_closed and there not in b.server._incoming, 10.0, "that it has ended")
    assert there.reader.has_ended
    lane.reader._held = False


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
    (there,) = [item for item in b.server._incoming if item.lane == "calls"]
    wait_until(lambda: not there.reader._held, 10.0, "that no service thread stays with the connection")
    there.reader.on_frame = there._on_handshake

    def is_done() -> bool:
        if there.reader.on_frame == there._on_handshake:  # here the handshake ends, in another thread
            there.reader.on_frame = there._on_request
            a.notices.send("b", "x", None)
        return bool(got)

    assert b.server.take_notices("a", 10.0, is_done, lambda note: True)
    assert got == ["a"]
