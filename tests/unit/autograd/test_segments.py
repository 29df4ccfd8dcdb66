"""What was computed for each message, and what it began with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gradwire.autograd import _segments
from gradwire.autograd._segments import find_segments, operator_name
from gradwire.autograd.context import CallSite, DistAutogradContext, RecordedSend
from gradwire.autograd.messages import NO_ID

SITE = CallSite("train.py", 1, "step")


@dataclass
class Recv:
    is_watched: bool = False


def send(message_id: int, *tensors: torch.Tensor) -> RecordedSend:
    return RecordedSend(message_id, 1, "m:f", SITE, list(tensors))


def received(message_id: int) -> torch.Tensor:
    return DistAutogradContext(1).record_recv(message_id, 1, "m:f", [torch.ones(3)])[0]


def find(sends: dict[int, RecordedSend], recvs: Any = (), **options: Any) -> list[_segments.Segment]:
    return list(find_segments(sends, recvs if isinstance(recvs, dict) else {i: Recv() for i in recvs}, **options))


def test_operators_and_leaves() -> None:
    layer = torch.nn.Linear(3, 4)
    (found,) = find({1: send(1, torch.relu(layer(torch.ones(2, 3))))})
    assert (found.operators, found.num_leaves, found.leaf_bytes) == (("addmm", "relu"), 2, 64)
    assert found.num_operators == 3  # a transposition, too
    assert not found.is_passed_on


def test_leaves_alone_make_no_node() -> None:
    leaf = torch.ones(5, requires_grad=True)
    message = send(1, leaf)
    (found,) = find({1: message})
    assert (found.num_operators, found.num_leaves, found.leaf_bytes) == (0, 1, 20)
    assert message._output is None
    assert (message.num_tensors, message.num_bytes) == (1, 20)


def test_skip_connection() -> None:
    """What came is used for a message and for the loss; the loss builds on what was computed for another message."""
    came, shared = received(9), torch.ones(3, requires_grad=True) * 2
    loss = (came + shared).sum()
    first, second, roots = find({1: send(1, came), 2: send(2, shared)}, {9: Recv()}, roots=[loss])
    assert (first.recvs, first.is_passed_on, first.num_operators) == ((9,), False, 0)
    assert second.operators == ("mul",)
    assert (roots.message_id, roots.recvs, roots.builds_on) == (NO_ID, (9,), (2,))
    assert roots.operators == ("add", "sum")


@pytest.mark.parametrize("is_watched", [False, True])
def test_what_only_passes_through(is_watched: bool) -> None:
    (found,) = find({1: send(1, received(9), received(8))}, {9: Recv(is_watched), 8: Recv()})
    assert set(found.recvs) == {8, 9}
    assert found.is_passed_on != is_watched


def test_message_of_another_context_does_not_count() -> None:
    (found,) = find({1: send(1, received(9) * 2)}, [])
    assert found.recvs == ()


def test_contents_can_be_kept_back() -> None:
    (found,) = find({1: send(1, torch.ones(3, requires_grad=True).exp() + received(9))}, [9], has_contents=False)
    assert found == _segments.Segment(1, (9,))


def test_long_way_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_segments, "_MOST_NODES", 50)
    value = torch.ones(3, requires_grad=True)
    for _ in range(100):
        value = value.sin()
    first, second = find({1: send(1, value), 2: send(2, value.cos())})
    assert first.num_operators == 50
    assert second.num_operators == 0


def test_roots_that_are_leaves() -> None:
    (found,) = find({}, roots=[torch.ones(2, requires_grad=True)])
    assert found.num_leaves == 1


@pytest.mark.parametrize(
    ("node", "name"),
    [
        ("LogSoftmaxBackward0", "log_softmax"),
        ("MulBackward0", "mul"),
        ("NativeBatchNormBackward0", "native_batch_norm"),
        ("MyFunctionBackward", "MyFunction"),
        ("Backward", "Backward"),
    ],
)
def test_names_of_operators(node: str, name: str) -> None:
    assert operator_name(node) == name
