"""What one worker knows of references: its values, its forks of others' values, what it sent. `_ownership` changes it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator

import msgspec

from gradwire.rref._actions import Worker
from gradwire.rref._mourning import Mourning

_MEMORY = 65_536  # ids that are remembered for each worker
_MAX_EXPECTED = 4096  # well above the calls that one worker may have on their way here (`Limits.calls_in_flight`)
_MAX_HELD = 1 << 18  # references of one worker to values of another; 25 MB of lists


class ForkPhase(enum.Enum):
    """Where a user's fork is."""

    PENDING = "pending"
    CONFIRMED = "confirmed"
    BROKEN = "broken"


class RecentIds:
    """The latest ids that ended, so that a late message does not revive them: at least half of `_MEMORY`.

    Two sets take turns, so that forgetting the oldest costs nothing for each id.
    """

    def __init__(self, latest: Iterable[int] = (), older: Iterable[int] = ()) -> None:
        self._latest = set(latest)
        self._older = set(older)

    def __contains__(self, number: int) -> bool:
        return number in self._latest or number in self._older

    def __iter__(self) -> Iterator[int]:
        return iter(self._latest | self._older)

    def __len__(self) -> int:
        return len(self._latest | self._older)

    def add(self, number: int) -> None:
        self._latest.add(number)
        if len(self._latest) >= _MEMORY // 2:
            self._latest, self._older = set(), self._latest

    def copy(self) -> RecentIds:
        return RecentIds(self._latest, self._older)


class Fork(msgspec.Struct):
    """A reference that this worker has to another one's value."""

    rref_id: int
    owner: Worker
    phase: ForkPhase = ForkPhase.PENDING
    parent: Worker | None = None  # the worker that sent it, as long as it waits to hear of it
    pins: int = 0  # children on their way
    is_needed: bool = True  # by this worker's own code
    is_first: bool = False  # the value was, or is to be, made for it by a call of this worker
    maker: Worker | None = None  # whose call makes the value, while that may not have arrived


class Value(msgspec.Struct):
    """A value that this worker owns."""

    holders: dict[int, Worker] = {}  # by fork
    is_needed: bool = False  # by this worker's own code
    maker: Worker | None = None  # whose call is to make it, while it is only expected
    expected_by: Worker | None = None  # the worker that spoke of it first, meanwhile
    first: int = 0  # the fork that it was made for, if another worker's call has made it


class Child(msgspec.Struct):
    """A fork that was sent and is not accepted yet."""

    to: Worker
    rref_id: int
    parent: int | None  # our own fork, or None if the value is ours
    num_asked: int = 0


class Holdings:
    """All references of one worker.

    Args:
        own: This worker.
    """

    def __init__(self, own: Worker) -> None:
        self._own = own
        self._values: dict[int, Value] = {}
        self._forks: dict[int, Fork] = {}
        self._children: dict[int, Child] = {}
        self._listed: dict[Worker, dict[int, int]] = {}  # what `Value.holders` say, by holder: values by fork
        self._num_expected: dict[Worker, int] = {}  # values by `expected_by`
        self._ended: dict[Worker, RecentIds] = {}  # forks and values that ended, by the worker that may yet name them
        self._over: dict[int, int] = {}  # by rank: the latest incarnation that is dead for certain
        self._mourning = Mourning()

    def __repr__(self) -> str:
        counts = f"{len(self._values)} values, {len(self._forks)} forks, {len(self._children)} sent"
        return f"<Ownership of worker {self._own[0]}: {counts}>"

    def phase_of(self, fork_id: int) -> ForkPhase | None:
        """Where a fork of this worker is; None if it is not here."""
        fork = self._forks.get(fork_id)
        return fork.phase if fork is not None else None

    def is_pending(self, fork_id: int, owner: Worker) -> bool:
        """Whether a fork waits to be confirmed by that owner."""
        fork = self._forks.get(fork_id)
        return fork is not None and fork.owner == owner and fork.phase is ForkPhase.PENDING

    def is_taken_for_dead(self, worker: Worker) -> bool:
        """Whether a worker's end was noticed, and it was not there since."""
        return worker in self._mourning.ended

    def maker_of(self, fork_id: int) -> Worker | None:
        """Who may still have to make the value that a fork refers to."""
        fork = self._forks.get(fork_id)
        return fork.maker if fork is not None else None

    def holders(self) -> dict[Worker, int]:
        """How many forks of values of this worker each other worker has."""
        return {worker: len(listed) for worker, listed in self._listed.items()}

    def is_holder(self, rref_id: int, worker: Worker) -> bool:
        """Whether a worker is listed with a value of this one, or its call is to make it."""
        value = self._values.get(rref_id)
        return value is not None and (value.maker == worker or worker in value.holders.values())

    def can_expect(self, by: Worker) -> bool:
        """Whether a worker may speak of one more value that was not made yet."""
        return self._num_expected.get(by, 0) < _MAX_EXPECTED

    def can_hold(self, worker: Worker) -> bool:
        """Whether a worker may hold one more reference to values of this one."""
        return len(self._listed.get(worker, ())) < _MAX_HELD

    @property
    def num_remembered(self) -> int:
        """Forks and values that ended and are remembered."""
        return sum(map(len, self._ended.values()))

    @property
    def num_held(self) -> int:
        """Values here that another worker refers to."""
        return sum(bool(value.holders) for value in self._values.values())

    def children(self) -> list[int]:
        """Forks that were sent and are not accepted yet."""
        return list(self._children)

    def forks(self) -> list[int]:
        """Forks of others' values that are here."""
        return list(self._forks)

    def mourned(self) -> list[Worker]:
        """The dead whose references are still kept, because not every worker has seen their end."""
        return sorted(self._mourning.mourned)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Values here, forks here, forks here that the owner has not confirmed, forks sent and not accepted."""
        pending = sum(fork.phase is ForkPhase.PENDING for fork in self._forks.values())
        return len(self._values), len(self._forks), pending, len(self._children)

    def _has_shared(self) -> bool:
        """Whether others may have something that is not listed, but protected by what is listed or was sent here."""
        return bool(self._children or self._listed)

    def _kept_for(self, worker: Worker) -> dict[int, int]:
        """What a worker is listed with, and what is on its way to it: values by fork."""
        sent = {fork_id: child.rref_id for fork_id, child in self._children.items() if child.to == worker}
        return self._listed.get(worker, {}) | sent

    def _can_list(self, rref_id: int, fork_id: int, worker: Worker) -> bool:
        """Whether a worker may be listed with a fork: it has not ended, nor is it one of another value."""
        is_of_value = self._listed.get(worker, {}).get(fork_id, rref_id) == rref_id
        return is_of_value and not self._has_ended(worker, fork_id) and self.can_hold(worker)

    def _list(self, rref_id: int, fork_id: int, worker: Worker) -> None:
        self._values[rref_id].holders[fork_id] = worker
        self._listed.setdefault(worker, {})[fork_id] = rref_id

    def _strike(self, rref_id: int, fork_id: int) -> None:
        """A fork is not listed any more."""
        value = self._values.get(rref_id)
        worker = value.holders.pop(fork_id, None) if value is not None else None
        if worker is not None:
            del self._listed[worker][fork_id]
            if not self._listed[worker]:
                del self._listed[worker]

    def _expect(self, rref_id: int, maker: Worker, by: Worker) -> None:
        self._values[rref_id] = Value(maker=maker, expected_by=by)
        self._num_expected[by] = self._num_expected.get(by, 0) + 1

    def _stop_expecting(self, value: Value) -> None:
        """A value was made, or never will be."""
        by, value.maker, value.expected_by = value.expected_by, None, None
        if by is not None:
            self._num_expected[by] -= 1
            if not self._num_expected[by]:
                del self._num_expected[by]

    def _remember(self, worker: Worker, number: int) -> None:
        """A fork or value ended of which that worker may yet speak."""
        if self._is_over(worker):
            return
        known = self._ended.get(worker)
        if known is None:
            known = self._ended[worker] = RecentIds()
        known.add(number)

    def _is_over(self, worker: Worker) -> bool:
        return worker[1] <= self._over.get(worker[0], -1)

    def _has_ended(self, worker: Worker, number: int) -> bool:
        known = self._ended.get(worker)
        return known is not None and number in known
