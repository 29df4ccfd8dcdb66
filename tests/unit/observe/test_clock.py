"""Times of other clocks become times of this one."""

from __future__ import annotations

import random

import pytest

from gradwire.observe.clock import ClockMap, ClockOffset, ClockSample, estimate_offset

SKEW_NS = 123_456_789_012


def ask(now_ns: int, there_ns: int, back_ns: int, skew_ns: int = SKEW_NS) -> ClockSample:
    """A question that takes that long to get there, and its answer to come back."""
    return ClockSample(now_ns, now_ns + there_ns + skew_ns, now_ns + there_ns + back_ns)


def test_even_way_gives_the_offset() -> None:
    offset = estimate_offset([ask(1000, 500, 500)])
    assert offset.offset_ns == SKEW_NS
    assert offset.error_ns == 500


@pytest.mark.parametrize("seed", range(5))
def test_true_offset_is_within_the_error(seed: int) -> None:
    chance = random.Random(seed)
    samples = [ask(i * 10**6, chance.randrange(10**5), chance.randrange(10**6), -SKEW_NS) for i in range(8)]
    offset = estimate_offset(samples)
    assert abs(offset.offset_ns + SKEW_NS) <= offset.error_ns
    assert offset.error_ns == min(-(-sample.round_trip_ns // 2) for sample in samples)


def test_clocks_of_one_machine_are_the_same_unless_the_samples_show_otherwise() -> None:
    assert estimate_offset([ask(0, 100, 900, 0)], is_same_machine=True).offset_ns == 0
    assert estimate_offset([ask(0, 100, 900, 0)]).offset_ns != 0
    assert estimate_offset([ask(0, 100, 100)], is_same_machine=True).offset_ns == SKEW_NS  # a time namespace


def test_times_are_converted_by_the_offset_with_the_smallest_error() -> None:
    clock = ClockMap([ClockOffset(0, SKEW_NS + 40, 100), ClockOffset(10**9, SKEW_NS, 10)])
    assert clock.to_here(SKEW_NS + 5000) == 5000
    assert ClockMap([]).to_here(5000) == 5000


def test_drift_beyond_the_errors_is_spread_over_the_time_between() -> None:
    """A clock that gains a millisecond in ten seconds."""
    clock = ClockMap([ClockOffset(0, SKEW_NS, 10), ClockOffset(10**10, SKEW_NS + 10**6, 10)])
    for here_ns in (0, 5 * 10**9, 10**10):
        there_ns = here_ns + SKEW_NS + here_ns // 10**4
        assert abs(clock.to_here(there_ns) - here_ns) < 10


@pytest.mark.parametrize("change_ns", [-(10**10), 10**18, -(10**18)])
def test_clock_that_was_set_has_no_drift(change_ns: int) -> None:
    clock = ClockMap([ClockOffset(0, SKEW_NS, 10), ClockOffset(10**10, SKEW_NS + change_ns, 20)])
    assert clock.to_here(SKEW_NS + 5) == 5


def test_times_are_within_the_range_of_files() -> None:
    assert ClockMap([ClockOffset(0, 2**62, 0)]).to_here(0) == 0
    assert ClockMap([ClockOffset(0, -(2**62), 0)]).to_here(2**63 - 1) == 2**63 - 1
