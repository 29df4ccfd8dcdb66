"""The messages of the reference protocol, and the actions it requests from its own worker.

A *fork* is one worker's reference to a value of another; see `_ownership`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Number = Annotated[int, msgspec.Meta(ge=0)]
"""An id, a rank or a count: never negative, and at most 64 bits in messages."""

Worker = tuple[Number, Number]
"""Rank and incarnation: a restarted worker is a different worker."""


def is_number(value: Any) -> bool:
    """Return whether something that arrived as plain data is a valid `Number`."""
    return type(value) is int and 0 <= value < 1 << 64


def is_worker(value: Any) -> bool:
    """Return whether something that arrived as plain data is a valid `Worker`."""
    return type(value) is tuple and len(value) == 2 and all(map(is_number, value))


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    to: Worker


class Adopt(_Message, frozen=True, tag=0):
    """To the owner: list this fork of mine. The value may not exist yet if a call of `maker` creates it."""

    rref_id: Number
    fork_id: Number
    maker: Worker | None


class Confirm(_Message, frozen=True, tag=1):
    """To a user: your fork is listed; or, if not `is_known`, it is not listed and never will be."""

    fork_id: Number
    is_known: bool


class Accept(_Message, frozen=True, tag=2):
    """To the sender of a fork: it has arrived, and the owner has listed it."""

    fork_id: Number


class Delete(_Message, frozen=True, tag=3):
    """To the owner: my fork is gone. If it `is_first`, my call has made the value for it, or never will."""

    rref_id: Number
    fork_id: Number
    is_first: bool


class Ask(_Message, frozen=True, tag=4):
    """To a worker: do you have this fork that I sent you? If the last answer is no, the fork must not be taken later."""

    fork_id: Number
    is_last: bool


class Answer(_Message, frozen=True, tag=5):
    """To the worker that asked: whether the fork is here, or may still arrive."""

    fork_id: Number
    has_it: bool
    is_last: bool


class ReportDeath(_Message, frozen=True, tag=6):
    """To a survivor: acknowledge this death when you have noticed it and all that the dead worker sent you is listed."""

    dead: Worker
    round: Number


class AcknowledgeDeath(_Message, frozen=True, tag=7):
    """To the worker that reported a death: it is noticed here, and all that came from the dead worker is listed."""

    dead: Worker
    round: Number


class Free(msgspec.Struct, frozen=True):
    """This value has no holders left."""

    rref_id: int


class Fail(msgspec.Struct, frozen=True):
    """This expected value will never be created."""

    rref_id: int


class Break(msgspec.Struct, frozen=True):
    """This fork can no longer be used."""

    fork_id: int
    reason: str


class Confirmed(msgspec.Struct, frozen=True):
    """The owner has listed this fork."""

    fork_id: int


class Forget(msgspec.Struct, frozen=True):
    """This fork is no longer needed."""

    fork_id: int


Message = Adopt | Confirm | Accept | Delete | Ask | Answer | ReportDeath | AcknowledgeDeath
LocalAction = Free | Fail | Break | Confirmed | Forget
Action = Message | LocalAction
