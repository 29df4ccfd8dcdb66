"""The rules of `Ownership` one by one, and what went wrong before. `tests/properties` tries everything else."""

from __future__ import annotations

import time

import pytest

from gradwire.rref import _ownership
from gradwire.rref._messages import (
    Accept,
    AcknowledgeDeath,
    Adopt,
    Answer,
    Ask,
    Break,
    Confirm,
    Confirmed,
    Delete,
    Fail,
    Forget,
    Free,
    ReportDeath,
    Worker,
)
from gradwire.rref._ownership import ForkPhase, Ownership, RecentIds

A, B, C, D = (0, 1), (1, 1), (2, 1), (3, 1)
RREF, FORK, CHILD = 1, 2, 3


def owner_with(*holders: tuple[int, tuple[int, int]]) -> Ownership:
    """A owns a value that nobody needs but these."""
    owner = Ownership(A)
    owner.value_made(RREF)
    for fork_id, holder in holders:
        assert owner.sent(RREF, None, fork_id, holder)
        assert owner.accepted(fork_id, holder) == []
    assert owner.value_dropped(RREF) == []
    return owner


def num_remembered(ownership: Ownership) -> int:
    """How many ids of forks and values that ended a worker remembers."""
    return sum(len(ids.latest | ids.older) for ids in ownership._ended.values())


def test_fork_is_accepted_when_its_owner_has_confirmed_it() -> None:
    user = Ownership(C)
    assert user.received(RREF, CHILD, A, B) == [Adopt(A, RREF, CHILD, None)]
    assert user.phase_of(CHILD) is ForkPhase.PENDING
    assert user.confirmed(CHILD, A) == [Confirmed(CHILD), Accept(B, CHILD)]


def test_fork_is_kept_while_its_child_is_on_its_way() -> None:
    user = Ownership(B)
    user.received(RREF, FORK, A, A)
    assert user.sent(RREF, FORK, CHILD, C)
    assert user.fork_dropped(FORK) == []
    assert user.accepted(CHILD, C) == [Forget(FORK), Delete(A, RREF, FORK, False)]


def test_adoption_that_comes_after_its_deletion_revives_nothing() -> None:
    owner = owner_with((FORK, B))
    assert owner.delete_received(C, RREF, CHILD, False) == []
    assert owner.adopt_received(C, RREF, CHILD, None) == [Confirm(C, CHILD, False)]
    assert owner.delete_received(B, RREF, FORK, False) == [Free(RREF)]


def test_only_the_last_no_counts() -> None:
    owner, user = Ownership(A), Ownership(B)
    owner.value_made(RREF)
    owner.sent(RREF, None, FORK, B)
    assert owner.overdue([FORK]) == [Ask(B, FORK, False)]
    assert user.asked(A, FORK, False, False) == [Answer(A, FORK, False, False)]
    assert owner.answered(B, FORK, False, False) == []
    assert owner.overdue([FORK]) == [Ask(B, FORK, True)]
    assert user.asked(A, FORK, True, False) == [Answer(A, FORK, False, True)]
    assert user.received(RREF, FORK, A, A) is None
    owner.answered(B, FORK, False, True)
    assert owner.holders() == {}


def test_expected_value_fails_with_its_maker() -> None:
    owner = Ownership(A)
    assert owner.adopt_received(C, RREF, CHILD, B) == [Confirm(C, CHILD, True)]
    assert Fail(RREF) in owner.worker_lost(B, [C])
    assert not owner.value_created(RREF, FORK, B)


def test_what_the_dead_held_is_kept_until_everybody_has_seen_the_end() -> None:
    owner = owner_with((FORK, B))
    assert owner.worker_lost(B, [C, D]) == [ReportDeath(C, B, 1), ReportDeath(D, B, 1)]
    assert owner.death_acknowledged(C, B, 1) == []
    assert sorted(owner._deaths.retained) == [B]
    assert owner.death_acknowledged(D, B, 1) == [Confirm(B, FORK, False), Free(RREF)]


def test_end_is_seen_when_what_the_dead_sent_is_listed() -> None:
    user = Ownership(C)
    user.received(RREF, CHILD, A, B)
    user.worker_lost(B, [A])
    assert user.death_reported(A, B, 1, is_connected=False, is_known=True) == []
    assert user.confirmed(CHILD, A) == [Confirmed(CHILD), Accept(B, CHILD), AcknowledgeDeath(A, B, 1)]


def test_references_of_the_dead_are_retained_until_what_came_from_them_is_listed_here() -> None:
    """Else it gives up the fork that protects the one that came back to it."""
    user = Ownership(B)
    user.received(RREF, FORK, A, A)
    user.sent(RREF, FORK, CHILD, C)
    user.fork_dropped(FORK)
    user.received(RREF, 4, A, C)
    user.worker_lost(C, [A])
    assert user.death_acknowledged(A, C, 1) == []
    assert user.confirmed(4, A) == [Confirmed(4), Accept(C, 4), Forget(FORK), Delete(A, RREF, FORK, False)]


def test_end_of_one_that_held_nothing_is_asked_for_while_anything_is_shared() -> None:
    owner = owner_with((FORK, B))
    assert owner.worker_lost(C, [B, D]) == [ReportDeath(B, C, 1), ReportDeath(D, C, 1)]
    owner.worker_lost(B, [D])
    assert owner.death_acknowledged(D, B, 1) == []
    assert owner.death_acknowledged(D, C, 1) == [Confirm(B, FORK, False), Free(RREF)]


def test_overtaken_question_does_not_replace_the_newer_one() -> None:
    user = Ownership(C)
    user.death_reported(A, B, 2, is_connected=True, is_known=True)
    user.death_reported(A, B, 1, is_connected=True, is_known=True)
    assert user.worker_lost(B, [A]) == [AcknowledgeDeath(A, B, 2)]


def test_what_is_sent_to_one_taken_for_dead_is_not_forgotten_with_the_rest() -> None:
    owner = owner_with((FORK, B))
    owner.worker_lost(B, [C])
    owner.sent(RREF, None, CHILD, B)
    assert owner.death_acknowledged(C, B, 1) == [Confirm(B, FORK, False)]
    assert owner.holders() == {B: 1}
    assert owner.accepted(CHILD, B) == []
    assert owner.delete_received(B, RREF, CHILD, False) == [Free(RREF)]


def test_one_taken_for_dead_keeps_what_was_not_struck_off_yet() -> None:
    owner = owner_with((FORK, B))
    owner.worker_lost(B, [C])
    assert owner.worker_seen(B) == []
    assert sorted(owner._deaths.retained) == []
    assert owner.holders() == {B: 1}


def test_one_that_is_struck_off_hears_of_it_and_breaks_its_fork() -> None:
    user = Ownership(B)
    user.received(RREF, FORK, A, A)
    broken, deleted = user.confirmed(FORK, A, is_known=False)
    assert isinstance(broken, Break)
    assert "declared it lost" in broken.reason
    assert deleted == Delete(A, RREF, FORK, False)


def test_fork_that_is_struck_off_before_it_arrives_is_not_taken() -> None:
    user = Ownership(B)
    assert user.confirmed(FORK, A, is_known=False) == []
    assert user.received(RREF, FORK, A, A) is None


def test_user_tells_an_owner_that_is_taken_for_dead_which_forks_it_breaks() -> None:
    user = Ownership(B)
    user.fork_created(RREF, FORK, A)
    user.received(4, CHILD, A, A)
    actions = user.worker_lost(A, [])
    assert [action for action in actions if isinstance(action, Delete)] == [
        Delete(A, RREF, FORK, True),
        Delete(A, 4, CHILD, False),
    ]


def test_what_is_sent_to_a_dead_worker_is_given_up_when_it_is_overdue() -> None:
    owner = Ownership(A)
    owner.value_made(RREF)
    owner.worker_lost(B, [])
    owner.sent(RREF, None, FORK, B)
    owner.overdue([FORK])
    assert owner.counts == (1, 0, 0, 0)
    assert owner.holders() == {}


# -- words of workers that have no say --------------------------------------------------------------------------------


def test_only_the_owner_confirms() -> None:
    user = Ownership(C)
    user.received(RREF, CHILD, A, B)
    assert user.confirmed(CHILD, D) == []
    assert user.confirmed(CHILD, D, is_known=False) == []
    assert user.phase_of(CHILD) is ForkPhase.PENDING


def test_only_the_holder_deletes() -> None:
    owner = owner_with((FORK, B))
    assert owner.delete_received(C, RREF, FORK, True) == []
    assert owner.holders() == {B: 1}
    owner = Ownership(A)
    owner.value_made(RREF)
    owner.sent(RREF, None, FORK, B)
    assert owner.delete_received(C, RREF, FORK, False) == []
    assert owner.delete_received(C, 77, FORK, False) == []
    assert owner.children() == [FORK]


def test_a_fork_that_was_sent_on_is_not_unpinned_by_a_deletion() -> None:
    user = Ownership(B)
    user.received(RREF, FORK, A, A)
    user.sent(RREF, FORK, CHILD, C)
    assert user.delete_received(C, RREF, CHILD, False) == []
    assert user.children() == [CHILD]


def test_only_the_maker_gives_a_value_up() -> None:
    owner = Ownership(A)
    owner.adopt_received(C, RREF, CHILD, B)
    assert owner.delete_received(D, RREF, 9, True) == []
    assert owner.value_created(RREF, FORK, B)


def test_a_fork_is_not_taken_over_by_another_worker() -> None:
    owner = owner_with((FORK, B))
    assert owner.adopt_received(C, RREF, FORK, None) == [Confirm(C, FORK, False)]
    assert owner.holders() == {B: 1}


def test_a_fork_is_one_of_a_single_value() -> None:
    """With two values behind one fork, the second would be kept for ever once the holder is gone."""
    owner = owner_with((FORK, B))
    assert owner.value_created(5, 9, C)
    assert not owner.value_created(6, 9, C)
    assert owner.adopt_received(C, RREF, 9, None) == [Confirm(C, 9, False)]
    assert owner.adopt_received(C, 5, 9, None) == [Confirm(C, 9, True)]
    assert Free(5) in owner.worker_lost(C, [])
    assert owner.holders() == {B: 1}


def test_nothing_is_remembered_of_a_life_that_is_over_for_certain() -> None:
    old, new = (1, 1), (1, 2)
    owner = owner_with((FORK, old), (CHILD, new))
    owner.worker_lost(old, [C])
    owner.incarnation_ended((1, 1))
    owner.death_acknowledged(C, old, 1)
    assert owner.holders() == {new: 1}
    assert num_remembered(owner) == 0
    owner.worker_lost(new, [])
    assert num_remembered(owner) == 1  # it may come back


def test_a_value_is_made_once_and_for_its_maker() -> None:
    owner = owner_with((FORK, B))
    assert not owner.value_created(RREF, CHILD, C)
    owner.adopt_received(C, 5, CHILD, B)
    assert not owner.value_created(5, 9, C)
    assert owner.value_created(5, 9, B)
    assert not owner.value_created(5, 10, B)


# -- floods -----------------------------------------------------------------------------------------------------------


def test_values_that_are_never_made_are_bounded_by_the_worker_that_speaks_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_ownership, "_MAX_EXPECTED", 10)
    owner = Ownership(A)
    answers = [owner.adopt_received(C, number, 1000 + number, B)[0] for number in range(1, 21)]
    assert answers == [Confirm(C, 1000 + number, number <= 10) for number in range(1, 21)]
    assert owner.adopt_received(D, 50, 1050, B) == [Confirm(D, 1050, True)]
    assert owner.counts[0] == 11
    for number in range(1, 11):
        assert owner.value_created(number, 2000 + number, B)
    assert owner.adopt_received(C, 60, 1060, B) == [Confirm(C, 1060, True)]


def test_references_of_one_worker_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ownership, "_MAX_HELD", 10)
    owner = owner_with((FORK, B))
    for number in range(10):
        assert owner.adopt_received(C, RREF, 100 + number, None) == [Confirm(C, 100 + number, True)]
    assert owner.adopt_received(C, RREF, 200, None) == [Confirm(C, 200, False)]
    assert not owner.value_created(5, 201, C)
    assert owner.adopt_received(D, RREF, 202, None) == [Confirm(D, 202, True)]
    owner.delete_received(C, RREF, 100, False)
    assert owner.adopt_received(C, RREF, 203, None) == [Confirm(C, 203, True)]


def test_invented_deletions_push_out_only_what_the_same_worker_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ownership, "_MEMORY", 100)
    owner = Ownership(A)
    owner.delete_received(B, RREF, FORK, True)
    for number in range(10_000):
        owner.delete_received(C, 5, 1000 + number, True)
    assert num_remembered(owner) <= 101 + 2
    assert not owner.value_created(RREF, FORK, B)
    owner.worker_lost(C, [])
    owner.incarnation_ended(C)
    assert num_remembered(owner) == 2


def test_ends_of_invented_workers_leave_nothing() -> None:
    user = Ownership(C)
    before = sizes(user)
    for number in range(100):
        dead: Worker = (7, number)
        assert user.death_reported(A, dead, 1, is_connected=False, is_known=False) == [AcknowledgeDeath(A, dead, 1)]
    assert sizes(user) == before


def sizes(machine: Ownership) -> list[int]:
    return [len(table) for table in vars(machine._deaths).values()]


def test_an_invented_owner_leaves_nothing() -> None:
    user = Ownership(C)
    before = sizes(user)
    user.received(RREF, FORK, (0, 99), B)
    actions = user.break_forks_of((0, 99))
    assert [type(action) for action in actions] == [Break, Delete, Accept]
    assert sizes(user) == before


def test_the_latest_ids_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ownership, "_MEMORY", 100)
    ids = RecentIds()
    for number in range(1000):
        ids.add(number)
        assert len(ids.latest | ids.older) <= 100
        assert all(recent in ids for recent in range(max(0, number - 49), number + 1))


def test_dropping_references_takes_the_same_time_after_many_have_ended() -> None:
    user = Ownership(B)

    def drop(first: int, count: int) -> float:
        started = time.thread_time()
        for number in range(first, first + count):
            user.received(1 << 40 | number, number, A, A)
            user.fork_dropped(number)
        return time.thread_time() - started

    times = [drop(1 + 5_000 * block, 5_000) for block in range(40)]
    assert max(times) < 15 * min(times)  # 50 times as long when each walks over those that were forgotten before
