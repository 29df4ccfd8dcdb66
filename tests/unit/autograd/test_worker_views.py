"""Answers of workers have bounds, and say who is to send which gradient."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gradwire.autograd import worker_views
from gradwire.autograd.worker_views import PassView, Shortcut, WaitingView, WorkerView, find_settlers, first
from gradwire.types import short


def views(*, is_taken: bool, pass_id: int = 1) -> list[WorkerView]:
    """The message 5 of a went to b, which passed it on to c in message 6."""
    waiting = PassView(1, "a", "smart", "running", waiting=(WaitingView(5, "b", "m:f"),))
    offers = PassView(pass_id, "a", "smart", "running", offered=(Shortcut(5, 6, "c"),))
    takes = PassView(1, "a", "smart", "running", taken=(6,) if is_taken else ())
    return [WorkerView(name, passes=(item,)) for name, item in zip("abc", (waiting, offers, takes), strict=True)]


def test_gradient_comes_by_a_shortcut_that_was_taken() -> None:
    assert find_settlers(views(is_taken=True)) == {5: "c"}


def test_gradient_comes_from_the_receiver_otherwise() -> None:
    assert find_settlers(views(is_taken=False)) == {5: "b"}
    assert find_settlers(views(is_taken=True, pass_id=2)) == {5: "b"}
    assert find_settlers(views(is_taken=True)[:1]) == {5: "b"}
    assert find_settlers([]) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"worker": "x" * 257},
        {"worker": "two\nlines"},
        {"num_sends": -1},
        {"sends": [{"message_id": 1, "peer": "b", "function": "f"}] * 2_001},
        {"sends": [{"message_id": -1, "peer": "b", "function": "f"}]},
        {"segments": [{"operators": ["x"] * 7}]},
        {"segments": [{"recvs": [1] * 2_001}]},
        {"passes": [{"pass_id": 1, "root": "a", "mode": "slow", "phase": ""}]},
        {"known_workers": [70_000]},
    ],
)
def test_answers_beyond_the_bounds_are_refused(change: dict[str, Any]) -> None:
    msgspec.convert({"worker": "a"}, WorkerView)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"worker": "a", **change}, WorkerView)


def test_what_is_sent_is_within_the_bounds() -> None:
    assert len(first(range(10_000))) == worker_views.MOST_MESSAGES
    assert short("a\nb\x1b" + "x" * 1_000) == "a?b?" + "x" * 252
