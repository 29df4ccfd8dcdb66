r"""The clocks of several workers, and how their times become those of one. No sockets here.

    here   sent_ns ----\                  /----> received_ns
    there               \--> there_ns ---/

The clock there is ahead by ``there_ns`` minus the middle of the other two, and that is off by at most half of the round
trip. Of several samples, the one with the shortest round trip counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One question for the time of another clock, and the answer."""

    sent_ns: int
    there_ns: int
    received_ns: int

    @property
    def round_trip_ns(self) -> int:
        return self.received_ns - self.sent_ns


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far another clock is ahead of this one.

    Attributes:
        at_ns: When it was measured, on the clock here.
        offset_ns: The time there minus the time here.
        error_ns: The most by which `offset_ns` may be wrong.
    """

    at_ns: int
    offset_ns: int
    error_ns: int


NO_OFFSET = ClockOffset(0, 0, 0)

_MAX_DRIFT = 0.1
_MAX_NS = 2**63 - 1  # files have room for no more


def estimate_offset(samples: Sequence[ClockSample], *, is_same_machine: bool = False) -> ClockOffset:
    """Return the offset of a clock, from at least one sample.

    Args:
        is_same_machine: Whether both clocks are those of one machine, and so the same, unless the samples show otherwise.
    """
    best = min(samples, key=lambda sample: sample.round_trip_ns)
    middle_ns = (best.sent_ns + best.received_ns) // 2
    error_ns = (best.round_trip_ns + 1) // 2
    offset_ns = best.there_ns - middle_ns
    if is_same_machine and abs(offset_ns) <= error_ns:
        return ClockOffset(middle_ns, 0, 0)
    return ClockOffset(middle_ns, offset_ns, error_ns)


class ClockMap:
    """Converts times of another clock, whose offset was measured once or more often, to times of this one.

    A difference between the first and the last offset that is more than their errors is a drift, and is spread evenly over
    the time between them. One of more than a tenth of that time is not: a clock was set, or a worker sent a wrong one.
    """

    def __init__(self, offsets: Sequence[ClockOffset]) -> None:
        first, last = (offsets[0], offsets[-1]) if offsets else (NO_OFFSET, NO_OFFSET)
        self.best = min((first, last), key=lambda offset: offset.error_ns)
        drift_ns = last.offset_ns - first.offset_ns
        passed_ns = last.at_ns - first.at_ns
        has_drift = first.error_ns + last.error_ns < abs(drift_ns) <= _MAX_DRIFT * passed_ns
        self._first = first if has_drift else self.best
        self._rate = passed_ns / (passed_ns + drift_ns) if has_drift else 1.0

    def to_here(self, there_ns: int) -> int:
        """Return the time of the clock here; it is from 0 to 2**63 - 1."""
        passed_ns = there_ns - self._first.at_ns - self._first.offset_ns
        if self._rate != 1.0:
            passed_ns = round(passed_ns * self._rate)
        return min(max(0, self._first.at_ns + passed_ns), _MAX_NS)
