"""A worker that was taken over sends whatever it likes about references: it gets nothing, and holds up no other worker."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest

from gradwire import rpc
from gradwire.errors import DecodeError, RRefError, WorkerLost
from gradwire.rref import _ownership, context
from gradwire.rref._messages import Adopt, Ask, Confirm, Delete, Message, ReportDeath, Worker
from gradwire.rref.api import RRef, create
from gradwire.rref.owner import FETCH, INVOKE, NOTE, Creates
from gradwire.rref.reliable import MAX_MESSAGES, Batch
from gradwire.rref.values import Owned
from gradwire.testing import wait_until
from gradwire.types import COUNTER_BITS
from gradwire.wire import plain as _registry
from rref import tasks

MakeAgents = Callable[..., list[rpc.Agent]]
kept: list[RRef[Any]] = []


@rpc.expose(name="test_hostile_peers.keep")
def keep(rref: RRef[Any]) -> None:
    kept.append(rref)


@rpc.expose(name="test_hostile_peers.number")
def number() -> int:
    return 7


def own(agent: rpc.Agent) -> Worker:
    return context.of(agent).own


def invented(agent: rpc.Agent, count: int) -> int:
    """An id that a worker could have given out and did not."""
    return (agent.info.id << COUNTER_BITS) + count


def share(agent: rpc.Agent, value: Any) -> RRef[Any]:
    known = context.of(agent)
    owned = Owned(known.new_id())
    owned.set(value)
    return RRef._of(known, owned)


class Forger:
    """Sends batches from one worker to another as if they came from its own outbox."""

    def __init__(self, attacker: rpc.Agent, victim: rpc.Agent) -> None:
        self._attacker, self._victim = attacker, victim
        attacker.call(victim.info.name, "test_hostile_peers.number")
        self._count = 0

    def send(self, *messages: Message, **fields: Any) -> None:
        self._count += 1
        batch = Batch(own(self._attacker), own(self._victim), self._count, messages=messages)
        for name, value in fields.items():
            batch = replaced(batch, name, value)
        self._attacker.notices.send(self._victim.info.name, "rref", batch, deadline=time.monotonic() + 20)

    def flood(self, make: Callable[[int], Message], count: int) -> None:
        for first in range(0, count, MAX_MESSAGES):
            self.send(*(make(item) for item in range(first, min(first + MAX_MESSAGES, count))))

    def wait_taken(self) -> None:
        """Returns when the victim has read all of it."""
        attacker = own(self._attacker)

        def is_taken() -> bool:
            channel = context.of(self._victim)._outbox._channels.get(attacker)
            return channel is not None and channel.up_to >= self._count

        wait_until(is_taken, 30.0, "that the batches are read")
        context.of(self._victim).holders()  # waits for the lock: until the last batch is handled


def replaced(batch: Batch, name: str, value: Any) -> Batch:
    fields = {field: getattr(batch, field) for field in batch.__struct_fields__}
    return Batch(**{**fields, name: value})


def wait_served(agent: rpc.Agent) -> None:
    """Only a connection was closed: the next one is served."""

    def is_served() -> bool:
        try:
            return bool(agent.call("a", "test_hostile_peers.number") == 7)
        except WorkerLost:
            return False

    wait_until(is_served, 10.0, "that a serves again")


# -- floods -----------------------------------------------------------------------------------------------------------


def test_flood_of_adoptions_is_bounded(make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ownership, "_MAX_EXPECTED", 100)
    monkeypatch.setattr(_ownership, "_MAX_HELD", 1000)
    a, b = make_agents(2, trust="data")
    rref = share(a, 1)
    b.call("a", "test_hostile_peers.number")
    a.call("b", keep, (rref,))
    forger = Forger(b, a)
    forger.flood(lambda item: Adopt(own(a), invented(b, item), invented(b, 1 << 20 | item), own(b)), 20_000)
    forger.flood(lambda item: Adopt(own(a), rref._state.rref_id, invented(b, 1 << 21 | item), None), 20_000)
    forger.wait_taken()
    assert context.of(a).statistics().num_values <= 101
    assert context.of(a).holders()["b"] <= 1000
    assert b.call("a", "test_hostile_peers.number") == 7
    kept.pop().close()


def test_adoption_in_the_name_of_an_invented_maker_makes_nothing(make_agents: MakeAgents) -> None:
    a, b = make_agents(2, trust="data")
    forger = Forger(b, a)
    makers = [(own(b)[0], 5), (77, 1), (own(b)[0], own(b)[1] + 1), own(a)]
    forger.send(
        *(Adopt(own(a), invented(b, item), invented(b, 100 + item), maker) for item, maker in enumerate(makers))
    )
    forger.wait_taken()
    assert context.of(a).statistics().num_values == 0


def test_flood_of_invented_dead_workers_leaves_nothing(make_agents: MakeAgents) -> None:
    a, b = make_agents(2, trust="data")
    forger = Forger(b, a)
    deaths = context.of(a)._ownership._deaths
    before = [len(table) for table in vars(deaths).values()]
    forger.flood(lambda item: ReportDeath(own(a), (item % 1000, item), 1), 40_000)
    forger.wait_taken()
    assert [len(table) for table in vars(deaths).values()] == before
    assert b.call("a", "test_hostile_peers.number") == 7


def test_flood_of_deletions_holds_up_no_other_worker(make_agents: MakeAgents) -> None:
    a, b, c = make_agents(3, trust="data")
    forger = Forger(b, a)
    forger.flood(lambda item: Delete(own(a), invented(b, item), invented(b, item), True), 200_000)
    assert c.call("a", "test_hostile_peers.number") == 7
    forger.wait_taken()
    assert tasks.num_remembered(context.of(a)._ownership) <= _ownership._MEMORY


def test_questions_of_a_worker_that_takes_no_answers_end_its_connection(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire.rref.reliable._MAX_BACKLOG", 1000)
    a, b = make_agents(2, trust="data")
    forger = Forger(b, a)
    b.notices.register("rref", lambda *_: None, Any)  # acknowledges nothing
    outbox = context.of(a)._outbox
    for _ in range(10):
        forger.send(*(Ask(own(a), invented(b, item), False) for item in range(500)))

    def num_answers() -> int:
        channel = outbox._channels.get(own(b))
        return channel.num_messages if channel is not None else 0

    wait_until(lambda: num_answers() > 1000, 10.0, "that answers wait")
    assert num_answers() <= 1500
    wait_served(b)


# -- words of others ----------------------------------------------------------------------------------------------------


def test_words_in_the_name_of_another_worker_end_the_connection(make_agents: MakeAgents) -> None:
    a, b, c = make_agents(3, trust="data")
    c.call("a", "test_hostile_peers.number")
    rref = share(a, 1)
    a.call("c", keep, (rref,))
    forger = Forger(b, a)
    fork = next(iter(context.of(a)._ownership._values[rref._state.rref_id].holders))
    forger.send(Delete(own(a), rref._state.rref_id, fork, False), sender=own(c))
    wait_served(b)
    assert context.of(a).holders() == {"c": 1}
    kept.pop().close()


def test_words_of_a_life_that_is_not_connected_are_ignored(make_agents: MakeAgents) -> None:
    a, b = make_agents(2, trust="data")
    forger = Forger(b, a)
    for life in range(50):
        forger.send(Ask(own(a), 5, True), sender=(own(b)[0], life), number=1)
    assert b.call("a", "test_hostile_peers.number") == 7
    assert {worker for worker in context.of(a)._outbox._channels if worker[0] == b.info.id} <= {own(b)}


def test_only_owner_and_holder_have_a_say(make_agents: MakeAgents) -> None:
    """`Confirm` not from the owner; `Delete`, also before it has arrived, of a reference that another worker has."""
    a, b, _ = make_agents(3, trust="data")
    rref = create(context.of(a), "c", number, (), None, -1.0)
    wait_until(rref.confirmed_by_owner, 10.0, "that c has answered")
    theirs = share(a, 1)
    a.call("c", keep, (theirs,))
    forger = Forger(b, a)
    fork = next(iter(context.of(a)._ownership._values[theirs._state.rref_id].holders))
    forger.send(
        Confirm(own(a), rref._state.fork_id, False),
        Delete(own(a), theirs._state.rref_id, fork, True),
        Delete(own(a), invented(a, 5), fork, True),
    )
    forger.wait_taken()
    assert rref._ask(FETCH, (), -1.0) == 7
    assert context.of(a).holders() == {"c": 1}
    assert kept[-1].to_here() == 1
    kept.pop().close()
    assert b.info.name == "b"


# -- what is no message -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("number", -1),
        ("number", "one"),
        ("number", 1 << 60),
        ("up_to", -5),
        ("beyond", tuple(range(100))),
        ("sender", (1, 2, 3)),
        ("messages", ("x",)),
        ("messages", (Ask((0, 1), 5, True),) * (MAX_MESSAGES + 1)),
        ("messages", ((0, (0, 1), -1, 5, None),)),
        ("messages", ((99, (0, 1)),)),
        ("messages", (ReportDeath((0, 1), (-1, 1), 1),)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_batches_that_are_not_valid_end_only_their_connection(make_agents: MakeAgents, name: str, value: Any) -> None:
    a, b = make_agents(2, trust="data")
    rref = share(a, 1)
    Forger(b, a).send(Ask(own(a), 5, True), **{name: value})
    wait_served(b)
    a.call("b", keep, (rref,))
    assert kept[-1].to_here() == 1
    kept.pop().close()


def start_making(b: rpc.Agent, note: Any) -> Any:
    """What a call that comes with a forged note ends with."""
    found: list[Any] = []
    b.client.start(
        "a", "test_hostile_peers.number", (), None, 10.0, on_done=found.append, notes={NOTE: note}, is_watched=True
    )
    wait_until(lambda: bool(found), 10.0, "an answer")
    return found[0].error


def test_a_value_cannot_be_made_under_the_id_of_another(make_agents: MakeAgents) -> None:
    """Else its maker would be listed as a holder of a value that is there already."""
    a, b, _ = make_agents(3, trust="data")
    secret = share(a, 42)
    a.call("c", keep, (secret,))
    rref_id, life = secret._state.rref_id, own(b)[1]
    notes = [
        Creates(rref_id, invented(b, 1), life),
        Creates(invented(b, 1), invented(a, 1), life),
        Creates(invented(b, 1), 0, life),
        Creates(invented(b, 1), invented(b, 2), life + 1),
        Creates(invented(b, 1), invented(b, 2), 0),
    ]
    for note in notes:
        assert isinstance(start_making(b, note), DecodeError), note
    with pytest.raises(RRefError):
        b.call("a", FETCH, (rref_id, None))
    assert context.of(a).holders() == {"c": 1}
    kept.pop().close()


@pytest.mark.parametrize("note", [None, 5, [1, 2], [-1, 2, 3], [1, 2, "x"], [1, 2, 3, 4], {"a": 1}], ids=str)
def test_notes_that_are_not_valid_fail_their_call(make_agents: MakeAgents, note: Any) -> None:
    a, b = make_agents(2, trust="data")
    error = start_making(b, note)
    assert isinstance(error, DecodeError)
    assert context.of(a).statistics().num_values == 0


def test_the_same_value_is_not_made_twice(make_agents: MakeAgents) -> None:
    a, b = make_agents(2, trust="data")
    life = own(b)[1]
    assert start_making(b, Creates(invented(b, 1), invented(b, 2), life)) is None
    assert isinstance(start_making(b, Creates(invented(b, 1), invented(b, 3), life)), RRefError)
    assert context.of(a).holders() == {"b": 1}


_FIELDS = {
    "too few": lambda fields: fields[:4],
    "text": lambda fields: ["x", *fields[1:]],
    "negative": lambda fields: [-1, *fields[1:]],
    "huge": lambda fields: [1 << 70, *fields[1:]],
    "owner": lambda fields: [*fields[:2], "ab", *fields[3:]],
    "unknown owner": lambda fields: [*fields[:2], (99, 1), *fields[3:]],
    "sender": lambda fields: [*fields[:3], (0, 1), fields[4]],
    "maker": lambda fields: [*fields[:4], (1,)],
}


@pytest.mark.parametrize("kind", list(_FIELDS))
def test_references_that_are_not_valid_fail_their_call(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    a, b = make_agents(2, trust="data")
    rref = share(b, 1)
    entry = _registry.BY_KIND[RRef]
    forged = dataclasses.replace(entry, to_fields=lambda item: _FIELDS[kind](list(item._pack())))
    monkeypatch.setitem(_registry.BY_KIND, RRef, forged)
    with pytest.raises(DecodeError):
        b.call("a", keep, (rref,))
    assert not kept
    assert context.of(a).statistics().num_forks == 0


def test_invented_owners_leave_nothing(make_agents: MakeAgents) -> None:
    a, b, c = make_agents(3, trust="data")
    b.call("a", "test_hostile_peers.number")
    known = context.of(a)
    deaths = known._ownership._deaths
    before = [len(table) for table in vars(deaths).values()]
    for life in range(20):
        known.receive(invented(c, life), invented(b, life), (c.info.id, life), own(b), None)
    known._flush()
    wait_until(lambda: known.statistics().num_pending == 0, 10.0, "that the owner is found out")
    assert [len(table) for table in vars(deaths).values()] == before


@pytest.mark.parametrize("more", [(5, (), {}), ("sum", 5, {}), ("sum", (), []), ("sum", (), None)], ids=str)
def test_method_calls_that_are_not_valid_are_refused(make_agents: MakeAgents, more: tuple[Any, ...]) -> None:
    a, b = make_agents(2, trust="data")
    rref = share(a, 1)
    a.call("b", keep, (rref,))
    with pytest.raises(DecodeError, match="not a method call"):
        b.call("a", INVOKE, (rref._state.rref_id, None, *more))
    kept.pop().close()
