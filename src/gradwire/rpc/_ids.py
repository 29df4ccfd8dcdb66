"""Ids that no other worker gives out, nor an earlier life of this one: 16 bits of rank, 48 bits of a counter."""

from __future__ import annotations

COUNTER_BITS = 48
MAX_COUNTER = (1 << COUNTER_BITS) - 1
_TICK_NS = 10_000_000
_IDS_PER_TICK_BITS = 9


def first_counter(incarnation: int) -> int:
    """Where the counters of a worker begin: 512 ids for each hundredth of a second since the epoch."""
    return ((incarnation // _TICK_NS) << _IDS_PER_TICK_BITS) & MAX_COUNTER


def creator_of(number: int) -> int:
    """Rank of the worker that made an id."""
    return number >> COUNTER_BITS
