"""What `_ownership` wants done: messages to other workers, and what happens to values and references here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

Number = Annotated[int, msgspec.Meta(ge=0)]
"""An id, a rank, a count: never negative. What travels has at most 64 bits."""

Worker = tuple[Number, Number]
"""Rank and incarnation: a worker that is started again is another worker."""


def is_number(value: Any) -> bool:
    """Whether something that came as plain data may be such a number."""
    return type(value) is int and 0 <= value < 1 << 64


class Adopt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0):
    """To the owner: list this fork of mine. The value may not have been made yet if `maker`'s call is to make it."""

    to: Worker
    rref_id: Number
    fork_id: Number
    maker: Worker | None


class Confirm(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """To a user: your fork is listed; or, if not known, it is not listed and never will be."""

    to: Worker
    fork_id: Number
    is_known: bool


class Accept(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """To whoever sent a fork: it has arrived, and the owner knows of it."""

    to: Worker
    fork_id: Number


class Delete(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """To the owner: my fork is gone. If it `is_first`, my call has made the value for it, or was to and never will."""

    to: Worker
    rref_id: Number
    fork_id: Number
    is_first: bool


class Ask(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """To a worker: do you have this fork that I sent you? After a no to the last question it must not be taken any more."""

    to: Worker
    fork_id: Number
    is_last: bool


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    """To whoever asked: whether the fork is here, or may still come."""

    to: Worker
    fork_id: Number
    has_it: bool
    is_last: bool


class Mourn(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=6):
    """To another worker: tell me when you have seen the end of this one."""

    to: Worker
    dead: Worker
    round: Number


class EndSeen(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=7):
    """To an owner that mourns: I have seen the end, and asked for whatever I got."""

    to: Worker
    dead: Worker
    round: Number


@dataclass(frozen=True, slots=True)
class Free:
    """Here: nobody holds this value any more."""

    rref_id: int


@dataclass(frozen=True, slots=True)
class Fail:
    """Here: this value was expected and will never be made."""

    rref_id: int


@dataclass(frozen=True, slots=True)
class Break:
    """Here: this fork leads nowhere any more."""

    fork_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Confirmed:
    """Here: the owner knows of this fork."""

    fork_id: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Here: this fork is not needed any more."""

    fork_id: int


Message = Adopt | Confirm | Accept | Delete | Ask | Answer | Mourn | EndSeen
LocalAction = Free | Fail | Break | Confirmed | Forget
Action = Message | LocalAction
