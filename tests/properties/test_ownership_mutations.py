"""Would the search notice? Each rule of the protocol is broken once, and the search must find out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from gradwire.rref._messages import Accept, Action, Confirm, Delete, LocalAction, Worker
from gradwire.rref._ownership import DeadWorkers, Ownership, ReferenceProtocol
from gradwire.rref.reliable import Batch, Outbox
from properties.ownership_items import Carry, Violation
from properties.ownership_search import Bounds, first_world, search
from properties.ownership_world import World


class ForgetsTheDeadAtOnce(Ownership):
    """What the dead held does not wait for acknowledgements."""

    def _forget_dead(self) -> list[Action]:
        self._deaths._unacknowledged.clear()
        return super()._forget_dead()


class AcceptsBeforeItIsListed(Ownership):
    """Whoever sent a fork hears that it arrived before the owner knows of it."""

    def received(self, rref_id: int, fork_id: int, owner: Worker, sender: Worker, *rest: Any) -> list[Action] | None:
        actions = super().received(rref_id, fork_id, owner, sender, *rest)
        return None if actions is None else [*actions, Accept(sender, fork_id)]


class NoPin(Ownership):
    """A fork is deleted although its child is on its way."""

    def sent(self, rref_id: int, parent: int | None, child: int, to: Worker) -> bool:
        is_sent = super().sent(rref_id, parent, child, to)
        if is_sent and parent is not None:
            self._forks[parent].pins -= 1
            self._children[child].parent = None
        return is_sent


class NoMemory(Ownership):
    """What ended is not remembered."""

    def _remember(self, worker: Worker, number: int) -> None:
        pass


class FirstNoCounts(Ownership):
    """A fork is given up although its receiver may still take it."""

    def answered(self, by: Worker, child: int, has_it: bool, is_last: bool) -> list[Action]:
        return super().answered(by, child, has_it, True)


class AcknowledgesTooEarly(Ownership):
    """A death is acknowledged although what it sent is not listed yet."""

    def _acknowledge_death(self, worker: Worker, *, is_gone: bool = False) -> list[Action]:
        return [*self._deaths.acknowledge(worker)] if is_gone or worker in self._deaths.dead else []


class ForgetsWhatItGotItself(Ownership):
    """The dead are forgotten although what this worker itself got from the dead is not listed yet."""

    def _forget_dead(self) -> list[Action]:
        parents = {fork_id: fork.parent for fork_id, fork in self._forks.items()}
        for fork in self._forks.values():
            fork.parent = None
        actions = super()._forget_dead()
        for fork_id, fork in self._forks.items():
            fork.parent = parents[fork_id]
        return actions


class _OldestQuestion(DeadWorkers):
    def reported(self, by: Worker, dead: Worker, round_: int) -> None:
        self._reports.setdefault(dead, {})[by] = round_


class AnswersTheLatestQuestion(Ownership):
    """A question that was overtaken by a newer one is the one that is answered."""

    def __init__(self, own: Worker) -> None:
        super().__init__(own)
        self._deaths = _OldestQuestion()


class BreaksSilently(Ownership):
    """An owner that is taken for dead is not told which forks are broken."""

    def _break(self, fork_ids: Iterable[int], reason: str) -> list[Action]:
        return [action for action in super()._break(fork_ids, reason) if not isinstance(action, Delete)]


class StrikesOffSilently(Ownership):
    """A holder that is taken for dead is not told which forks are struck off."""

    def _forget_dead(self) -> list[Action]:
        return [action for action in super()._forget_dead() if not isinstance(action, Confirm)]


class _Forgetful(Outbox):
    def suspend(self, worker: Worker) -> None:
        self.drop(worker)
        super().suspend(worker)


class ForgetsWhatItHasToSay(ReferenceProtocol):
    """What was to be said to a worker that is taken for dead is dropped."""

    def __init__(self, own: Worker) -> None:
        super().__init__(own)
        self.outbox = _Forgetful(own)


class _Credulous(Outbox):
    def arrived(self, batch: Batch) -> bool:
        super().arrived(batch)
        return True


class TakesRepeats(ReferenceProtocol):
    """Messages count each time that they arrive."""

    def __init__(self, own: Worker) -> None:
        super().__init__(own)
        self.outbox = _Credulous(own)


class NeverResumes(ReferenceProtocol):
    """A worker that was taken for dead stays so."""

    def worker_seen(self, worker: Worker) -> list[LocalAction]:
        return []


_CREATED, _MADE, _OWN = "created", "made", "own"
_MUTATIONS: list[tuple[type[Ownership], str, Bounds]] = [
    (ForgetsTheDeadAtOnce, _OWN, Bounds(sends=2, crashes=1)),
    (AcceptsBeforeItIsListed, _OWN, Bounds(sends=2)),
    (NoPin, _OWN, Bounds(sends=2)),
    (NoMemory, _CREATED, Bounds(losses=1)),
    (FirstNoCounts, _OWN, Bounds(sends=1, asks=1)),
    (AcknowledgesTooEarly, _OWN, Bounds(sends=2, crashes=1)),
    (ForgetsWhatItGotItself, _MADE, Bounds(sends=2, crashes=1)),
    (AnswersTheLatestQuestion, _OWN, Bounds(sends=1, crashes=1, cuts=1)),
    (BreaksSilently, _OWN, Bounds(sends=1, cuts=1)),
]
_MUTATED_EXCHANGES: list[tuple[type[ReferenceProtocol], int, Bounds]] = [
    (ForgetsWhatItHasToSay, 2, Bounds(sends=1, cuts=1)),
    (TakesRepeats, 3, Bounds(sends=2, repeats=1)),
    (NeverResumes, 2, Bounds(sends=1, cuts=1)),
]


@pytest.mark.parametrize(("mutation", "values", "bounds"), _MUTATIONS, ids=lambda item: getattr(item, "__name__", ""))
def test_search_notices(mutation: type[Ownership], values: str, bounds: Bounds) -> None:
    with pytest.raises(Violation):
        search(first_world(values, make_machine=mutation), bounds)


def test_search_notices_that_a_holder_is_struck_off_silently() -> None:
    """Two workers: no third one has to see an end first."""
    with pytest.raises(Violation, match="does not list it"):
        search(first_world(_OWN, 2, StrikesOffSilently), Bounds(sends=1, cuts=1))


@pytest.mark.parametrize(
    ("mutation", "num_workers", "bounds"), _MUTATED_EXCHANGES, ids=lambda item: getattr(item, "__name__", "")
)
def test_search_notices_in_the_exchange(mutation: type[ReferenceProtocol], num_workers: int, bounds: Bounds) -> None:
    with pytest.raises(Violation):
        search(first_world(_OWN, num_workers, make_protocol=mutation), bounds)


class _EachAlone(DeadWorkers):
    """Of those that are dead already nobody is asked any more when another one dies."""

    def add(self, worker: Worker, others: Any, held: dict[int, int], has_shared: bool) -> Any:
        return super().add(worker, others, held, bool(held))


class CountsEachDeathAlone(Ownership):
    """The end of one that held nothing need not be seen."""

    def __init__(self, own: Worker) -> None:
        super().__init__(own)
        self._deaths = _EachAlone()


def world_with_two_dead(make_machine: type[Ownership]) -> World:
    """A reference goes from 0 to 3 through 1 and 2, which then die; 0 notices the end of 2 first, and never heard of it."""
    world = World(4, make_machine)
    world.make(0)
    for sender, to, parent in ((0, 1, None), (1, 2, 101), (2, 3, 10101)):
        world.send(sender, 1, parent, to)
        arrived = next(move for move in world.deliveries() if isinstance(move[1], Carry) and move[1].to == to)
        world.apply(arrived)
    world.drop_own(1)
    for dead in (2, 1):
        world.crash(dead)
        world.notice(0, dead)
        world.notice(3, dead)
    return world


def everything_but_adoptions(world: World) -> None:
    for _ in range(20):
        for move in world.deliveries():
            if "Adopt" not in repr(move) and move in world.deliveries():
                world.apply(move)


def test_end_of_one_that_held_nothing_is_to_be_seen_too() -> None:
    world = world_with_two_dead(Ownership)
    everything_but_adoptions(world)
    assert world.machine(0).counts[0] == 1
    world.settle()
    assert world.is_clean()


def test_search_notices_when_each_death_is_counted_alone() -> None:
    world = world_with_two_dead(CountsEachDeathAlone)
    with pytest.raises(Violation, match="worker 3 holds"):
        everything_but_adoptions(world)
