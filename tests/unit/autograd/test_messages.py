"""Notes that arrive are checked before anything is done with them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gradwire.autograd import messages
from gradwire.autograd._backward_state import Introduction, Report
from gradwire.autograd.messages import (
    AbortPass,
    CommitPass,
    GradientItem,
    HoldsContext,
    PassOptions,
    PropagateGradients,
    RecordedCall,
    ReleaseContext,
    ReportDone,
)
from gradwire.errors import DecodeError
from gradwire.wire.messages import ErrorInfo, read_note

ERROR = ErrorInfo("builtins:ValueError", "no", "trace", "b")
SAMPLES = [
    RecordedCall(5, 6, 2, True),
    RecordedCall(5),
    RecordedCall(5, released="there"),
    PropagateGradients(
        5,
        6,
        PassOptions(),
        (GradientItem(7), GradientItem(8, (True, False), 9, (0,), 4)),
        Introduction((1,), (2,), ((2, ((4, 1, 0, 3),)),)),
    ),
    PropagateGradients(5, 6, PassOptions(True, True, True, True, True, 1.5)),
    ReportDone(5, 6, Report((1, 2))),
    AbortPass(5, 6, ERROR),
    CommitPass(5, 6),
    ReleaseContext(5, "there"),
    HoldsContext(5),
]


@pytest.mark.parametrize("message", SAMPLES, ids=lambda item: type(item).__name__)
def test_message_comes_back_from_what_travels(message: Any) -> None:
    note = msgspec.Raw(msgspec.msgpack.encode(message))
    assert read_note(note, type(message)) == message
    assert read_note(message, type(message)) is message  # from this worker to itself


@pytest.mark.parametrize(
    ("note", "kind"),
    [
        (None, RecordedCall),
        ("text", RecordedCall),
        ({}, RecordedCall),
        ([], RecordedCall),
        (["5"], RecordedCall),
        ([5.5], RecordedCall),
        ([None], RecordedCall),
        ([5, 6, 2, "yes"], RecordedCall),
        ([5, 6, 2, True, 7], RecordedCall),
        ([5, 6, 2, True, "", "more"], RecordedCall),
        ([5, 6], PropagateGradients),
        ([5, 6, [], [7]], PropagateGradients),
        ([5, 6, [], [[7, [2]]]], PropagateGradients),
        ([5, 6, [], [], [[1], 2]], PropagateGradients),
        ([5, 6, [], [], [[1], [2], [[3, 4]]]], PropagateGradients),
        ([5, 6, [], [], [[1], [2], [[3, [[4, 5]]]]]], PropagateGradients),
        ([5, 6, [], [], [[1], [2], [], []]], PropagateGradients),
        ([5, 6, [False, False, False, False, False, "soon"]], PropagateGradients),
        ([5, 6, 7], ReportDone),
        ([5, 6, ["b"]], ReportDone),
        ([5, 6, [[1], [2], []]], ReportDone),
        ([5, 6, [], [], None, [1]], PropagateGradients),
        ([5, 6, "it failed"], AbortPass),
        ([5], CommitPass),
        ([5, 6, 7], CommitPass),
        ([5, 6], ReleaseContext),
        ([[5]], HoldsContext),
    ],
)
def test_bad_note_is_refused_by_name(note: Any, kind: type[Any]) -> None:
    with pytest.raises(DecodeError, match=f"not a valid {kind.__name__}"):
        read_note(msgspec.Raw(msgspec.msgpack.encode(note)), kind)


@pytest.mark.parametrize(
    "note",
    [b"\x91" * 40 + b"\xc0", b"\x91" * 100_000 + b"\xc0", b"\x81\x01\x02", b"\x91\xd4\x01\x00", b"\x91", b"\xc1", b""],
    ids=[
        "nested",
        "nested very deeply",
        "a map with numbers as keys",
        "an extension",
        "cut off",
        "no msgpack",
        "nothing",
    ],
)
def test_note_that_is_not_plain_data_is_refused(note: bytes) -> None:
    with pytest.raises(DecodeError, match="RecordedCall"):
        read_note(msgspec.Raw(note), RecordedCall)


def test_note_of_another_kind_is_refused() -> None:
    with pytest.raises(DecodeError, match="not a valid CommitPass"):
        read_note(msgspec.Raw(msgspec.msgpack.encode(ReleaseContext(5, "there"))), CommitPass)


def test_every_notice_has_a_sample() -> None:
    kinds = {kind for name, kind in vars(messages).items() if hasattr(kind, "context_id") and not name.startswith("_")}
    assert {type(item) for item in SAMPLES} == kinds
