"""Calls that use shared parameters, and steps that change them: neither while the other is under way.

A call reads a group of parameters, or everything if nobody knows what it will use, from its beginning to its end, except
while it waits for something else (another call, its turn): then it reads nothing, so no circle of waiting can close. Waiting
that gradwire cannot see is found by its effect: a call that has used no processor for two seconds is taken to wait.
"""

from __future__ import annotations

import contextlib
import threading
import time

from gradwire.autograd._turns import Change
from gradwire.autograd.context import DistAutogradContext
from gradwire.autograd.guards import EVERYTHING, Group, changed, lock
from gradwire.errors import RpcTimeout
from gradwire.rpc.incoming import current_request, while_waiting
from gradwire.rpc.serving import cpu_ticks

_WAIT_S = 60.0
_SLICE_S = 0.2
_MARGIN_S = 0.5
_PATIENCE_S = 1.0  # how long a call lets steps go first that wait for other calls
IDLE_S = 2.0


class _Local(threading.local):
    call: Call | None = None  # what the current thread serves, if it has to do with shared parameters


_local = _Local()
_readers: set[Call] = set()  # calls that read something now; guarded by `lock`


class Call:
    """One call that uses shared parameters: in which context, and which groups it reads now.

    Args:
        context: None outside of contexts.
    """

    __slots__ = ("_groups", "_outer", "_request", "_thread", "_ticks", "_wanted", "context")

    def __init__(self, context: DistAutogradContext | None) -> None:
        self.context = context
        self._wanted: set[Group] = set()
        self._groups: set[Group] = set()  # guarded by `lock`
        self._request = current_request()
        self._thread = threading.get_native_id()
        self._ticks = (0, 0.0)  # processor time when it was looked at, and when that was

    def __enter__(self) -> Call:
        self._outer, _local.call = _local.call, self
        if self._request is not None:
            self._request.held = self
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()
        _local.call = self._outer
        if self._request is not None:
            self._request.held = None

    @property
    def is_current(self) -> bool:
        """Whether its request is what the thread serves: one that waits may serve another meanwhile."""
        return self._request is current_request()

    def read(self, group: Group) -> None:
        """From now on, until the call waits or ends, nobody changes the group.

        Raises:
            RpcTimeout: A step takes longer than this call may.
        """
        if group in self._groups or EVERYTHING in self._groups:
            return
        with lock:
            if not group.turns.can_read(is_patient=not self._groups):
                self._wait_readable(group)
            group.turns.num_readers += 1
            self._groups.add(group)
            self._wanted.add(group)
            self._ticks = (0, 0.0)
            _readers.add(self)

    def _wait_readable(self, group: Group) -> None:
        began, deadline = time.monotonic(), deadline_here()
        while not group.turns.can_read(is_patient=not self._groups and time.monotonic() < began + _PATIENCE_S):
            if time.monotonic() >= deadline:
                raise late("another trainer's step on these parameters has not ended")
            changed.wait(_SLICE_S)

    def let_go(self) -> None:
        """Steps may go on."""
        if not self._groups:
            return
        with lock:
            for group in self._groups:
                group.turns.num_readers -= 1
                if group.turns.num_pending:
                    changed.notify_all()
            self._groups.clear()
            _readers.discard(self)

    def take_back(self) -> None:
        """Reads what it read before. If a step takes too long for that, what the call uses next will tell."""
        with contextlib.suppress(RpcTimeout):
            for group in self._wanted:
                self.read(group)

    def pause(self) -> None:
        """The call itself makes a step, which would wait for it otherwise."""
        self.let_go()
        if self._request is not None:
            self._request.held = None

    def go_on(self) -> None:
        """That step is over."""
        if self._request is not None:
            self._request.held = self
        if self.is_current:
            self.take_back()

    def has_slept(self, now: float) -> bool:
        """Whether its thread has used no processor for a while, since it was first looked at."""
        ticks = cpu_ticks(self._thread)
        if not self._ticks[1] or ticks != self._ticks[0]:
            self._ticks = (ticks, now)
        return now - self._ticks[1] >= IDLE_S


def call_of_thread() -> Call | None:
    """The call that this thread serves, if it is known to have to do with shared parameters."""
    call = _local.call
    return call if call is not None and call.is_current else None


def begin(change: Change) -> Call | None:
    """Waits until nobody reads or changes the groups, and begins to change them.

    Returns:
        The call that this thread serves, for `end`: it reads nothing meanwhile.

    Raises:
        RpcTimeout: Calls that use the groups, or another step, have not ended in time.
    """
    call = _local.call
    if call is not None:
        call.pause()
    try:
        with lock:
            if change.begin():
                return call
        _wait_begun(change)
    except BaseException:
        end(change, call)
        raise
    return call


def end(change: Change, call: Call | None) -> None:
    """The change is over."""
    try:
        with lock:
            change.end()
            changed.notify_all()
    finally:
        if call is not None:
            call.go_on()


def _wait_begun(change: Change) -> None:
    try:
        deadline = deadline_here()
        with while_waiting(), changed:
            change.wait()
            while not change.begin():
                if time.monotonic() >= deadline:
                    raise late("calls that use these parameters, or another step, have not ended")
                changed.wait(_SLICE_S)
                _let_sleepers_go()
    finally:
        with lock:
            change.stop_waiting()
            changed.notify_all()


def _let_sleepers_go() -> None:
    now = time.monotonic()
    for call in [call for call in _readers if call.has_slept(now)]:
        call.let_go()


def deadline_here() -> float:
    """Until when the current thread may wait: a little less than its caller, who is to be told why."""
    request, now = current_request(), time.monotonic()
    if request is None or request.deadline == float("inf"):
        return now + _WAIT_S
    return request.deadline - min(_MARGIN_S, (request.deadline - now) / 4)


def late(reason: str) -> RpcTimeout:
    """The error of somebody who has waited in vain."""
    request = current_request()
    worker = request.source.server.agent.info.name if request is not None else ""
    what = f"{request.function} on worker {worker}" if request is not None else "a step of this process"
    return RpcTimeout(f"{what} waited in vain: {reason} (phase: run)", worker, "run")
