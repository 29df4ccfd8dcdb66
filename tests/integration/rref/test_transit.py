"""References in messages that take long to leave or to arrive: nobody gives them up meanwhile."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import pytest

from gradwire.config import Limits
from gradwire.rpc.agent import Agent
from gradwire.rref import context
from gradwire.rref._messages import Action
from gradwire.rref._ownership import Ownership
from gradwire.rref.api import RRef, create
from gradwire.rref.owner import FETCH
from gradwire.testing import local_agents, wait_until
from gradwire.transports.stream import StreamConnection
from gradwire.wire.messages import Reply

WAIT_S = 30.0
gate = threading.Event()
kept: dict[str, RRef[Any]] = {}
made: list[weakref.ref[Box]] = []


class Box:
    """Something that a weak reference can tell the end of."""


def wait_gate() -> None:
    assert gate.wait(WAIT_S)


def keep(rref: RRef[Any]) -> None:
    kept["rref"] = rref


def give() -> RRef[Any]:
    return kept["rref"]


def make_box() -> Box:
    box = Box()
    made.append(weakref.ref(box))
    return box


def value_of(agent: Agent, value: Any) -> RRef[Any]:
    known = context.of(agent)
    owned = known.make_here()
    owned.set(value)
    return RRef._of(known, owned)


def ask_now(agent: Agent) -> None:
    """As if nothing had been heard for a long time of what this worker has sent."""
    context.of(agent)._on_timer()


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> Iterable[None]:
    monkeypatch.setattr(context, "_ASK_S", 0.0)
    gate.clear()
    yield
    gate.set()
    kept.clear()
    made.clear()


def test_a_call_that_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    overdue = Ownership.overdue

    def watched(self: Ownership, children: Iterable[int]) -> list[Action]:
        asked.extend(children := list(children))
        return overdue(self, children)

    monkeypatch.setattr(Ownership, "overdue", watched)
    with local_agents(2, "unix", limits=Limits(calls_in_flight=1)) as (a, b):
        rref = value_of(a, [1])
        first = a.submit("b", wait_gate)
        second = threading.Thread(target=lambda: a.call("b", keep, (rref,)))
        second.start()
        wait_until(lambda: bool(context.of(a)._transits), WAIT_S, "that the reference is packed")
        ask_now(a)
        ask_now(a)
        assert asked == []
        gate.set()
        first.wait()
        second.join()
        assert kept["rref"]._ask(FETCH, (), WAIT_S) == [1]
        assert b.info.name == "b"
        kept.clear()


def test_an_answer_that_is_long_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    in_transit, may_arrive = threading.Event(), threading.Event()
    answers: list[bool] = []
    send, answered = StreamConnection.send, Ownership.answered

    def send_slowly(self: StreamConnection, message: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(message, Reply) and not in_transit.is_set():
            in_transit.set()
            assert may_arrive.wait(WAIT_S)
        return send(self, message, *args, **kwargs)

    def watched(self: Ownership, by: Any, child: int, has_it: bool, is_last: bool) -> list[Action]:
        answers.append(has_it)
        return answered(self, by, child, has_it, is_last)

    with local_agents(2) as (a, b):
        kept["rref"] = value_of(a, [2])
        monkeypatch.setattr(StreamConnection, "send", send_slowly)
        monkeypatch.setattr(Ownership, "answered", watched)
        found: list[RRef[Any]] = []
        caller = threading.Thread(target=lambda: found.append(b.call("a", give)))
        caller.start()
        assert in_transit.wait(WAIT_S)
        for number in (1, 2):
            ask_now(a)
            wait_until(lambda number=number: len(answers) >= number, WAIT_S, "an answer")  # type: ignore[misc]
        assert all(answers)
        may_arrive.set()
        caller.join()
        assert found.pop()._ask(FETCH, (), WAIT_S) == [2]
        kept.clear()


def test_a_value_for_oneself_that_is_dropped_before_it_is_made() -> None:
    """The function runs all the same, and what it returns is kept by nobody."""
    with local_agents(1, num_worker_threads=1) as (a,):
        known = context.of(a)
        busy = a.submit("a", wait_gate)
        create(known, "a", make_box, (), None, -1)
        wait_until(lambda: known.statistics().num_values == 0, WAIT_S, "that the reference is dropped")
        gate.set()
        busy.wait()
        wait_until(lambda: bool(made), WAIT_S, "that the function runs")
        wait_until(lambda: made[0]() is None, WAIT_S, "that nothing keeps the value")
        assert not known._owned


class Slow:
    """What unpacks slowly: not before the owner has asked several times for the references beside it."""

    def __reduce__(self) -> Any:
        return rebuild_slow, ()


def rebuild_slow() -> None:
    unpacking.set()
    wait_gate()


unpacking = threading.Event()


def give_many() -> list[Any]:
    return [RRef(number) for number in range(1000)]


def give_many_slowly() -> list[Any]:
    return [Slow(), *give_many()]


def test_an_answer_that_takes_long_to_unpack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the references in it, one is asked for: a question for each would make it take longer still."""
    answers: list[tuple[int, bool]] = []
    answered = Ownership.answered

    def watched(self: Ownership, by: Any, child: int, has_it: bool, is_last: bool) -> list[Action]:
        answers.append((child, has_it))
        return answered(self, by, child, has_it, is_last)

    monkeypatch.setattr(Ownership, "answered", watched)
    monkeypatch.setattr(context, "_ASK_S", 600.0)  # not while it is packed
    unpacking.clear()
    with local_agents(2, "unix") as (a, b):
        found: list[Any] = []
        caller = threading.Thread(target=lambda: found.extend(a.call("b", give_many_slowly)))
        caller.start()
        assert unpacking.wait(WAIT_S)
        monkeypatch.setattr(context, "_ASK_S", 0.0)
        last = max(context.of(b)._ownership.children())
        for number in range(1, 4):
            ask_now(b)
            wait_until(lambda number=number: len(answers) >= number, WAIT_S, "that the holder answers")
        assert set(answers) == {(last, True)}
        gate.set()
        caller.join()
        assert found[-1].to_here() == 999
        found.clear()


def test_an_answer_that_never_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last reference is asked for at first; once that is lost, the others are."""
    lost = threading.Event()
    send = StreamConnection.send

    def send_no_answer(self: StreamConnection, message: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(message, Reply) and message.body_bytes > 1000:
            lost.set()
            return None
        return send(self, message, *args, **kwargs)

    monkeypatch.setattr(StreamConnection, "send", send_no_answer)
    monkeypatch.setattr(context, "_ASK_S", 600.0)  # not while the caller waits
    with local_agents(2, "unix") as (a, b):
        known = context.of(b)
        future = a.submit("b", give_many)
        assert lost.wait(WAIT_S)
        assert known.statistics().num_values == 1000
        assert future.cancel()
        monkeypatch.setattr(context, "_ASK_S", 0.0)
        ask_now(b)
        wait_until(lambda: known.statistics().num_values == 0, WAIT_S, "that the values are freed")
