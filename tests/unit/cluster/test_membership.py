"""What the driver says about the members, in any order; and processes that were given up but still live."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch

from gradwire.cluster.membership import ALIVE, MEMBERS, Departure, follow_driver, tell_members
from gradwire.config import WorkerConfig
from gradwire.errors import AuthenticationFailed, GradwireError, IdentityTaken, RpcError, WorkerLost
from gradwire.rpc.agent import Agent
from gradwire.rpc.peers import Membership, StaticDirectory
from gradwire.rpc.pending_calls import PendingCall
from gradwire.runtime import start_worker
from gradwire.testing import wait_until
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.wire.messages import encode_address

MakeWorker = Callable[..., Agent]

_RANKS = {"driver": 3, "a": 0, "b": 1, "c": 2}


def address_of(name: str, incarnation: int) -> WorkerAddress:
    return WorkerAddress(WorkerInfo(name, _RANKS.get(name, 9)), incarnation, "host", ())


@pytest.fixture
def make() -> Iterator[MakeWorker]:
    """Makes workers that each know only what they are told: ``make("a", driver.address, after=old)``."""
    config = WorkerConfig(transports=("unix",), token=b"secret", rpc_timeout_s=20.0)
    with contextlib.ExitStack() as stack:

        def make_worker(name: str, *known: WorkerAddress, after: Agent | None = None) -> Agent:
            directory = StaticDirectory(known)
            earlier = 0 if after is None else after.address.incarnation
            agent = start_worker(WorkerInfo(name, _RANKS[name]), config, directory, after=earlier)
            stack.callback(agent.close)
            directory.complete()
            follow_driver(agent, "driver")
            return agent

        yield make_worker


@pytest.fixture
def world(make: MakeWorker) -> list[Agent]:
    """The driver, a and b, which know each other."""
    driver = make("driver")
    agents = [driver, make("a", driver.address), make("b", driver.address)]
    for one, other in itertools.permutations(agents, 2):
        one.welcome(other.address)
    return agents


def lost(agent: Agent, reason: str = "killed by SIGKILL", *, is_final: bool = False) -> Departure:
    return Departure(agent.info.name, agent.address.incarnation, reason, is_final)


def dismiss(agent: Agent, departure: Departure) -> None:
    agent.dismiss(departure.name, departure.incarnation, departure.reason, is_final=departure.is_final)


# -- the rules -----------------------------------------------------------------------------------------------------------


def test_an_incarnation_that_was_given_up_never_counts_again() -> None:
    membership = Membership()
    assert membership.on_dismissed("a", 5, "killed")
    assert membership.lost_reason("a") == "killed"
    assert not membership.is_current(address_of("a", 5))
    assert membership.is_current(address_of("a", 6))
    membership.on_seen(address_of("a", 6))
    assert membership.lost_reason("a") is None
    assert not membership.on_dismissed("a", 5, "told late"), "that does not concern the one that lives"
    assert membership.lost_reason("a") is None
    assert membership.on_dismissed("a", 6, "killed again")
    assert not membership.on_dismissed("a", 5, "told late") or membership.lost_reason("a") == "killed again"


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_messages_may_come_in_any_order(make: MakeWorker, order: tuple[int, ...]) -> None:
    """A worker starts, is lost, starts again, and another one is removed: the end does not depend on the order."""
    agent = make("b", address_of("a", 0), address_of("c", 0))
    old, new = address_of("a", 5), address_of("a", 6)
    events: list[Callable[[], None]] = [
        lambda: agent.welcome(old),
        lambda: agent.dismiss("a", 5, "killed"),
        lambda: agent.welcome(new),
        lambda: agent.dismiss("c", 4, "removed", is_final=True),
    ]
    for index in (*order, *order):  # each of them twice
        events[index]()
    assert agent.lost_reason("a") is None
    assert agent.directory.find("a") == new
    assert not agent.has_ended("a")
    assert agent.lost_reason("c") == "removed"
    assert [info.name for info in agent.directory.infos()] == ["a", "b"]
    with pytest.raises(AuthenticationFailed, match="newer incarnation"):
        agent.admit(old)
    with pytest.raises(AuthenticationFailed, match="was declared lost: removed"):
        agent.admit(address_of("c", 4))


def test_an_older_address_does_not_replace_a_newer_one() -> None:
    directory = StaticDirectory()
    for incarnation in (5, 6, 5):
        directory.add(address_of("a", incarnation))
    assert directory.find("a").incarnation == 6


def test_a_name_that_was_removed_may_be_given_again(make: MakeWorker) -> None:
    agent = make("b")
    agent.welcome(address_of("a", 5))
    agent.dismiss("a", 5, "removed", is_final=True)
    assert agent.directory.find("a").info.id == 0, "those who hold something of it can still find it"
    assert agent.directory.find(0).info.name == "a"
    again = WorkerAddress(WorkerInfo("a", 7), 6, "host", ())
    agent.welcome(again)
    assert agent.directory.find("a") == again
    assert agent.lost_reason("a") is None
    with pytest.raises(IdentityTaken):
        agent.welcome(WorkerAddress(WorkerInfo("z", 7), 6, "host", ()))


# -- between workers -----------------------------------------------------------------------------------------------------


def test_only_the_driver_says_who_belongs_to_the_cluster(world: list[Agent]) -> None:
    driver, a, b = world
    for operation, args in ((MEMBERS, ([], [])), (ALIVE, ())):
        with pytest.raises(AuthenticationFailed, match="only driver may change the list of workers, not a"):
            a.ask("b", operation, args, 10.0, None).wait()
        assert driver.ask("b", operation, args, 10.0, None).wait() is None
    assert tell_members(a, ["b"], [], 5.0, [lost(driver)]) == set()
    assert b.call("driver", int, ("3",)) == 3


@pytest.mark.parametrize(
    ("addresses", "departures"),
    [
        ([b"no address"], []),
        ([], [["a", -1, "reason", False]]),
        ([], [["a", 1 << 63, "reason", False]]),
        ([], [["a", 1, "x" * 5000, False]]),
        ([], [["a", 1, "reason"]]),
        ([], [["a" * 2000, 1, "reason", False]]),
        ([encode_address(address_of("bad name", 1))], []),
    ],
)
def test_bad_messages_change_nothing(world: list[Agent], addresses: list[bytes], departures: list[object]) -> None:
    driver, _, b = world
    with pytest.raises(GradwireError, match=r"valid|must"):
        driver.ask("b", MEMBERS, (addresses, departures), 10.0, None).wait()
    assert b.call("a", int, ("3",)) == 3


def test_what_a_worker_is_told_of_a_departure_it_was_never_told_of_before(world: list[Agent]) -> None:
    driver, _, b = world
    assert tell_members(driver, ["a", "b"], [], 5.0, [Departure("c", 5, "removed", True)]) == {"a", "b"}
    assert [info.name for info in b.directory.infos()] == ["a", "b", "driver"]
    assert tell_members(driver, ["b"], [address_of("c", 6)], 5.0) == {"b"}
    assert b.directory.find("c").incarnation == 6


def test_a_restarted_worker_is_called_by_name(make: MakeWorker, world: list[Agent]) -> None:
    driver, old, b = world
    assert b.call("a", int, ("3",)) == old.call("b", int, ("3",)) == 3
    departure = lost(old, "killed; it is being restarted")
    old.close()
    dismiss(driver, departure)
    assert tell_members(driver, ["b"], [], 5.0, [departure]) == {"b"}
    with pytest.raises(WorkerLost, match="worker a is lost: killed; it is being restarted"):
        b.call("a", int, ("3",))
    new = make("a", driver.address, b.address, after=old)
    driver.welcome(new.address)
    assert tell_members(driver, ["a", "b"], [new.address, b.address], 5.0, [departure]) == {"a", "b"}
    assert b.call("a", int, ("3",)) == new.call("b", int, ("3",)) == 3
    assert tell_members(driver, ["b"], [old.address], 5.0, [departure]) == {"b"}, "a late repetition"
    assert b.call("a", int, ("4",)) == 4


def test_a_new_incarnation_may_call_before_others_are_told_of_it(make: MakeWorker, world: list[Agent]) -> None:
    driver, old, b = world
    departure = lost(old)
    old.close()
    dismiss(b, departure)
    new = make("a", driver.address, b.address, after=old)
    assert new.call("b", int, ("3",)) == 3
    assert b.call("a", int, ("4",)) == 4
    dismiss(b, departure)
    assert b.call("a", int, ("5",)) == 5


def test_a_process_that_was_given_up_is_refused_everywhere(world: list[Agent]) -> None:
    """It was only stopped: it lives, and its connections were open."""
    driver, old, b = world
    assert b.call("a", int, ("3",)) == old.call("b", int, ("3",)) == old.call("driver", int, ("3",)) == 3
    for agent in (driver, b):
        dismiss(agent, lost(old, "it has not answered for 30 s"))
    wait_until(lambda: not old.peers.lanes())
    for name in ("driver", "b"):
        with pytest.raises(
            AuthenticationFailed, match=f"{name} refused .* worker a was declared lost: it has not answered"
        ):
            old.call(name, int, ("3",))
    for agent in (driver, b):
        with pytest.raises(WorkerLost, match="worker a is lost: it has not answered"):
            agent.call("a", int, ("3",))


def test_what_a_process_that_was_given_up_sends_late_changes_nothing(world: list[Agent], make: MakeWorker) -> None:
    """An answer that was due when it was stopped, and a gradient, do not arrive, whatever became of its worker."""
    driver, old, b = world
    may_answer = threading.Event()
    calls: list[PendingCall] = []
    old.server.register_control("late", lambda _: (may_answer.wait(20.0), torch.ones(2))[1])
    b.control("a", "late", (), 20.0, calls.append, torch.Tensor)
    wait_until(lambda: bool(old.server.incoming))
    for agent in (driver, b):
        dismiss(agent, lost(old, "it has not answered for 30 s"))
    wait_until(lambda: len(calls) == 1)
    assert isinstance(calls[0].error, WorkerLost)
    new = make("a", driver.address, b.address, after=old)
    b.welcome(new.address)
    may_answer.set()
    with pytest.raises((RpcError, AuthenticationFailed, WorkerLost)):
        old.notices.send("b", "autograd.release", None)
    assert b.call("a", int, ("4",)) == 4
    assert len(calls) == 1


def test_a_connection_that_is_being_opened_to_a_process_that_is_given_up(world: list[Agent]) -> None:
    """The handshake ends well after the driver has said that the process does not belong to the cluster any more."""
    driver, old, b = world
    admit = b.admit

    def admit_and_dismiss(address: WorkerAddress) -> None:
        admit(address)
        dismiss(b, lost(old))

    b.admit = admit_and_dismiss  # type: ignore[method-assign]
    with pytest.raises(WorkerLost, match="worker a is lost: killed by SIGKILL"):
        b.call("a", int, ("3",))
    assert not b.peers.peer("a").lanes
    b.admit = admit  # type: ignore[method-assign]
    assert driver.call("a", int, ("3",)) == 3


def test_a_connection_that_a_process_opens_while_it_is_given_up(world: list[Agent]) -> None:
    """Likewise from the other side: it was admitted a moment before."""
    _, old, b = world
    admit = b.admit

    def admit_and_dismiss(address: WorkerAddress) -> None:
        admit(address)
        dismiss(b, lost(old))

    b.admit = admit_and_dismiss  # type: ignore[method-assign]
    with pytest.raises(AuthenticationFailed, match=r"b refused .* worker a was declared lost: killed by SIGKILL"):
        old.call("b", int, ("3",))
    wait_until(lambda: not [item for item in b.server.incoming if item.lane and item.info.name == "a"])
    assert b.has_ended("a")


def test_a_gathering_counts_a_worker_that_is_back_before_it_has_connected(make: MakeWorker, world: list[Agent]) -> None:
    """The collector, a, is told of the new process of b by the driver, and has a round open before that calls."""
    driver, a, old = world
    departure = lost(old)
    assert a.call("b", int, ("3",)) == 3
    old.close()
    new = make("b", driver.address, a.address, after=old)
    for agent in (a, driver):
        dismiss(agent, departure)
        agent.welcome(new.address)
    results: list[dict[str, int]] = []
    names = ["a", "b", "driver"]

    def gather(agent: Agent, value: int) -> None:
        results.append(agent.gathering.all_gather(value, names, float("inf")))

    threads = [threading.Thread(target=gather, args=item) for item in ((a, 1), (driver, 2))]
    for thread in threads:
        thread.start()
    wait_until(lambda: bool(a.gathering._rounds) and len(a.gathering._rounds[0].entries) == 2)
    gather(new, 3)
    for thread in threads:
        thread.join(20.0)
    assert results == [{"a": 1, "b": 3, "driver": 2}] * 3


def test_departures_travel_as_plain_data() -> None:
    departure = Departure("a", 5, "killed", False)
    assert msgspec.convert(msgspec.to_builtins(departure), Departure) == departure
