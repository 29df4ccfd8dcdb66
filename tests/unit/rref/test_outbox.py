"""Messages about references on their way: what leaves together, and what is kept until it was heard."""

from __future__ import annotations

from gradwire.rref._actions import Confirm, Delete
from gradwire.rref._outbox import Batch, Outbox

A, B = (0, 1), (1, 1)


def test_acknowledgements_go_along_with_messages() -> None:
    outbox = Outbox(A)
    outbox.arrived(Batch(B, A, 1, (), (Delete(A, 5, 6, True),)))
    assert not outbox.has_messages
    assert not outbox.is_empty
    outbox.put(Delete(B, 7, 8, True))
    assert outbox.has_messages
    assert outbox.take() == [Batch(A, B, 1, (1,), (Delete(B, 7, 8, True),))]
    assert outbox.is_empty
    assert outbox.num_open == 1


def test_only_what_somebody_waits_for_is_urgent() -> None:
    outbox = Outbox(A)
    outbox.put(Delete(B, 7, 8, True))
    assert not outbox.has_urgent
    outbox.put(Confirm(B, 9, True))
    assert outbox.has_urgent
    assert [len(batch.messages) for batch in outbox.take()] == [2]
    assert not outbox.has_urgent


def test_what_was_acknowledged_is_not_sent_again() -> None:
    outbox = Outbox(A)
    outbox.put(Delete(B, 7, 8, True))
    batches = outbox.take()
    assert outbox.cut(1) == batches
    outbox.arrived(Batch(B, A, 0, (1,)))
    assert outbox.cut(1) == []
    assert outbox.num_open == 0
