"""Notes that arrive are checked before anything is done with them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from gradwire.autograd import messages
from gradwire.autograd._backward_state import Introduction, Report
from gradwire.autograd.backward_pass import pack_answer, unpack_answers
from gradwire.autograd.context import CallSite, DistAutogradContext, RecordedRecv
from gradwire.autograd.messages import (
    NO_ID,
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
from gradwire.errors import AutogradError, DecodeError
from gradwire.types import WorkerInfo
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


# -- gradients as they travel ------------------------------------------------------------------------------------------

SENDER = WorkerInfo("b", 1)


def make_recv() -> RecordedRecv:
    return RecordedRecv(77, 1, "layers:layer", None)


def test_answer_carries_only_what_is_defined() -> None:
    (item,), tensors = pack_answer(DistAutogradContext(5), make_recv(), (None, torch.ones(2), None, torch.zeros(1)))
    assert item == GradientItem(77, (False, True, False, True))
    assert [tensor.tolist() for tensor in tensors] == [[1.0, 1.0], [0.0]]


def test_answers_come_back_each_with_its_own() -> None:
    items = (GradientItem(1, (True, False)), GradientItem(2), GradientItem(3, (True,)))
    tensors = [torch.ones(2), torch.zeros(3)]
    answers = unpack_answers(DistAutogradContext(5), SENDER, items, tensors)
    assert answers[1] == [tensors[0], None]
    assert answers[2] is None
    assert answers[3] == [tensors[1]]


def test_answer_with_create_graph_is_recorded_on_both_sides() -> None:
    ours, theirs = DistAutogradContext(5), DistAutogradContext(5)
    gradient = torch.ones(2, requires_grad=True) * 2
    (item,), tensors = pack_answer(ours, make_recv(), (gradient, torch.ones(1)), recorded_id=99)
    assert item == GradientItem(77, (True, True), 99, (0,))
    assert not any(tensor.requires_grad for tensor in tensors)
    assert ours.sends[99].function == "the gradient of layers:layer"
    assert isinstance(ours.sends[99].site, CallSite)
    answers = unpack_answers(theirs, SENDER, (item,), tensors)
    arrived = answers[77]
    assert arrived is not None
    assert [value is not None and value.requires_grad for value in arrived] == [True, False]
    assert set(theirs.recvs) == {99}


def test_answer_with_create_graph_that_needs_no_graph_is_not_recorded() -> None:
    context = DistAutogradContext(5)
    (item,), _ = pack_answer(context, make_recv(), (torch.ones(2),), recorded_id=99)
    assert item == GradientItem(77, (True,), NO_ID)
    assert not context.sends


@pytest.mark.parametrize(
    ("items", "num_tensors", "words"),
    [
        ((GradientItem(1, (True, True)),), 1, "a message of b lacks gradients for message 0x1"),
        ((GradientItem(1, (True,)), GradientItem(2, (True,))), 1, "lacks gradients for message 0x2"),
        ((GradientItem(1, (True, False)), GradientItem(2)), 3, "carries 2 gradients more than it names"),
        ((GradientItem(1, (True,), 9, (1,)),), 1, "names gradients that it does not carry"),
        ((GradientItem(1, (True,), 9, (-1,)),), 1, "names gradients that it does not carry"),
        ((GradientItem(1, (True,), 9, ()),), 1, "names gradients that it does not carry"),
    ],
    ids=["one of two", "second item", "too many", "beyond", "before", "none"],
)
def test_message_that_does_not_fit_its_tensors_is_refused(
    items: tuple[GradientItem, ...], num_tensors: int, words: str
) -> None:
    with pytest.raises(AutogradError, match=words):
        unpack_answers(DistAutogradContext(5), SENDER, items, [torch.ones(2)] * num_tensors)
