"""What is done when the lock is released: in which order, and what Ctrl-C leaves of it."""

from __future__ import annotations

import threading

import pytest

from gradwire.rref._messages import Accept
from gradwire.rref.context import Decisions


def test_what_ctrl_c_keeps_from_being_done_is_done_next_time() -> None:
    decisions, done = Decisions((0, 1)), []

    def interrupted_once() -> None:
        done.append("begun")
        if len(done) == 1:
            raise KeyboardInterrupt

    known = decisions
    known.later(interrupted_once)
    known.later(lambda: done.append("later"))
    with pytest.raises(KeyboardInterrupt), decisions, known.lock:
        pass
    assert not decisions.lock.locked()
    assert done == ["begun"]
    with decisions as known, known.lock:
        assert done == ["begun"]
    assert done == ["begun", "begun", "later"]


def test_a_callback_that_fails_is_not_repeated() -> None:
    decisions, done = Decisions((0, 1)), []

    def fail() -> None:
        done.append("failed")
        raise ValueError

    decisions.later(fail)
    decisions.later(lambda: done.append("later"))
    with pytest.raises(ValueError), decisions:
        pass
    with decisions:
        pass
    assert done == ["failed", "later"]


def test_nobody_else_has_effects_of_what_is_still_being_decided() -> None:
    decisions, done = Decisions((0, 1)), []
    other = threading.Thread(target=lambda: decisions.__exit__(None, None, None))
    with decisions as known, known.lock:
        known.later(lambda: done.append(known.lock.locked()))
        other.start()
        other.join(0.05)
        assert done == []
    other.join()
    assert done in ([False], [False, False])


def test_messages_leave_before_callbacks_run() -> None:
    """A callback may wait for an answer to them."""
    decisions, order = Decisions((0, 1)), []
    decisions.on_put = lambda: order.append("sent")
    with decisions as known, known.lock:
        known.later(lambda: order.append("called back"))
        known.do([Accept((1, 1), 7)])
    assert order == ["sent", "called back"]
