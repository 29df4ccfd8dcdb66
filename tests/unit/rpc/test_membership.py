"""Which incarnation of a worker counts, and whose end was told."""

from __future__ import annotations

from gradwire.rpc.peers import Membership
from gradwire.types import WorkerAddress, WorkerInfo


def incarnation(number: int) -> WorkerAddress:
    return WorkerAddress(WorkerInfo("w", 0), number, "host", ())


def test_each_end_is_told_once() -> None:
    membership = Membership()
    membership.on_seen(incarnation(5))
    assert not membership.has_ended("w")
    assert [membership.on_ended(incarnation(5)) for _ in range(3)] == [True, False, False]
    assert membership.has_ended("w")


def test_a_newer_incarnation_ends_the_older_one() -> None:
    membership = Membership()
    membership.on_seen(incarnation(5))
    assert membership.on_seen(incarnation(7)) == incarnation(5)  # told from now on, whatever becomes of the newer one
    assert membership.on_seen(incarnation(7)) is None
    assert not membership.on_ended(incarnation(5))
    assert not membership.has_ended("w")
    assert not membership.is_current(incarnation(6))
    assert membership.on_ended(incarnation(7))
    assert not membership.on_ended(incarnation(5))


def test_a_worker_that_was_taken_for_dead_may_be_back_and_end_again() -> None:
    membership = Membership()
    membership.on_seen(incarnation(5))
    membership.on_ended(incarnation(5))
    assert membership.on_seen(incarnation(5)) is None
    assert not membership.has_ended("w")
    assert membership.on_ended(incarnation(5))


def test_old_connection_that_ends_late_does_not_end_a_worker_that_is_back() -> None:
    membership = Membership()
    membership.on_seen(incarnation(5))
    old = membership.num_ends("w")
    assert membership.on_ended(incarnation(5), old)  # one of its two connections
    membership.on_seen(incarnation(5))
    assert not membership.on_ended(incarnation(5), old)  # the other one
    assert not membership.has_ended("w")
    assert membership.on_ended(incarnation(5), membership.num_ends("w"))


def test_restarts_do_not_add_up() -> None:
    membership = Membership()
    for number in range(1, 1001):
        membership.on_seen(incarnation(number))
        membership.on_ended(incarnation(number))
    assert len(membership._ended) == len(membership._newest) == len(membership._num_ends) == 1
