"""Calls in progress, as seen by their caller. No threads, sockets or clocks inside.

    PENDING --answer--> DONE
       |----deadline--> EXPIRING (the callee was asked for its progress) --answer, or no answer--> DONE
       |----cancel, worker lost--> DONE

Every call completes exactly once: only the thread that removes it from the table (`pop`, one dictionary operation) may
complete it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from gradwire.errors import ConfigurationError
from gradwire.rpc.codec import TransferStatus

if TYPE_CHECKING:
    from gradwire.rpc.call_events import CallTrace
    from gradwire.rpc.reader import Reader

_NO_DEADLINE: Final = float("inf")

PHASE_TEXT: Final = {
    "connect": "it could not be reached",
    "send": "its connection accepted no more data, or the request had not arrived",
    "held": "it is not serving calls yet, and holds them until it calls gradwire.rpc.start_serving()",
    "queue": "the call was waiting for a free worker thread there",
    "run": "the function was still running there",
    "reply": "the function had returned and its result was on the way",
    "unknown": "it did not report the call's progress (stopped, holding the GIL, or disconnected)",
}


class PendingCall(msgspec.Struct, eq=False):
    """One call, from the moment it is made until it has a result or an error.

    Attributes:
        on_done: Runs in the thread that completes the call; must not block.
        future: Receives the result.
        is_over: The reply has arrived; callbacks may still have to run.
        is_done: The call has completed, and its callbacks have run.
        is_expiring: The deadline has passed, and the callee was asked for its progress.
        is_reported: It was logged, because it takes long.
        waiters: Locks used as signals, one for each waiting thread; released when the call is done.
        table: The calls in progress on its connection, including this one until it completes.
        transfer_status: Whether the contents of the call are in transit, if a tracker needs to know.
        on_device: The tensors of the result that arrived on devices; see `gradwire.wire.devices.record_use`.
        trace: Tells what happens to it; None if nothing is observed.
    """

    call_id: int
    worker: str
    function: str
    started: float
    deadline: float
    on_done: Callable[[PendingCall], None] | None = None
    future: Any = None
    is_done: bool = False
    is_over: bool = False
    is_expiring: bool = False
    is_reported: bool = False
    value: Any = None
    error: Exception | None = None
    waiters: list[Any] = []
    table: CallTable | None = None
    transfer_status: TransferStatus | None = None
    on_device: Sequence[torch.Tensor] = ()
    trace: CallTrace | None = None

    def __repr__(self) -> str:
        state = "done" if self.is_done else "expiring" if self.is_expiring else "pending"
        return f"<call {self.call_id} {self.function} on {self.worker} {state}>"

    @property
    def is_control(self) -> bool:
        """Whether it is an operation of gradwire itself."""
        return self.function.startswith("~")

    @property
    def what(self) -> str:
        """A description for messages."""
        operation = f"internal operation {self.function[1:]}" if self.is_control else f"call to {self.function}"
        return f"{operation} on worker {self.worker}"

    def wake(self) -> None:
        """Wake the threads that wait; call it when `is_done` is set."""
        for waiter in list(self.waiters):
            waiter.release()

    def timeout_text(self, phase: str, now: float) -> str:
        return (
            f"RPC ran for more than set timeout: {self.what} timed out after {now - self.started:.3g} s: "
            f"{PHASE_TEXT[phase]} (phase: {phase}). Pass a larger timeout, or check what that worker is doing"
        )


class CallTable(dict[int, PendingCall]):
    """The calls in progress on one connection, by id. The thread that pops one may complete it.

    Attributes:
        reader: Reads their replies, for waiting threads; None for calls of a worker to itself.
    """

    reader: Reader | None = None

    def has_older_than(self, when: float) -> bool:
        return any(call.started < when for call in list(self.values()))

    def expire(self, now: float) -> tuple[list[PendingCall], float]:
        """Return calls whose deadline has passed, each once, and the earliest deadline of the others."""
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
    """Return a timeout as calls carry it: 0 for none."""
    if timeout_s == _NO_DEADLINE:
        return 0.0
    if not timeout_s >= 0:
        raise ConfigurationError(f"a timeout must be 0 (none) or a positive number of seconds, not {timeout_s}")
    return timeout_s
