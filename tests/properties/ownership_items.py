"""What travels between workers, how forks are numbered, and what becomes of values."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from gradwire.rref import _messages as act

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


@dataclass(frozen=True)
class Made:
    """The answer to such a call."""

    sender: int
    to: int
    rref_id: int
    fork_id: int


class Post(NamedTuple):
    """A batch of the protocol, which its sender keeps until it is acknowledged; or a copy that arrives besides."""

    sender: int
    to: int
    number: int
    messages: tuple[act.Message, ...]
    is_copy: bool = False


Item = Carry | Make | Made | Post
Move = tuple[Any, ...]


def worker(rank: int) -> act.Worker:
    return (rank, 1)


@functools.cache
def lineage(fork_id: int) -> frozenset[int]:
    """A fork and those it was made of."""
    found = set()
    while fork_id >= CHILDREN:
        found.add(fork_id)
        fork_id //= CHILDREN
    return frozenset(found)


@functools.cache
def value_of(fork_id: int) -> int:
    while fork_id >= CHILDREN:
        fork_id //= CHILDREN
    return fork_id
