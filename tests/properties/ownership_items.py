"""What travels between workers, how forks are numbered, and what becomes of values."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

from gradwire.rref import _actions as act

CHILDREN = 100  # the number of a fork is that of its parent, times this, plus a count: so it tells whom it comes from


class Violation(AssertionError):
    """The machines did what they never may."""


class Status(enum.Enum):
    """What became of a value, in truth."""

    EXPECTED = "expected"
    MADE = "made"
    FAILED = "failed"
    FREED = "freed"


@dataclass(frozen=True)
class Carry:
    """A user's message with a reference in it."""

    sender: int
    to: int
    rref_id: int
    fork_id: int
    maker: act.Worker | None


@dataclass(frozen=True)
class Make:
    """A user's call that makes a value elsewhere."""

    sender: int
    to: int
    rref_id: int
    fork_id: int


class Note(NamedTuple):
    """A message of the protocol."""

    sender: int
    message: act.Message

    @property
    def to(self) -> int:
        return self.message.to[0]

    @property
    def fork_id(self) -> int:
        """What it is about; 0 for none."""
        return getattr(self.message, "fork_id", 0)


Item = Carry | Make | Note
Move = tuple[Any, ...]


def worker(rank: int) -> act.Worker:
    return (rank, 1)


def lineage(fork_id: int) -> set[int]:
    """A fork and those it was made of."""
    found = set()
    while fork_id >= CHILDREN:
        found.add(fork_id)
        fork_id //= CHILDREN
    return found


def value_of(fork_id: int) -> int:
    while fork_id >= CHILDREN:
        fork_id //= CHILDREN
    return fork_id
