"""Which references in transit are asked for, and when; each look is a second after the one before."""

from __future__ import annotations

from collections.abc import Iterable

from gradwire.rpc.codec import TransferStatus
from gradwire.rref.transits import Transits

ASK_S = 5.0


def sent(*messages: Iterable[int], now: float = 0.0) -> Transits:
    transits = Transits()
    for message in messages:
        status = TransferStatus()
        for fork_id in message:
            transits.add(fork_id, status, now)
    return transits


def test_nothing_is_asked_for_before_its_time() -> None:
    transits = sent([1], now=10.0)
    assert transits.look([1], 14.0, ASK_S) == ([], 15.0)
    assert transits.look([1], 15.0, ASK_S) == ([1], 20.0)
    assert transits.look([1], 19.0, ASK_S) == ([], 20.0)
    assert transits.look([1], 20.0, ASK_S) == ([1], 25.0)


def test_nothing_in_transit_needs_no_look() -> None:
    assert Transits().look([], 0.0, ASK_S) == ([], float("inf"))


def test_accepted_references_are_no_longer_in_transit() -> None:
    transits = sent([1], [2])
    assert transits.look([2], 5.0, ASK_S) == ([2], 10.0)
    assert len(transits) == 1
    transits.discard(2)
    assert len(transits) == 0


def test_looks_are_some_time_apart() -> None:
    transits = Transits()
    assert transits.next_look(ASK_S) < 0.0
    transits.look([], 100.0, ASK_S)
    assert transits.next_look(ASK_S) == 101.0


def test_only_the_last_reference_of_each_message_is_asked_for() -> None:
    transits = sent(range(1000), [2000, 2001], [3000])
    children = [*range(1000), 2000, 2001, 3000]
    for now in (5.0, 10.0, 15.0):
        assert transits.look(children, now, ASK_S) == ([999, 2001, 3000], now + 5.0)


def test_while_a_message_is_packed_its_latest_overdue_reference_is_asked_for() -> None:
    transits, status = Transits(), TransferStatus()
    for second in range(20):
        transits.add(second, status, float(second))
        asked, _ = transits.look(range(second + 1), float(second), ASK_S)
        assert asked == ([second - 5] if second >= 5 else [])


def test_all_that_are_left_are_asked_for_when_the_last_one_has_arrived_or_is_lost() -> None:
    transits = sent([1, 2, 3, 4], [5, 6])
    assert transits.look([1, 2, 3, 4, 5, 6], 5.0, ASK_S)[0] == [4, 6]
    assert transits.look([2, 3, 5, 6], 10.0, ASK_S)[0] == [2, 3, 6]
    assert transits.look([2, 3, 5, 6], 15.0, ASK_S)[0] == [2, 3, 6]  # a second no is needed
    assert transits.look([5], 20.0, ASK_S)[0] == [5]


def test_references_in_a_call_in_progress_are_not_asked_for() -> None:
    transits, status = Transits(), TransferStatus()
    status.call_id = 7
    transits.add(1, status, 0.0)
    transits.add(2, status, 0.0)
    assert transits.look([1, 2], 5.0, ASK_S) == ([], 10.0)
    status.call_id = 0
    assert transits.look([1, 2], 10.0, ASK_S)[0] == [2]


def test_references_to_a_worker_that_is_back_are_asked_for_one_by_one() -> None:
    transits = Transits()
    assert transits.look([1, 2], 100.0, ASK_S) == ([], 105.0)
    assert transits.look([1, 2], 105.0, ASK_S)[0] == [1, 2]
