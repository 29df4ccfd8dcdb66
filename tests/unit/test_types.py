"""Names and ids of workers."""

from __future__ import annotations

import sys

import msgspec
import pytest

from gradwire.errors import DecodeError
from gradwire.types import (
    Text,
    WorkerAddress,
    WorkerInfo,
    creator_of,
    is_class,
    is_worker_name,
    make_incarnation,
    make_secret_id,
    short,
)
from gradwire.wire.exceptions import clean
from gradwire.wire.messages import check_text


@pytest.mark.parametrize("name", ["w", "worker0", "a-b_c:d.e", "größe"])
def test_names(name: str) -> None:
    assert is_worker_name(name)


@pytest.mark.parametrize("name", ["", "a b", "../a", "a/b", "a\n", "a\0"])
def test_names_that_would_confuse_paths_or_logs(name: str) -> None:
    assert not is_worker_name(name)


def test_an_id_has_the_rank_of_its_maker() -> None:
    ids = {make_secret_id(rank) for rank in (0, 7, 65_535) for _ in range(100)}
    assert {creator_of(number) for number in ids} == {0, 7, 65_535}
    assert len(ids) == 300
    assert all(0 < number < 1 << 64 for number in ids)


def test_a_later_start_has_a_higher_incarnation() -> None:
    assert make_incarnation() <= make_incarnation() < 1 << 63


def test_workers_that_run_the_same_script() -> None:
    first, same, other, none = (WorkerAddress(WorkerInfo("w", 0), 1, "host", (), main) for main in ("a", "a", "b", ""))
    assert first.shares_main(same)
    assert not first.shares_main(other)
    assert not none.shares_main(none)


def test_an_info_prints_as_torch_prints_it() -> None:
    assert repr(WorkerInfo("w", 3)) == "WorkerInfo(id=3, name=w)"


def test_texts_in_messages_have_no_characters_that_are_unsafe_to_print() -> None:
    for char in map(chr, range(sys.maxunicode + 1)):
        is_unsafe = char in "\t\n" or clean(char) != char
        if is_unsafe != (short(char) != char):
            pytest.fail(f"{char!r}: a text may{' ' if is_unsafe else ' not '}have it")
    for char in "\n\t\x1b\x7f\x9b\u2028\u202e\u2066":
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(f"a{char}", Text)
        with pytest.raises(DecodeError, match="control characters"):
            check_text(f"a{char}", "a name", 100)
    assert msgspec.convert(short("größe \x9b31m"), Text) == "größe ?31m"


def test_aliases_are_not_classes() -> None:
    """Python 3.10 takes them for instances of `type`, and then `issubclass` raises."""
    assert is_class(list)
    assert not is_class(list[int])
    assert not is_class([])
