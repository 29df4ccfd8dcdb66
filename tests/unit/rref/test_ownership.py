"""The rules of `Ownership` one by one, and what went wrong before. `tests/properties` tries everything else."""

from __future__ import annotations

from gradwire.rref._actions import Accept, Adopt, Answer, Ask, Confirm, Delete, EndSeen, Fail, Free, Mourn, Resume
from gradwire.rref._ownership import ForkPhase, Ownership

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


def test_fork_is_accepted_when_its_owner_has_confirmed_it() -> None:
    user = Ownership(C)
    assert user.received(RREF, CHILD, A, B) == [Adopt(A, RREF, CHILD, None)]
    assert user.phase_of(CHILD) is ForkPhase.PENDING
    assert user.confirmed(CHILD) == [Accept(B, CHILD)]


def test_fork_is_kept_while_its_child_is_on_its_way() -> None:
    user = Ownership(B)
    user.received(RREF, FORK, A, A)
    assert user.sent(RREF, FORK, CHILD, C)
    assert user.fork_dropped(FORK) == []
    assert user.accepted(CHILD, C) == [Delete(A, RREF, FORK, False)]


def test_repeated_adoption_of_what_is_over_revives_nothing() -> None:
    owner = owner_with((FORK, B))
    owner.adopt_received(C, RREF, CHILD, None)
    owner.delete_received(C, RREF, CHILD, False)
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
    assert owner.worker_lost(B, [C, D]) == [Mourn(C, B, 1), Mourn(D, B, 1)]
    assert owner.end_seen(C, B, 1) == []
    assert owner.mourned() == [B]
    assert owner.end_seen(D, B, 1) == [Free(RREF)]


def test_end_is_seen_when_what_the_dead_sent_is_listed() -> None:
    user = Ownership(C)
    user.received(RREF, CHILD, A, B)
    user.worker_lost(B, [A])
    assert user.mourn_received(A, B, 1, may_come=False) == []
    assert user.confirmed(CHILD) == [EndSeen(A, B, 1)]


def test_mourner_waits_for_what_it_got_from_the_dead_itself() -> None:
    """Else it gives up the fork that protects the one that came back to it."""
    user = Ownership(B)
    user.received(RREF, FORK, A, A)
    user.sent(RREF, FORK, CHILD, C)
    user.fork_dropped(FORK)
    user.received(RREF, 4, A, C)
    user.worker_lost(C, [A])
    assert user.end_seen(A, C, 1) == []
    assert user.confirmed(4) == [Delete(A, RREF, FORK, False)]


def test_end_of_one_that_held_nothing_is_asked_for_while_anything_is_shared() -> None:
    owner = owner_with((FORK, B))
    assert owner.worker_lost(C, [B, D]) == [Mourn(B, C, 1), Mourn(D, C, 1)]
    owner.worker_lost(B, [D])
    assert owner.end_seen(D, B, 1) == []
    assert owner.end_seen(D, C, 1) == [Free(RREF)]


def test_overtaken_question_does_not_replace_the_newer_one() -> None:
    user = Ownership(C)
    user.mourn_received(A, B, 2, may_come=True)
    user.mourn_received(A, B, 1, may_come=True)
    assert user.worker_lost(B, [A]) == [EndSeen(A, B, 2)]


def test_what_is_sent_to_one_taken_for_dead_is_not_forgotten_with_the_rest() -> None:
    owner = owner_with((FORK, B))
    owner.worker_lost(B, [C])
    owner.sent(RREF, None, CHILD, B)
    assert owner.end_seen(C, B, 1) == []
    assert owner.holders() == {B: 1}
    assert owner.accepted(CHILD, B) == []
    assert owner.delete_received(B, RREF, CHILD, False) == [Free(RREF)]


def test_one_taken_for_dead_is_asked_what_it_still_has() -> None:
    owner, user = owner_with((FORK, B)), Ownership(B)
    owner.worker_lost(B, [C])
    assert owner.worker_seen(B) == [Resume(B), Ask(B, FORK, True)]
    assert owner.mourned() == []
    assert user.asked(A, FORK, True, False) == [Answer(A, FORK, False, True)]
    assert owner.answered(B, FORK, False, True) == [Free(RREF)]


def test_one_that_was_seen_all_the_time_is_not_asked() -> None:
    assert owner_with((FORK, B)).worker_seen(B) == []


def test_resume_asks_again_to_be_listed_and_stops_expecting() -> None:
    user, owner = Ownership(C), Ownership(A)
    user.received(RREF, CHILD, A, B)
    assert user.resume_received(A) == [Adopt(A, RREF, CHILD, None)]
    owner.adopt_received(C, RREF, CHILD, B)
    assert owner.resume_received(B) == [Fail(RREF)]
