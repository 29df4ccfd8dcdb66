"""References of four workers under anything that Hypothesis can think of: never freed too early, never kept for good.

More of it: ``GRADWIRE_OWNERSHIP_EXAMPLES=20000 python -m pytest tests/properties/test_ownership_steps.py``.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gradwire.rref._messages import Ask
from gradwire.rref._ownership import Ownership
from properties.ownership_items import Move, Post
from properties.ownership_world import World

_NUM_WORKERS = 4
_MAX_CRASHES = 2
_MAX_VALUES = 4
_MAX_SENDS = 12

ranks = st.integers(0, _NUM_WORKERS - 1)


class OwnershipSteps(RuleBasedStateMachine):
    """One rule for each kind of thing that may happen; whatever it did, everything must settle in the end."""

    make_machine: type[Ownership] = Ownership

    @initialize(owner=ranks)
    def start(self, owner: int) -> None:
        self.world = World(_NUM_WORKERS, self.make_machine)
        self.num_sends = 0
        self.world.make(owner)

    def _do_one(self, data: st.DataObject, moves: list[Move]) -> None:
        if moves:
            self.world.apply(data.draw(st.sampled_from(sorted(moves, key=repr))))

    # -- people ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.world.owner) <= _MAX_VALUES)
    @rule(creator=ranks, owner=ranks)
    def create(self, creator: int, owner: int) -> None:
        if not {creator, owner} <= self.world.alive:
            return
        if creator == owner:
            self.world.make(owner)
        else:
            self.world.create(creator, owner)

    @precondition(lambda self: self.num_sends < _MAX_SENDS)
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        self.num_sends += 1
        self._do_one(data, self.world.sends())

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self._do_one(data, self.world.drops())

    @rule(data=st.data())
    def give_up_call(self, data: st.DataObject) -> None:
        self._do_one(data, self.world.failures())

    # -- the network ---------------------------------------------------------------------------------------------------

    @rule(data=st.data(), may_come=st.booleans())
    def deliver(self, data: st.DataObject, may_come: bool) -> None:
        moves = self.world.deliveries()
        if moves:
            _, item = data.draw(st.sampled_from(sorted(moves, key=repr)))
            is_asked = isinstance(item, Post) and any(isinstance(message, Ask) for message in item.messages)
            self.world.deliver(item, may_come=is_asked and may_come)

    @rule(data=st.data())
    def deliver_one_of_many(self, data: st.DataObject) -> None:
        """Most of what happens is that something arrives."""
        for _ in range(data.draw(st.integers(1, 6))):
            self._do_one(data, self.world.deliveries())

    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        self._do_one(data, self.world.repeats())

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self._do_one(data, self.world.losses())

    @rule(data=st.data())
    def fail_to_send(self, data: st.DataObject) -> None:
        self._do_one(data, self.world.unsends())

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        self._do_one(data, self.world.overdues())

    # -- death -----------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.world.alive) > _NUM_WORKERS - _MAX_CRASHES)
    @rule(rank=ranks)
    def crash(self, rank: int) -> None:
        if rank in self.world.alive:
            self.world.crash(rank)

    @rule(data=st.data())
    def notice(self, data: st.DataObject) -> None:
        self._do_one(data, self.world.notices())

    @rule(rank=ranks, other=ranks)
    def take_for_dead(self, rank: int, other: int) -> None:
        if rank != other and {rank, other} <= self.world.alive and (rank, other) not in self.world.noticed:
            self.world.cut(rank, other)

    @rule(data=st.data())
    def see(self, data: st.DataObject) -> None:
        self._do_one(data, self.world.sights())

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.check_agreement()
            self.world.settle()
            assert self.world.is_clean()


def test_a_call_that_failed_before_its_callee_is_taken_for_dead() -> None:
    """The callee hears that the value is given up, although a third worker speaks of it."""
    world = World(4)
    world.make(0)
    world.create(0, 1)
    world.create(0, 1)
    world.drop_own(1)
    world.send(0, 2, 200, 2)
    world.fail(0, 200)
    world.cut(0, 1)
    world.settle()
    assert world.is_clean()


def steps_settings(num_examples: int, **more: Any) -> settings:
    return settings(
        max_examples=num_examples,
        stateful_step_count=60,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        **more,
    )


TestOwnershipSteps = OwnershipSteps.TestCase
TestOwnershipSteps.settings = steps_settings(int(os.environ.get("GRADWIRE_OWNERSHIP_EXAMPLES", "150")))
