"""Three workers and two references: everything that can happen, within bounds.

Each search says how many states it must visit at least, so that it cannot shrink unnoticed. A change of the protocol may
change these numbers; its commit then says why.

The largest searches take most of a minute together: ``make search`` runs them, and each has a smaller one that always runs.
"""

from __future__ import annotations

import os

import pytest

from properties.ownership_search import Bounds, first_world, search

_SEARCHES = [
    pytest.param("own", Bounds(sends=1, losses=1, asks=2, crashes=1), 4_152, id="lost and asked for"),
    pytest.param("own", Bounds(sends=1, losses=1, repeats=1, asks=2), 1_516, id="lost, repeated and asked for"),
    pytest.param("own", Bounds(sends=2, losses=1, asks=1), 3_526, id="forwarded, lost and asked for"),
    pytest.param("own", Bounds(sends=2, crashes=1), 7_156, id="forwarded by one that dies"),
    pytest.param("made", Bounds(sends=2, crashes=1), 13_248, id="sent around by its maker"),
    pytest.param("created", Bounds(sends=1, losses=1, crashes=1), 6_784, id="expected"),
    pytest.param("created", Bounds(sends=1, losses=1, cuts=1), 12_103, id="expected, and taken for dead"),
    pytest.param("own created", Bounds(sends=1, losses=1, crashes=1), 18_574, id="two references"),
    pytest.param("own", Bounds(sends=1, cuts=2), 4_556, id="taken for dead twice"),
    pytest.param("own", Bounds(sends=1, crashes=1, cuts=1), 5_776, id="taken for dead, and dead"),
    pytest.param("created", Bounds(sends=2), 3_281, id="expected and forwarded"),
]


_LARGE_SEARCHES = [
    pytest.param("own", Bounds(sends=1, losses=2, repeats=2, asks=2, crashes=1), 42_432, id="lost and asked for"),
    pytest.param("own created", Bounds(sends=1, losses=2, repeats=1, crashes=1), 60_172, id="two references"),
    pytest.param("own", Bounds(sends=1, repeats=1, cuts=2), 15_924, id="repeated, and taken for dead twice"),
    pytest.param("created", Bounds(sends=1, cuts=2), 81_072, id="taken for dead twice"),
    pytest.param("made", Bounds(sends=2, cuts=1), 36_170, id="sent around, and taken for dead"),
    pytest.param("created", Bounds(sends=2, crashes=1), 45_543, id="expected and forwarded"),
]


@pytest.mark.parametrize(("values", "bounds", "num_states"), _SEARCHES)
def test_nothing_is_freed_too_early_or_kept_for_good(values: str, bounds: Bounds, num_states: int) -> None:
    found = search(first_world(values), bounds)
    assert found.num_states >= num_states
    assert found.num_ends > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif("GRADWIRE_LARGE_SEARCHES" not in os.environ, reason="large; make search runs it")
@pytest.mark.parametrize(("values", "bounds", "num_states"), _LARGE_SEARCHES)
def test_nothing_is_freed_too_early_or_kept_for_good_in_large(values: str, bounds: Bounds, num_states: int) -> None:
    test_nothing_is_freed_too_early_or_kept_for_good(values, bounds, num_states)
