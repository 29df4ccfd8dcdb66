"""Workers and connections whose end no pending call would notice."""

from __future__ import annotations

import operator
import threading

import pytest

from conftest import MakeAgents
from gradwire.rpc.agent import Agent
from gradwire.rpc.connection import Connection
from gradwire.testing import wait_until
from gradwire.wire import serialization as objects
from gradwire.wire.messages import Call

TRANSPORTS = ["unix", "inproc", "tcp"]


def lane_of(agent: Agent, name: str, kind: str) -> Connection:
    """An open lane on which nothing is under way, at either end."""
    assert agent.call(name, operator.add, (1, 1)) == 2
    return agent.peers.peer(name).lanes[kind]


def send_bad_notice(lane: Connection) -> None:
    """Send what the other side cannot handle: it ends this connection, and says why."""
    lane.stream.send(Call(0, "~unheard of", 0.0, objects.EMPTY, 0))


def wait_forgotten(a: Agent, b: Agent, kinds: tuple[str, ...]) -> None:
    """Wait until neither side has those lanes of the first worker to the second."""
    wait_until(lambda: not set(kinds) & set(a.peers.peer("b").lanes), 10.0, "that the caller knows")
    wait_until(lambda: not {item.lane for item in b.server._incoming} & set(kinds), 10.0, "that the callee knows")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kinds", [("control",), ("calls", "control")], ids=" and ".join)
def test_the_end_of_a_worker_that_lost_its_control_lane_is_noticed(
    make_agents: MakeAgents, transport: str, kinds: tuple[str, ...]
) -> None:
    """Both lanes may be gone: then there is no connection whose end could tell."""
    a, b = make_agents(2, transport)
    for lane in [lane_of(a, "b", kind) for kind in kinds]:
        send_bad_notice(lane)
    wait_forgotten(a, b, kinds)
    assert not b.has_ended("a")
    a.close()
    wait_until(lambda: b.has_ended("a"), 10.0, "that b notices the end of a")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_control_lane_that_was_closed_is_opened_again(make_agents: MakeAgents, transport: str) -> None:
    a, b = make_agents(2, transport)
    cut: list[str] = []
    b.notices.on_cut(cut.append)
    send_bad_notice(lane_of(a, "b", "control"))
    wait_until(lambda: cut == ["a"], 10.0, "that b has closed it")

    def has_control_lane() -> bool:
        return any("control" in peer.lanes for agent in (a, b) for peer in agent.peers)

    wait_until(lambda: not has_control_lane(), 10.0, "that it is closed")
    wait_until(has_control_lane, 10.0, "that it is open again")
    assert not a.has_ended("b")
    assert not b.has_ended("a")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("reader", ["the caller", "a service thread"])
def test_the_end_of_an_idle_calls_lane_is_noticed(make_agents: MakeAgents, transport: str, reader: str) -> None:
    """Whoever sent a notice on it must be told, and the next call must not be lost to it."""
    a, b = make_agents(2, transport)
    cut: list[str] = []
    a.notices.on_cut(cut.append)
    lane = lane_of(a, "b", "calls")
    if reader == "a service thread":
        done = threading.Event()
        a.submit("b", operator.add, (1, 1)).add_done_callback(lambda _: done.set())
        assert done.wait(10.0)
    wait_until(lambda: not lane.reader._held, 10.0, "that no thread reads")
    send_bad_notice(lane)
    wait_until(lambda: cut == ["b"], 10.0, "that a is told")
    assert "calls" not in a.peers.peer("b").lanes
    assert a.call("b", operator.add, (1, 2)) == 3
    assert not b.has_ended("a")
