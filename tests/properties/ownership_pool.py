"""Machines that are never changed: an event gives another one. Equal ones are the same, and each event is tried once."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
from msgspec.structs import replace

from gradwire.rref._actions import Worker
from gradwire.rref._ownership import Ownership


def frozen(thing: Any) -> Any:
    """Something that equals another one's if both mean the same; the order of dictionaries means nothing."""
    if isinstance(thing, dict):
        return frozenset((key, frozen(value)) for key, value in thing.items())
    if isinstance(thing, set):
        return frozenset(thing)
    if isinstance(thing, msgspec.Struct):
        return tuple(frozen(getattr(thing, name)) for name in thing.__struct_fields__)
    return thing


def copied(machine: Ownership) -> Ownership:
    """A machine of its own, much faster than `copy.deepcopy`."""
    twin = copy.copy(machine)
    twin._values = {key: replace(value, holders=dict(value.holders)) for key, value in machine._values.items()}
    twin._forks = {key: copy.copy(fork) for key, fork in machine._forks.items()}
    twin._children = {key: copy.copy(child) for key, child in machine._children.items()}
    twin._ended = dict(machine._ended)
    twin._mourning = copy.deepcopy(machine._mourning)
    return twin


class Machine:
    """An `Ownership` in one state.

    Attributes:
        core: Equal for machines that mean the same, apart from what they remember of the past.
        ended: What they remember: forks and values.
        ids: Forks that are known here.
    """

    def __init__(self, state: Ownership) -> None:
        self.state = state
        self.core = (*map(frozen, (state._values, state._forks, state._children, vars(state._mourning))),)
        self.ended = frozenset(state._ended)
        holders = {fork_id for value in state._values.values() for fork_id in value.holders}
        self.ids = frozenset(holders | state._forks.keys() | state._children.keys())
        self.number = 0
        self.steps: dict[tuple[Any, ...], tuple[Machine, Any]] = {}


class Pool:
    """All machines that were ever needed.

    Args:
        make_machine: What workers run; other than the real one to see whether a fault would be found.
    """

    def __init__(self, make_machine: type[Ownership] = Ownership) -> None:
        self._make = make_machine
        self._known: dict[Any, Machine] = {}
        self._cores: dict[Any, int] = {}

    def start(self, own: Worker) -> Machine:
        return self._intern(self._make(own))

    def step(self, machine: Machine, event: str, *args: Any) -> tuple[Machine, Any]:
        """What a machine becomes, and what it answers."""
        known = machine.steps.get((event, *args))
        if known is None:
            state = copied(machine.state)
            result = getattr(state, event)(*args)
            known = machine.steps[(event, *args)] = (self._intern(state), result)
        return known

    def _intern(self, state: Ownership) -> Machine:
        machine = Machine(state)
        known = self._known.setdefault((state._own, machine.core, machine.ended), machine)
        known.number = self._cores.setdefault((state._own, known.core), len(self._cores))
        return known
