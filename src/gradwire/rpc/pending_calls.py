"""Calls under way, as their caller sees them. No threads, sockets or clocks inside.

    PENDING --answer--> DONE
       |----deadline--> EXPIRING (the callee was asked how far it got) --its word, or silence--> DONE
       |----cancel, worker lost--> DONE

Every call ends exactly once: whoever takes it out of the table (`pop`, one dictionary operation) may finish it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any, Final

import msgspec

from gradwire.errors import ConfigurationError
from gradwire.rpc.codec import Passage

_NO_DEADLINE: Final = float("inf")

PHASE_TEXT: Final = {
    "connect": "it could not be reached",
    "send": "its connection took no more bytes, or the request had not arrived",
    "held": "it does not serve calls yet: it holds them back until it calls gradwire.rpc.start_serving()",
    "queue": "the call waited for a free worker thread there",
    "run": "the function was still running there",
    "reply": "the function had ended and its result was on the way",
    "unknown": "it did not answer when asked how far the call got (stopped, busy holding the GIL, or cut off)",
}


class PendingCall(msgspec.Struct, eq=False):
    """One call, from the moment it is made until it has a result or an error."""

    call_id: int
    worker: str
    function: str
    started: float
    deadline: float
    on_done: Callable[[PendingCall], None] | None = None  # runs in the thread that finishes the call
    future: Any = None
    is_done: bool = False
    is_answered: bool = False  # the answer is here; only its callbacks are still to run
    is_expiring: bool = False
    value: Any = None
    error: Exception | None = None
    waiter: Any = None  # a lock that the finishing thread releases, made by a thread that waits
    table: CallTable | None = None
    passage: Passage | None = None  # of what it carries, if somebody wonders

    def __repr__(self) -> str:
        state = "done" if self.is_done else "expiring" if self.is_expiring else "pending"
        return f"<call {self.call_id} {self.function} on {self.worker} {state}>"

    def again(self) -> PendingCall:
        """The same call with another id, for another attempt to send it."""
        again = PendingCall(new_call_id(), self.worker, self.function, self.started, self.deadline, self.on_done)
        again.future = self.future
        if self.passage is not None:
            again.embark(self.passage)
        return again

    def embark(self, passage: Passage) -> None:
        """It carries what somebody wonders about."""
        self.passage, passage.call_id = passage, self.call_id

    def disembark(self) -> None:
        """It has ended: what it carries has arrived by now, or nobody wants it there."""
        if self.passage is not None and self.passage.call_id == self.call_id:
            self.passage.call_id = 0

    def mark_done(self) -> None:
        """It has its result or error: wakes the thread that waits."""
        self.is_done = True
        if self.waiter is not None:
            with contextlib.suppress(RuntimeError):  # released already
                self.waiter.release()

    def timeout_text(self, phase: str, now: float) -> str:
        """What a timeout in that phase should say."""
        return (
            f"RPC ran for more than its time: call of {self.function} on worker {self.worker} timed out after "
            f"{now - self.started:.3g} s: "
            f"{PHASE_TEXT[phase]} (phase: {phase}). Pass a larger timeout, or look at what that worker does"
        )


class CallHolder(msgspec.Struct):
    """Knows a call from before it is sent (Ctrl-C may hit before whoever starts it could return it), and what is special.

    Attributes:
        call: The call, as it was last sent.
        notes: Travel with it, beside those of the interceptors.
        on_done: Runs in the thread that ends it; must not wait for anything.
        is_watched: Whether the answer is read as soon as it is there; else by whoever waits for it or for another answer
            of that worker, or by the clock within a second or two.
    """

    call: PendingCall | None = None
    notes: dict[str, Any] | None = None
    on_done: Callable[[PendingCall], None] | None = None
    is_watched: bool = False


class CallTable(dict[int, PendingCall]):
    """The calls under way on one connection, by id. Whoever pops one may finish it."""

    reader: Any = None  # who can read the answers, for threads that wait; opaque here

    def add(self, call: PendingCall) -> None:
        """A call is about to be sent."""
        call.table = self
        self[call.call_id] = call

    def has_older_than(self, when: float) -> bool:
        """Whether a call is under way that was made before that time."""
        return any(call.started < when for call in list(self.values()))

    def expire(self, now: float) -> tuple[list[PendingCall], float]:
        """Calls whose deadline has passed, each named once, and the earliest deadline of the others."""
        expired, earliest = [], _NO_DEADLINE
        for call in list(self.values()):
            if call.is_expiring:
                continue
            if call.deadline <= now:
                call.is_expiring = True
                expired.append(call)
            elif call.deadline < earliest:
                earliest = call.deadline
        return expired, earliest


new_call_id: Callable[[], int] = itertools.count(1).__next__  # atomic, and unique in this process


def check_timeout(timeout_s: float) -> float:
    """A timeout as calls carry it: 0 for none.

    Raises:
        ConfigurationError: It is negative or not a number.
    """
    if timeout_s == _NO_DEADLINE:
        return 0.0
    if not timeout_s >= 0:
        raise ConfigurationError(f"a timeout must be 0 (none) or a positive number of seconds, not {timeout_s}")
    return timeout_s
