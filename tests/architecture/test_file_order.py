"""The order of the test files names files that exist."""

from __future__ import annotations

import pytest

from file_order import COMPILED, LONGEST, TESTS, is_slow, number_of


def test_every_listed_file_exists_and_is_listed_once() -> None:
    assert [name for name in LONGEST if not (TESTS / name).is_file()] == []
    assert len(set(LONGEST)) == len(LONGEST)


def test_listed_files_come_first_and_in_order() -> None:
    paths = [TESTS / "unit" / "test_errors.py", *(TESTS / name for name in reversed(LONGEST))]
    assert sorted(paths, key=number_of) == [*(TESTS / name for name in LONGEST), paths[0]]


def test_slow_files(request: pytest.FixtureRequest) -> None:
    assert (TESTS / COMPILED).is_dir()
    assert is_slow(TESTS / LONGEST[0])
    assert is_slow(TESTS / COMPILED / "test_copies.py")
    assert not is_slow(request.path)
    unmarked = [item for item in request.session.items if is_slow(item.path) and not item.get_closest_marker("slow")]
    assert unmarked == []
