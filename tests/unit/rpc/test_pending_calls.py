"""The table of calls under way: every call ends once."""

from __future__ import annotations

import threading

import pytest

from gradwire.rpc.pending_calls import PHASE_TEXT, CallTable, PendingCall, new_call_id


def make_call(call_id: int, timeout_s: float = 0.0, started: float = 100.0) -> PendingCall:
    deadline = started + timeout_s if timeout_s else float("inf")
    return PendingCall(call_id, "w1", "module:function", started, deadline)


def make_table(*calls: PendingCall) -> CallTable:
    table = CallTable()
    for call in calls:
        call.table, table[call.call_id] = table, call
    return table


def test_whoever_takes_a_call_out_ends_it() -> None:
    call = make_call(1)
    table = make_table(call)
    assert call.table is table
    assert len(table) == 1
    assert table.pop(1) is call
    assert table.pop(1, None) is None
    assert len(table) == 0


def test_threads_that_race_for_calls_get_each_once() -> None:
    table = make_table(*(make_call(number) for number in range(2000)))
    taken: list[list[PendingCall]] = [[] for _ in range(4)]
    gate = threading.Barrier(4)

    def take(mine: list[PendingCall]) -> None:
        gate.wait(10)
        for number in range(2000):
            call = table.pop(number, None)
            if call is not None:
                mine.append(call)

    threads = [threading.Thread(target=take, args=(mine,)) for mine in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(call.call_id for mine in taken for call in mine) == list(range(2000))


def test_deadlines() -> None:
    none, late, early = make_call(1), make_call(2, timeout_s=10), make_call(3, timeout_s=2)
    table = make_table(none, late, early)
    assert (none.deadline, late.deadline, early.deadline) == (float("inf"), 110, 102)
    assert table.expire(101.9) == ([], 102)
    assert table.expire(102) == ([early], 110)
    assert early.is_expiring
    assert table.expire(103) == ([], 110)  # each is named once
    assert table.expire(1e9) == ([late], float("inf"))
    assert len(table) == 3  # they end when they are taken out


def test_a_call_shows_its_state() -> None:
    call = make_call(7)
    assert repr(call) == "<call 7 module:function on w1 pending>"
    call.is_expiring = True
    assert "expiring" in repr(call)
    call.is_done = True
    assert "done" in repr(call)


@pytest.mark.parametrize("phase", PHASE_TEXT)
def test_a_timeout_says_where_and_what_next(phase: str) -> None:
    text = make_call(1, timeout_s=2).timeout_text(phase, 102.5)
    assert "module:function on worker w1" in text
    assert "2.5 s" in text
    assert f"phase: {phase}" in text
    assert "Pass a larger timeout" in text


def test_ids_rise_and_never_repeat() -> None:
    ids = [new_call_id() for _ in range(100)]
    assert ids == sorted(set(ids))
    assert ids[0] > 0
