"""What `_ownership` wants done: messages to other workers, and what happens to values and references here."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

Worker = tuple[int, int]
"""Rank and incarnation: a worker that is started again is another worker."""


class Adopt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0):
    """To the owner: list this fork of mine. The value may not have been made yet if `maker`'s call is to make it."""

    to: Worker
    rref_id: int
    fork_id: int
    maker: Worker | None


class Confirm(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """To a user: your fork is listed; or, if not known, the value is gone."""

    to: Worker
    fork_id: int
    is_known: bool


class Accept(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """To whoever sent a fork: it has arrived, and the owner knows of it."""

    to: Worker
    fork_id: int


class Delete(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """To the owner: my fork is gone. It made the value, or was to make it, if it `is_first`."""

    to: Worker
    rref_id: int
    fork_id: int
    is_first: bool


class Ask(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """To a worker: do you have this fork that I sent you? After a no to the last question it must not be taken any more."""

    to: Worker
    fork_id: int
    is_last: bool


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    """To whoever asked: whether the fork is here, or may still come."""

    to: Worker
    fork_id: int
    has_it: bool
    is_last: bool


class Mourn(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=6):
    """To another worker: tell me when you have seen the end of this one."""

    to: Worker
    dead: Worker
    round: int


class EndSeen(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=7):
    """To an owner that mourns: I have seen the end, and asked for whatever I got."""

    to: Worker
    dead: Worker
    round: int


class Resume(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=8):
    """To a worker that I had taken for dead: I broke what I had of yours, and dropped what I had to tell you."""

    to: Worker


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


Message = Adopt | Confirm | Accept | Delete | Ask | Answer | Mourn | EndSeen | Resume
Action = Message | Free | Fail | Break
