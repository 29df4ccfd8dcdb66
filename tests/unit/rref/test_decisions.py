"""What is done when the lock is released: in which order, and what Ctrl-C leaves of it."""

from __future__ import annotations

import pytest

from gradwire.rref._actions import Accept
from gradwire.rref.decisions import Decisions


def interrupt() -> None:
    raise KeyboardInterrupt


def test_what_ctrl_c_keeps_from_being_done_is_done_next_time() -> None:
    decisions, done = Decisions((0, 1)), []
    known = decisions
    known.later(interrupt)
    known.later(lambda: done.append("later"))
    with pytest.raises(KeyboardInterrupt), decisions, known.lock:
        pass
    assert not decisions.lock.locked()
    assert done == []
    with decisions as known, known.lock:
        assert done == []
    assert done == ["later"]


def test_messages_leave_before_callbacks_run() -> None:
    """A callback may wait for an answer to them."""
    decisions, order = Decisions((0, 1)), []
    decisions.on_put = lambda: order.append("sent")
    with decisions as known, known.lock:
        known.later(lambda: order.append("called back"))
        known.do([Accept((1, 1), 7)])
    assert order == ["sent", "called back"]
