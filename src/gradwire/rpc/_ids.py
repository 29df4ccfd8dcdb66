"""Ids that no other worker gives out, nor an earlier life of this one: 16 bits of rank, 48 bits of a counter."""

from __future__ import annotations

import secrets
from typing import Annotated

import msgspec

COUNTER_BITS = 48
MAX_COUNTER = (1 << COUNTER_BITS) - 1
_TICK_NS = 10_000_000
_IDS_PER_TICK_BITS = 9

Id = Annotated[int, msgspec.Meta(ge=0)]
"""An id in a message; msgpack has no integers of more than 64 bits."""

Rank = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
"""A rank in a message."""


def first_counter(incarnation: int) -> int:
    """Where the counters of a worker begin: 512 ids for each hundredth of a second since the epoch."""
    return ((incarnation // _TICK_NS) << _IDS_PER_TICK_BITS) & MAX_COUNTER


def make_secret_id(rank: int) -> int:
    """Return an id that workers which were not told it cannot guess."""
    return (rank << COUNTER_BITS) | (secrets.randbits(COUNTER_BITS) or 1)


def creator_of(number: int) -> int:
    """Rank of the worker that made an id."""
    return number >> COUNTER_BITS
