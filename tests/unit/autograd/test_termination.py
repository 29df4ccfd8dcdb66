"""When a pass is over, when it must fail, and when it never will be over."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from gradwire.autograd._backward_state import PassSnapshot, Termination, WaitingSend, is_stalled

SEND = WaitingSend(0x10, "a", "b", "module:function", "train.py:7, in step")


class TestTermination:
    def test_root_alone(self) -> None:
        termination = Termination(4)
        assert termination.participants == {4}
        assert termination.missing == {4}
        assert termination.reported(4, ())
        assert not termination.missing

    def test_everybody_named_must_report(self) -> None:
        termination = Termination(0)
        assert not termination.reported(0, (1,))
        assert not termination.reported(1, (0, 2))
        assert termination.missing == {2}
        assert termination.reported(2, (1,))
        assert termination.participants == {0, 1, 2}

    def test_in_any_order(self) -> None:
        reports = {0: (1,), 1: (2, 3), 2: (), 3: (1,)}
        for order in itertools.permutations(reports):
            termination = Termination(0)
            found = [termination.reported(worker, reports[worker]) for worker in order]
            assert found == [False, False, False, True], order

    def test_repeats_do_no_harm(self) -> None:
        termination = Termination(0)
        assert not termination.reported(1, (2,))
        assert not termination.reported(1, ())
        assert not termination.reported(0, (1,))
        assert termination.missing == {2}
        assert termination.reported(2, ())

    def test_who_has_reported_takes_part_though_nobody_has_named_it(self) -> None:
        """Its end must be told to it, too, if the one that made it join dies before naming it."""
        termination = Termination(0)
        termination.reported(7, (8,))
        assert termination.participants == {0, 7, 8}

    def test_report_of_a_worker_that_nobody_has_named_has_no_say(self) -> None:
        """It may have no part in the pass: neither those it names nor those it misses count before it is named."""
        termination = Termination(0)
        assert not termination.reported(7, (8, 1), (2,))
        assert not termination.reported(0, (1, 2))
        assert not termination.reported(1, ())
        assert not termination.mistaken
        assert termination.missing == {2}
        assert termination.reported(2, (0,))

    def test_report_counts_when_its_sender_is_named(self) -> None:
        termination = Termination(0)
        assert not termination.reported(7, (8,), (2,))
        assert not termination.is_named(7)
        assert not termination.reported(0, (7, 2))
        assert termination.is_named(7)
        assert termination.missing == {2, 8}
        assert termination.mistaken == {2}

    @pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
    def test_dead_worker_that_was_taken_for_absent_must_have_no_part(self, order: tuple[int, ...]) -> None:
        """It got a gradient from 1 and reported; 2 knew of its death, and did without the gradient that was on its way."""
        reports = {0: ((1, 2), ()), 1: ((0, 3), ()), 2: ((0,), (3,)), 3: ((1, 2), ())}
        termination = Termination(0)
        found = [termination.reported(worker, *reports[worker]) for worker in order]
        assert found == [False] * 4
        assert not termination.missing
        assert termination.mistaken == {3}

    def test_dead_worker_without_a_part_is_no_mistake(self) -> None:
        termination = Termination(0)
        assert not termination.reported(0, (1,), (5,))
        assert termination.reported(1, (0,), (5, 6))
        assert not termination.mistaken


def snapshot(**changes: object) -> PassSnapshot:
    """A participant that has nothing to do."""
    usual = {"worker": "a", "is_known": True, "num_sent": 1, "num_received": 1, "waiting": (SEND,)}
    return PassSnapshot(**{**usual, **changes})  # type: ignore[arg-type]


class TestStalls:
    def test_nothing_moves(self) -> None:
        now = {
            0: snapshot(num_sent=2, num_received=0, peers=(1,)),
            1: snapshot(num_sent=0, num_received=2, is_done=True),
        }
        assert is_stalled(now, now)

    def test_something_changed_meanwhile(self) -> None:
        assert not is_stalled({0: snapshot(num_sent=2, num_received=2)}, {0: snapshot()})
        assert not is_stalled({}, {0: snapshot()})

    def test_somebody_computes(self) -> None:
        now = {0: snapshot(), 1: snapshot(num_running=1)}
        assert not is_stalled(now, now)

    def test_a_message_is_under_way(self) -> None:
        now = {0: snapshot(num_sent=2), 1: snapshot()}
        assert not is_stalled(now, now)

    def test_everybody_is_done(self) -> None:
        """Their reports are under way."""
        now = {0: snapshot(is_done=True, waiting=()), 1: snapshot(is_done=True, waiting=())}
        assert not is_stalled(now, now)
        assert not is_stalled({}, {})

    def test_somebody_has_dropped_the_pass_or_does_not_answer(self) -> None:
        """What it has sent and received is not known, and whatever ended it will reach the others."""
        now = {0: snapshot(peers=(1,)), 1: PassSnapshot("b")}
        assert not is_stalled(now, now)

    def test_somebody_was_not_asked(self) -> None:
        now = {0: snapshot(peers=(1,))}
        assert not is_stalled(now, now)


def test_waiting_send_is_described() -> None:
    assert str(SEND) == "send 0x10 of module:function (train.py:7, in step) on worker a to b"


def test_snapshots_travel() -> None:
    there = snapshot(peers=(1, 2), num_running=3)
    assert msgspec.convert(msgspec.to_builtins(there), PassSnapshot) == there
