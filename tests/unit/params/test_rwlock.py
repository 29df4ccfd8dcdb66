"""Who may read, who may change, whose turn it is: without threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.params import rwlock
from gradwire.params.rwlock import Change, Turns


def test_readers_and_changers_exclude_each_other() -> None:
    group, everything = Turns(), Turns()
    change = Change([group], everything)
    group.num_readers += 1
    assert not change.begin()
    group.num_readers -= 1
    assert change.begin()
    assert not group.can_read(is_patient=False)
    assert not everything.can_read(is_patient=False)
    assert not Change([group], everything).begin()
    change.end()
    assert group.can_read(is_patient=True)
    assert everything.can_read(is_patient=True)


def test_steps_on_different_groups_go_side_by_side() -> None:
    one, two, everything = Turns(), Turns(), Turns()
    first, second, both = (Change(groups, everything) for groups in ([one], [two], [one, two]))
    assert first.begin()
    assert second.begin()
    assert not both.begin()
    first.end()
    assert not everything.can_read(is_patient=False)
    second.end()
    assert both.begin()


def test_whoever_reads_everything_holds_up_every_step() -> None:
    group, everything = Turns(), Turns()
    everything.num_readers += 1
    assert not Change([group], everything).begin()
    assert not Change([], everything).begin()
    assert group.can_read(is_patient=True)


def test_patient_readers_let_waiting_steps_go_first() -> None:
    group, everything = Turns(), Turns()
    group.num_readers += 1
    change = Change([group], everything)
    change.wait()
    assert not group.can_read(is_patient=True)
    assert group.can_read(is_patient=False)
    change.stop_waiting()
    assert group.can_read(is_patient=True)


@pytest.mark.parametrize("num_waits", [1, 3])
def test_a_change_that_is_interrupted_while_it_waits_is_counted_by_none(
    monkeypatch: pytest.MonkeyPatch, num_waits: int
) -> None:
    """Ctrl-C is raised in the wait for calls that read, the first time or later."""
    groups = [Turns(), Turns(), Turns()]
    groups[1].num_readers += 1
    waits: list[object] = []

    def interrupt(*args: object) -> bool:
        assert groups[0].num_pending == groups[2].num_pending == 1
        waits.append(args)
        if len(waits) == num_waits:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(rwlock._interrupts, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rwlock.begin(Change(groups[:2], groups[2]))
    assert [(group.num_pending, group.num_changers) for group in groups] == [(0, 0)] * 3


def test_turns_come_in_order() -> None:
    group = Turns()
    assert group.ask_turn(1)
    assert not group.ask_turn(2)
    assert not group.ask_turn(3)
    assert not group.ask_turn(2)
    assert group.ask_turn(1)
    assert (group.holder, group.num_in_line) == (1, 2)
    assert group.end_turn(1)
    assert not group.ask_turn(3)
    assert group.ask_turn(2)
    assert not group.end_turn(1)
    group.leave_line(3)
    group.leave_line(3)
    assert group.end_turn(2)
    assert group.ask_turn(4)
    assert "holder 4, 0 in line" in repr(group)


def test_a_context_in_line_may_end() -> None:
    group = Turns()
    assert group.ask_turn(1)
    assert not group.ask_turn(2)
    assert not group.end_turn(2)
    assert group.num_in_line == 0
    assert group.holder == 1


@given(st.lists(st.tuples(st.sampled_from(["ask", "end", "leave"]), st.integers(1, 4)), max_size=60))
def test_one_holder_at_a_time_and_nobody_is_forgotten(events: list[tuple[str, int]]) -> None:
    group, waiting = Turns(), set()
    acts: dict[str, Callable[[int], object]] = {"ask": group.ask_turn, "end": group.end_turn, "leave": group.leave_line}
    for event, context_id in events:
        before = group.holder
        result = acts[event](context_id)
        if event == "ask":
            waiting.add(context_id)
            assert result == (group.holder == context_id)
            assert before in (0, group.holder)
        else:
            if event == "end" or before != context_id:
                waiting.discard(context_id)
            assert group.holder in (0, before)
        assert waiting == set(group._line) | ({group.holder} - {0})
    for _ in range(4):  # whoever still asks gets a turn
        group.end_turn(group.holder)
        waiting.discard(group.holder)
        for context_id in list(group._line):
            if group.ask_turn(context_id):
                break
    assert group.num_in_line == 0
