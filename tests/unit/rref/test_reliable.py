"""Messages about references on their way: what leaves together, and what is kept until it has arrived."""

from __future__ import annotations

import pytest

from gradwire.config import Limits
from gradwire.errors import DecodeError
from gradwire.rref import reliable
from gradwire.rref._messages import Confirm, Delete
from gradwire.rref.reliable import MAX_MESSAGES, WINDOW, Batch, Outbox
from gradwire.wire.framing import encode
from gradwire.wire.messages import Call
from gradwire.wire.serialization import EMPTY

A, B = (0, 1), (1, 1)
B_AGAIN = (1, 2)
DELETE = Delete(B, 7, 8, True)


def test_acknowledgements_go_along_with_messages() -> None:
    outbox = Outbox(A)
    assert outbox.arrived(Batch(B, A, 1, messages=(Delete(A, 5, 6, True),)))
    assert not outbox.has_messages
    assert not outbox.is_empty
    outbox.put(DELETE)
    assert outbox.has_messages
    assert outbox.take() == [Batch(A, B, 1, 1, (), (DELETE,))]
    assert outbox.is_empty
    assert outbox.num_open == 1


def test_only_what_another_worker_waits_for_is_urgent() -> None:
    outbox = Outbox(A)
    outbox.put(DELETE)
    assert not outbox.has_urgent
    outbox.put(Confirm(B, 9, True))
    assert outbox.has_urgent
    assert [len(batch.messages) for batch in outbox.take()] == [2]
    assert not outbox.has_urgent


def test_what_was_acknowledged_is_not_sent_again() -> None:
    outbox = Outbox(A)
    outbox.put(DELETE)
    batches = outbox.take()
    outbox.cut(1)
    assert outbox.take()[:1] == batches
    outbox.arrived(Batch(B, A, 0, 1))
    outbox.cut(1)
    assert [batch.number for batch in outbox.take()] == [0]
    assert outbox.num_open == 0


def test_acknowledgement_that_is_lost_is_said_again() -> None:
    outbox = Outbox(A)
    outbox.arrived(Batch(B, A, 2, messages=(Delete(A, 5, 6, True),)))
    assert outbox.take() == [Batch(A, B, 0, 0, (2,))]
    assert outbox.is_empty
    outbox.cut(1)
    assert outbox.take() == [Batch(A, B, 0, 0, (2,))]


def test_each_batch_counts_once() -> None:
    outbox = Outbox(A)
    numbers = [1, 3, 3, 1, 2, 2, 4]
    assert [outbox.arrived(Batch(B, A, number)) for number in numbers] == [True, True, False, False, True, False, True]
    assert outbox.take() == [Batch(A, B, 0, 4)]


def test_what_waits_is_cut_into_batches_that_fit() -> None:
    outbox, largest = Outbox(A), (1 << 63) - 1
    message = Delete((65_535, largest), largest, largest, True)
    for _ in range(100_000):
        outbox.put(message)
    batches = outbox.take()
    assert [len(batch.messages) for batch in batches] == [MAX_MESSAGES] * 48 + [100_000 - 48 * MAX_MESSAGES]
    notice = Call(0, "~rref", 0.0, EMPTY, 0, (), {"notice": batches[0]})
    assert len(encode(notice)) < Limits().header_bytes // 4


def test_no_more_than_the_window_is_under_way() -> None:
    outbox = Outbox(A)
    for _ in range((WINDOW + 2) * MAX_MESSAGES):
        outbox.put(DELETE)
    assert [batch.number for batch in outbox.take()] == list(range(1, WINDOW + 1))
    assert outbox.is_empty
    outbox.arrived(Batch(B, A, 0, 0, (2,)))
    assert outbox.take() == []  # the first may still be on its way
    outbox.arrived(Batch(B, A, 0, 2))
    assert [batch.number for batch in outbox.take()] == [WINDOW + 1, WINDOW + 2]


def test_what_a_worker_that_is_taken_for_dead_should_hear_waits_for_it() -> None:
    outbox = Outbox(A)
    outbox.put(DELETE)
    first = outbox.take()
    outbox.suspend(B)
    outbox.put(Confirm(B, 9, False))
    outbox.cut(1)
    assert outbox.take() == []
    assert outbox.num_open == 0
    outbox.resume(B)
    assert outbox.has_urgent
    assert outbox.take() == [*first, Batch(A, B, 2, messages=(Confirm(B, 9, False),))]


def test_the_end_of_an_incarnation_ends_what_was_kept_for_it() -> None:
    outbox = Outbox(A)
    outbox.put(DELETE)
    outbox.suspend(B)
    outbox.forget(B)
    outbox.put(DELETE)
    outbox.resume(B)
    assert outbox.take() == []
    outbox.put(Delete(B_AGAIN, 7, 8, True))
    assert [batch.to for batch in outbox.take()] == [B_AGAIN]


@pytest.mark.parametrize("number", [WINDOW + 1, 1 << 62])
def test_invented_numbers_are_refused(number: int) -> None:
    with pytest.raises(DecodeError, match=f"batch {number} of rank 1"):
        Outbox(A).arrived(Batch(B, A, number))


def test_a_worker_that_takes_no_answers_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reliable, "_MAX_BACKLOG", 3)
    outbox = Outbox(A)
    for _ in range(4):
        outbox.put(Confirm(B, 9, False))
    outbox.take()
    with pytest.raises(DecodeError, match="rank 1 does not read the replies"):
        outbox.arrived(Batch(B, A, 1))
    outbox.arrived(Batch(B, A, 0, 1))
    assert outbox.arrived(Batch(B, A, 1))
