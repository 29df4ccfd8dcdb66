"""Workers' states that are never changed: an event gives another one. Equal ones are the same, and each event is tried once.

What a state holds is the real `ReferenceProtocol`: the real `Ownership` and the real `Outbox`.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from gradwire.rref._messages import LocalAction, Worker
from gradwire.rref._ownership import Child, DeadWorkers, Fork, Ownership, RecentIds, ReferenceProtocol, Value
from gradwire.rref.reliable import Batch, Channel
from properties.ownership_items import Post


def frozen(thing: Any) -> Any:
    """Something that equals another one's if both mean the same; the order of dictionaries means nothing."""
    freeze = _FREEZERS.get(type(thing))
    return thing if freeze is None else freeze(thing)


def _freezer_of_fields(names: Iterable[str]) -> Callable[[Any], Any]:
    fields = operator.attrgetter(*names)
    return lambda thing: tuple(map(frozen, fields(thing)))


# By type, which is much faster than asking for one after the other. Messages and batches cannot be changed anyway.
_FREEZERS: dict[type, Callable[[Any], Any]] = {
    dict: lambda thing: frozenset((key, frozen(value)) for key, value in thing.items()),
    set: frozenset,
    collections.deque: tuple,
    Channel: _freezer_of_fields(field.name for field in dataclasses.fields(Channel)),
    **{struct: _freezer_of_fields(struct.__struct_fields__) for struct in (Fork, Value, Child)},
}


def copied(protocol: ReferenceProtocol) -> ReferenceProtocol:
    """One of its own, much faster than `copy.deepcopy`."""
    machine, outbox = protocol.ownership, protocol.outbox
    twin = copy.copy(protocol)
    twin.ownership = mine = copy.copy(machine)
    mine._values = {key: replace(value, holders=dict(value.holders)) for key, value in machine._values.items()}
    mine._forks = {key: copy.copy(fork) for key, fork in machine._forks.items()}
    mine._children = {key: copy.copy(child) for key, child in machine._children.items()}
    mine._listed = {key: dict(listed) for key, listed in machine._listed.items()}
    mine._num_expected = dict(machine._num_expected)
    mine._ended = {key: _copied_ids(known) for key, known in machine._ended.items()}
    mine._over = dict(machine._over)
    mine._deaths = _copied_deaths(machine._deaths)
    twin.outbox = copy.copy(outbox)
    twin.outbox._channels = {key: _copied_channel(channel) for key, channel in outbox._channels.items()}
    twin.outbox._due = set(outbox._due)
    twin.outbox._over = dict(outbox._over)
    return twin


def _copied_ids(known: RecentIds) -> RecentIds:
    twin = RecentIds()
    twin.latest, twin.older = set(known.latest), set(known.older)
    return twin


_FIELDS_OF_DEATHS = {"dead", "retained", "_unacknowledged", "_rounds", "_reports"}


def _copied_deaths(deaths: DeadWorkers) -> DeadWorkers:
    assert vars(deaths).keys() == _FIELDS_OF_DEATHS, "copy the new ones, too"
    twin = copy.copy(deaths)
    twin.dead, twin._unacknowledged = set(deaths.dead), set(deaths._unacknowledged)
    twin.retained = {key: dict(forks) for key, forks in deaths.retained.items()}
    twin._rounds = dict(deaths._rounds)
    twin._reports = {key: dict(rounds) for key, rounds in deaths._reports.items()}
    return twin


def _copied_channel(channel: Channel) -> Channel:
    return dataclasses.replace(
        channel,
        waiting=channel.waiting.copy(),
        unacknowledged=dict(channel.unacknowledged),
        beyond=set(channel.beyond),
    )


# -- what is done with an protocol besides what the protocol says ------------------------------------------------------


def acknowledge(protocol: ReferenceProtocol, by: Worker, up_to: int, beyond: tuple[int, ...]) -> None:
    """Another worker says what has arrived there."""
    protocol.outbox.arrived(Batch(by, protocol.outbox._own, 0, up_to, beyond))


def renumber_sent(protocol: ReferenceProtocol, to: Worker, less: int) -> None:
    """Only differences of numbers mean anything: without this, equal states would not be equal."""
    channel = protocol.outbox._channels[to]
    channel.last_number -= less
    sent = channel.unacknowledged.values()
    channel.unacknowledged = {batch.number - less: replace(batch, number=batch.number - less) for batch in sent}


def renumber_received(protocol: ReferenceProtocol, sender: Worker, less: int) -> None:
    channel = protocol.outbox._channels[sender]
    channel.up_to -= less
    channel.beyond = {number - less for number in channel.beyond}


_EXTRA = {function.__name__: function for function in (acknowledge, renumber_sent, renumber_received)}


def _run(protocol: ReferenceProtocol, event: str, args: tuple[Any, ...]) -> Any:
    """Tells an protocol of an event and writes what it has to send; returns what the driver would have to do."""
    if event in _EXTRA:
        result = _EXTRA[event](protocol, *args)
    elif hasattr(protocol, event):
        result = getattr(protocol, event)(*args)
    else:
        result = getattr(protocol.ownership, event)(*args)
        if isinstance(result, list):
            result = protocol.put(result)
    protocol.outbox.take()
    for channel in protocol.outbox._channels.values():
        for number, batch in channel.unacknowledged.items():
            channel.unacknowledged[number] = replace(batch, up_to=0, beyond=())  # the world acknowledges by itself
    return result


class Machine:
    """An `ReferenceProtocol` in one state.

    Attributes:
        known: Equal for machines that know the same of references, apart from what they remember of the past.
        sent: Equal for machines whose messages under way are the same, with the same numbers.
        kept_back: Messages for workers that are taken for dead.
        ended: What they remember: forks and values, with the worker that may name them.
        ids: Forks that are known here, or that messages from here speak of.
        batches: What is not acknowledged.
        posts: The same, on its way.
    """

    def __init__(self, protocol: ReferenceProtocol) -> None:
        self.protocol = protocol
        state, channels = protocol.ownership, protocol.outbox._channels
        self.known = (*map(frozen, (state._values, state._forks, state._children, vars(state._deaths))),)
        self.sent = frozenset((to, frozen(channel)) for to, channel in channels.items() if channel != Channel())
        suspended = ((to, channel) for to, channel in channels.items() if channel.is_suspended)
        self.kept_back = frozenset((to, frozenset(channel.waiting)) for to, channel in suspended)
        self.ended = frozenset(
            (worker, number) for worker, known in state._ended.items() for number in known.latest | known.older
        )
        batches = [batch for channel in channels.values() for batch in channel.unacknowledged.values()]
        messages = [message for batch in batches for message in batch.messages]
        messages += [message for channel in channels.values() for message in channel.waiting]
        holders = {fork_id for value in state._values.values() for fork_id in value.holders}
        spoken_of = {getattr(message, "fork_id", 0) for message in messages}
        self.ids = frozenset(holders | state._forks.keys() | state._children.keys() | spoken_of)
        self.batches = tuple(batches)
        own_rank = protocol.outbox._own[0]
        self.posts = tuple(Post(own_rank, batch.to[0], batch.number, batch.messages) for batch in batches)
        self.number = 0
        self.steps: dict[tuple[Any, ...], tuple[Machine, Any]] = {}


class Pool:
    """All machines that were ever needed.

    Args:
        make_machine: What workers run; other than the real one to see whether a fault would be found.
        make_protocol: The same for what surrounds it.
    """

    def __init__(
        self, make_machine: type[Ownership] = Ownership, make_protocol: type[ReferenceProtocol] = ReferenceProtocol
    ) -> None:
        self._make = make_machine
        self._make_protocol = make_protocol
        self._known: dict[Any, Machine] = {}
        self._cores: dict[Any, int] = {}

    def start(self, own: Worker) -> Machine:
        protocol = self._make_protocol(own)
        protocol.ownership = self._make(own)
        return self._intern(protocol)

    def step(self, machine: Machine, event: str, *args: Any) -> tuple[Machine, Any]:
        """What a machine becomes, and what it answers: what is left for its driver to do, or whether it went well."""
        known = machine.steps.get((event, *args))
        if known is None:
            protocol = copied(machine.protocol)
            result: list[LocalAction] | bool | None = _run(protocol, event, args)
            known = machine.steps[(event, *args)] = (self._intern(protocol), result)
        return known

    def forget_steps(self) -> None:
        for machine in self._known.values():
            machine.steps.clear()

    def _intern(self, protocol: ReferenceProtocol) -> Machine:
        machine, own = Machine(protocol), protocol.outbox._own
        known = self._known.setdefault((own, machine.known, machine.sent, machine.ended), machine)
        known.number = self._cores.setdefault((own, known.known, known.kept_back), len(self._cores) + 1)
        return known
