"""A connection that ends says little about the worker at its other end, if that worker gave it up."""

from __future__ import annotations

import logging
import operator
import threading

import pytest

from conftest import MakeAgents
from gradwire.errors import ConnectionClosed, RpcTimeout
from gradwire.rpc.connection import Connection
from gradwire.testing import wait_until
from gradwire.wire.framing import Frame
from gradwire.wire.messages import Goodbye, Proof


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
            a.call("b", operator.add, (1, 2), timeout_s=0.2)
        assert caught.value.phase == "connect"
        assert num_held == 1
        go_on.set()
        wait_until(lambda: "connecting was given up" in caplog.text or "in the wrong place" in caplog.text, 20.0)
    assert a.call("b", operator.add, (1, 2)) == 3
    assert b.call("a", operator.add, (1, 2)) == 3
    assert lost == []


@pytest.mark.parametrize(("reason", "is_end"), [("shutdown", True), ("it cannot read what came", False), (None, True)])
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
    wait_until(lambda: not any(item.lane == "control" for item in list(b.server._incoming)), 20.0)
    if is_end:
        wait_until(lambda: lost == ["a"], 20.0)
        wait_until(
            lambda: "calls" not in a.peers.peer("b").lanes, 5.0, "that a has noticed that b closed the other lane"
        )
    assert a.call("b", operator.add, (1, 2), timeout_s=5.0) == 3
    assert lost == (["a"] if is_end else [])
