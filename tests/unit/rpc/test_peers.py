"""Peers: which incarnations live, whose end is noticed, and where workers are found."""

from __future__ import annotations

import operator
import threading

import pytest
import torch

from conftest import MakeAgents
from gradwire.errors import IdentityTaken, ResourceExhausted, UnknownWorker
from gradwire.rpc.agent import Agent
from gradwire.rpc.connection import Connection
from gradwire.rpc.peers import Membership, StaticDirectory
from gradwire.testing import wait_until
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.wire import serialization as objects
from gradwire.wire.messages import Call


def incarnation(number: int) -> WorkerAddress:
    return WorkerAddress(WorkerInfo("w", 0), number, "host", ())


def test_each_end_is_told_once() -> None:
    membership = Membership()
    membership.on_seen(incarnation(5))
    assert not membership.has_ended("w")
    assert [membership.on_ended(incarnation(5)) for _ in range(3)] == [True, False, False]
    assert membership.has_ended("w")


def test_a_newer_incarnation_ends_the_older_one() -> None:
    membership = Membership()
    membership.on_seen(incarnation(5))
    assert membership.on_seen(incarnation(7)) == incarnation(5)  # told from now on, whatever becomes of the newer one
    assert membership.on_seen(incarnation(7)) is None
    assert not membership.on_ended(incarnation(5))
    assert not membership.has_ended("w")
    assert not membership.is_current(incarnation(6))
    assert membership.on_ended(incarnation(7))
    assert not membership.on_ended(incarnation(5))


def test_a_worker_that_was_taken_for_dead_may_be_back_and_end_again() -> None:
    membership = Membership()
    membership.on_seen(incarnation(5))
    membership.on_ended(incarnation(5))
    assert membership.on_seen(incarnation(5)) is None
    assert not membership.has_ended("w")
    assert membership.on_ended(incarnation(5))


def test_old_connection_that_ends_late_does_not_end_a_worker_that_is_back() -> None:
    membership = Membership()
    membership.on_seen(incarnation(5))
    old = membership.num_ends(incarnation(5))
    assert membership.on_ended(incarnation(5), old)  # one of its two connections
    membership.on_seen(incarnation(5))
    assert not membership.on_ended(incarnation(5), old)  # the other one
    assert not membership.has_ended("w")
    assert membership.on_ended(incarnation(5), membership.num_ends(incarnation(5)))


def test_ends_that_the_other_worker_has_noticed_first_are_told_once() -> None:
    membership = Membership()
    membership.on_seen(incarnation(5))
    old = membership.num_ends(incarnation(5))
    assert membership.catch_up(incarnation(5), old + 1)
    assert membership.has_ended("w")
    assert not membership.catch_up(incarnation(5), old + 1)
    membership.on_seen(incarnation(5))
    assert not membership.on_ended(incarnation(5), old)  # noticed here at last
    assert not membership.has_ended("w")
    assert membership.num_ends(incarnation(5)) == old + 1


def test_ends_of_a_worker_that_was_never_seen_or_has_ended_are_only_counted() -> None:
    membership = Membership()
    assert not membership.catch_up(incarnation(5), 2)
    assert membership.num_ends(incarnation(5)) == 2
    membership.on_seen(incarnation(5))
    assert membership.on_ended(incarnation(5))
    assert not membership.catch_up(incarnation(5), 4)
    assert membership.num_ends(incarnation(5)) == 4


def test_an_older_incarnation_is_not_counted() -> None:
    membership = Membership()
    membership.on_seen(incarnation(7))
    assert membership.on_ended(incarnation(7))
    assert not membership.catch_up(incarnation(5), 3)
    assert membership.num_ends(incarnation(7)) == 1


def test_each_incarnation_has_its_own_number_of_ends() -> None:
    membership = Membership()
    membership.on_seen(incarnation(5))
    assert membership.on_ended(incarnation(5))
    membership.on_seen(incarnation(5))
    membership.catch_up(incarnation(7), 1)
    assert membership.on_seen(incarnation(7)) == incarnation(5)
    assert membership.num_ends(incarnation(7)) == 1
    assert membership.num_ends(incarnation(5)) == 0  # it does not come back


def test_restarts_do_not_add_up() -> None:
    membership = Membership()
    for number in range(1, 1001):
        membership.on_seen(incarnation(number))
        membership.on_ended(incarnation(number))
    assert len(membership._ended) == len(membership._newest) == len(membership._num_ends) == 1


# -- liveness -----------------------------------------------------------------------------------------------------------


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
    wait_until(lambda: not {item.lane for item in b.server.incoming} & set(kinds), 10.0, "that the callee knows")


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


# -- directories --------------------------------------------------------------------------------------------------------


def make_address(name: str, rank: int, incarnation: int = 1) -> WorkerAddress:
    return WorkerAddress(WorkerInfo(name, rank), incarnation, "host", (f"inproc://{name}/{incarnation}",))


def test_workers_are_found_by_name_and_rank() -> None:
    directory = StaticDirectory([make_address("b", 1), make_address("a", 0)])
    assert directory.find("a") == directory.find(0) == make_address("a", 0)
    assert [info.name for info in directory.infos()] == ["a", "b"]
    assert directory.is_fixed
    assert directory.refresh("a") is None


@pytest.mark.parametrize("worker", ["c", 2, -1])
def test_an_unknown_worker_is_named_with_those_there_are(worker: str | int) -> None:
    directory = StaticDirectory([make_address("a", 0), make_address("b", 1)])
    with pytest.raises(UnknownWorker, match=rf"no worker {worker!r} .* it has: a, b"):
        directory.find(worker)


def test_only_a_newer_incarnation_replaces() -> None:
    directory = StaticDirectory([make_address("a", 0, incarnation=5)])
    directory.update(make_address("a", 0, incarnation=4))
    assert directory.find("a").incarnation == 5
    directory.update(make_address("a", 0, incarnation=6))
    assert directory.find("a").incarnation == directory.find(0).incarnation == 6


@pytest.mark.parametrize(("name", "rank"), [("z", 0), ("a", 1), ("a", 7), ("b", 0)])
def test_names_and_ranks_stay_together(name: str, rank: int) -> None:
    directory = StaticDirectory([make_address("a", 0), make_address("b", 1)])
    with pytest.raises(IdentityTaken, match=f"{name} with rank {rank}; give every worker its own name"):
        directory.update(make_address(name, rank, incarnation=9))
    assert directory.find(0) == directory.find("a") == make_address("a", 0)
    assert directory.find(1) == directory.find("b") == make_address("b", 1)
    assert len(directory.infos()) == 2


def test_a_process_without_descriptors_does_not_take_the_other_worker_for_lost(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = make_agents(2)

    def fail(uri: str, deadline: float) -> None:
        raise ResourceExhausted("cannot open a connection: too many open files; raise the limit (ulimit -n)")

    with monkeypatch.context() as patch:
        patch.setattr(first.transports["unix"], "connect", fail)
        with pytest.raises(ResourceExhausted, match="ulimit -n"):
            first.call("b", torch.neg, (torch.ones(1),))
    assert first.call("b", torch.neg, (torch.ones(1),)).item() == -1
