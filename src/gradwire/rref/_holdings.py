"""What one worker knows of references: its values, its forks of others' values, what it sent. `_ownership` changes it."""

from __future__ import annotations

import enum

import msgspec

from gradwire.rref._actions import Worker
from gradwire.rref._mourning import Mourning

_MEMORY = 65_536  # what ended here and is remembered, so that a late or repeated message does not revive it
_MAX_EXPECTED = 4096  # well above the calls that one worker may have on their way here (`Limits.calls_in_flight`)


class ForkPhase(enum.Enum):
    """Where a user's fork is."""

    PENDING = "pending"
    CONFIRMED = "confirmed"
    BROKEN = "broken"


class Fork(msgspec.Struct):
    """A reference that this worker has to another one's value."""

    rref_id: int
    owner: Worker
    phase: ForkPhase = ForkPhase.PENDING
    parent: Worker | None = None  # who sent it, as long as that worker waits to hear of it
    pins: int = 0  # children on their way
    is_needed: bool = True  # by this worker's own code
    is_first: bool = False  # the value was, or is to be, made for it
    maker: Worker | None = None  # whose call makes the value, while that may not have arrived


class Value(msgspec.Struct):
    """A value that this worker owns."""

    holders: dict[int, Worker] = {}  # by fork
    is_needed: bool = False  # by this worker's own code
    maker: Worker | None = None  # whose call is to make it, while it is only expected


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
        self._ended: dict[int, None] = {}  # forks and values, the latest last
        self._mourning = Mourning()

    def __repr__(self) -> str:
        counts = f"{len(self._values)} values, {len(self._forks)} forks, {len(self._children)} sent"
        return f"<Ownership of worker {self._own[0]}: {counts}>"

    def phase_of(self, fork_id: int) -> ForkPhase | None:
        """Where a fork of this worker is; None if it is not here."""
        fork = self._forks.get(fork_id)
        return fork.phase if fork is not None else None

    def maker_of(self, fork_id: int) -> Worker | None:
        """Who may still have to make the value that a fork refers to."""
        fork = self._forks.get(fork_id)
        return fork.maker if fork is not None else None

    def holders(self) -> dict[Worker, int]:
        """How many forks of values of this worker each other worker has."""
        counts: dict[Worker, int] = {}
        for value in self._values.values():
            for worker in value.holders.values():
                counts[worker] = counts.get(worker, 0) + 1
        return counts

    def is_holder(self, rref_id: int, worker: Worker) -> bool:
        """Whether a worker is listed with a value of this one, or its call is to make it."""
        value = self._values.get(rref_id)
        return value is not None and (value.maker == worker or worker in value.holders.values())

    def can_expect(self, maker: Worker) -> bool:
        """Whether a worker may ask for one more value that its call has not made yet."""
        if len(self._values) < _MAX_EXPECTED:
            return True
        return sum(value.maker == maker for value in self._values.values()) < _MAX_EXPECTED

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
        """The dead whose references are still kept, because not everybody has seen their end."""
        return sorted(self._mourning.mourned)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Values here, forks here, forks here that the owner has not confirmed, forks sent and not accepted."""
        pending = sum(fork.phase is ForkPhase.PENDING for fork in self._forks.values())
        return len(self._values), len(self._forks), pending, len(self._children)

    def _has_shared(self) -> bool:
        """Whether others may have something that is not listed, but protected by what is listed or was sent here."""
        return bool(self._children) or any(value.holders for value in self._values.values())

    def _kept_for(self, worker: Worker) -> dict[int, int]:
        """What a worker is listed with, and what is on its way to it: values by fork."""
        kept = {
            fork_id: rref_id
            for rref_id, value in self._values.items()
            for fork_id, holder in value.holders.items()
            if holder == worker
        }
        return kept | {fork_id: child.rref_id for fork_id, child in self._children.items() if child.to == worker}

    def _end(self, number: int) -> None:
        self._ended[number] = None
        if len(self._ended) > _MEMORY:
            del self._ended[next(iter(self._ended))]
