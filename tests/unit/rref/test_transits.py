"""Which references in transit are asked for, and when."""

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
    assert transits.scan([1], 14.0, ASK_S) == ([], 15.0)
    assert transits.scan([1], 15.0, ASK_S) == ([1], 20.0)
    assert transits.scan([1], 19.0, ASK_S) == ([], 20.0)
    assert transits.scan([1], 20.0, ASK_S) == ([1], 25.0)


def test_nothing_in_transit_needs_no_scan() -> None:
    assert Transits().scan([], 0.0, ASK_S) == ([], float("inf"))


def test_accepted_references_are_no_longer_in_transit() -> None:
    transits = sent([1], [2])
    assert transits.scan([2], 5.0, ASK_S) == ([2], 10.0)
    assert len(transits) == 1
    transits.discard(2)
    assert len(transits) == 0
    assert transits.scan([], 10.0, ASK_S) == ([], float("inf"))


def test_scans_are_some_time_apart() -> None:
    transits = Transits()
    assert transits.next_scan(ASK_S) < 0.0
    transits.scan([], 100.0, ASK_S)
    assert transits.next_scan(ASK_S) == 101.0


def test_only_the_last_reference_of_each_message_is_asked_for() -> None:
    transits = sent(range(1000), [2000, 2001], [3000])
    children = [*range(1000), 2000, 2001, 3000]
    for now in (5.0, 10.0, 15.0):
        assert transits.scan(children, now, ASK_S) == ([999, 2001, 3000], now + 5.0)


def test_nothing_is_asked_for_while_its_message_is_packed() -> None:
    transits, status = Transits(), TransferStatus()
    for second in range(20):
        transits.add(second, status, float(second))
        assert transits.scan(range(second + 1), float(second), ASK_S) == ([], second + 5.0)
    assert transits.scan(range(20), 24.0, ASK_S) == ([19], 29.0)


def test_a_message_that_is_packed_and_unpacked_slowly_takes_a_question_every_5_s() -> None:
    transits, status = Transits(), TransferStatus()
    for number in range(1000):
        transits.add(number, status, number / 100)  # for 10 s
    asked = []
    for second in range(10, 30):  # one is accepted every 20 ms
        asked += transits.scan(range((second - 10) * 50, 1000), float(second), ASK_S)[0]
    assert asked == [999, 999, 999]


def test_all_that_are_left_are_asked_for_when_the_last_one_has_arrived_or_is_lost() -> None:
    transits = sent([1, 2, 3, 4], [5, 6])
    assert transits.scan([1, 2, 3, 4, 5, 6], 5.0, ASK_S)[0] == [4, 6]
    assert transits.scan([2, 3, 5, 6], 10.0, ASK_S)[0] == [6, 2, 3]
    assert transits.scan([2, 3, 5, 6], 15.0, ASK_S)[0] == [6, 2, 3]  # a second negative answer is needed
    assert transits.scan([5], 20.0, ASK_S)[0] == [5]


def test_references_in_a_call_in_progress_are_not_asked_for() -> None:
    transits, status = Transits(), TransferStatus()
    status.call_id = 7
    transits.add(1, status, 0.0)
    transits.add(2, status, 0.0)
    assert transits.scan([1, 2], 5.0, ASK_S) == ([], 10.0)
    status.call_id = 0
    assert transits.scan([1, 2], 10.0, ASK_S)[0] == [2]
