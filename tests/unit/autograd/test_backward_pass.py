"""Gradients as they travel: packed with what they answer, and unpacked."""

from __future__ import annotations

import pytest
import torch

from gradwire.autograd.backward_pass import pack_answer, unpack_answers
from gradwire.autograd.context import CallSite, DistAutogradContext, RecordedRecv
from gradwire.autograd.messages import (
    NO_ID,
    GradientItem,
)
from gradwire.errors import AutogradError
from gradwire.types import WorkerInfo

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
        ((GradientItem(1, (True, True)),), 1, "a message from b is missing gradients for message 0x1"),
        ((GradientItem(1, (True,)), GradientItem(2, (True,))), 1, "is missing gradients for message 0x2"),
        ((GradientItem(1, (True, False)), GradientItem(2)), 3, "carries 2 more gradients than it lists"),
        ((GradientItem(1, (True,), 9, (1,)),), 1, "lists gradients that it does not carry"),
        ((GradientItem(1, (True,), 9, (-1,)),), 1, "lists gradients that it does not carry"),
        ((GradientItem(1, (True,), 9, ()),), 1, "lists gradients that it does not carry"),
    ],
    ids=["one of two", "second item", "too many", "beyond", "before", "none"],
)
def test_message_that_does_not_fit_its_tensors_is_refused(
    items: tuple[GradientItem, ...], num_tensors: int, words: str
) -> None:
    with pytest.raises(AutogradError, match=words):
        unpack_answers(DistAutogradContext(5), SENDER, items, [torch.ones(2)] * num_tensors)
