"""A reader-writer lock on parameters that contexts share: calls use them, steps change them, never both at once.

A call reads a group of parameters, or everything if it is not known what it will use, from its start to its end, except
while it waits for something else (another call, its turn): then it reads nothing, so waits cannot form a cycle. A wait
that gradwire cannot see is detected by its effect: a call that has used no processor time for two seconds counts as
waiting.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Collection, Container, Iterable
from typing import Any, Literal, Protocol, get_args

import torch

from gradwire import _interrupts
from gradwire.errors import ConfigurationError, RpcTimeout
from gradwire.rpc.connection import current_request, while_waiting
from gradwire.rpc.server import busyness


class UsesParameters(Protocol):
    """An autograd context, as this package sees it."""

    turns: set[Group]

    @property
    def context_id(self) -> int: ...
    @property
    def released(self) -> str | None: ...  # where; None while it is open
    def call_at_end(self, callback: Callable[[], None]) -> None: ...
    def check_alive(self) -> None: ...  # raises `UnknownContext` if it was released


class Turns:
    """The state of one group."""

    __slots__ = ("_line", "holder", "num_changers", "num_pending", "num_readers")

    def __init__(self) -> None:
        self.num_readers = 0  # calls that read now
        self.num_changers = 0  # running steps
        self.num_pending = 0  # steps that wait for the readers
        self.holder = 0  # the context whose turn it is, or 0
        self._line: collections.deque[int] = collections.deque()

    def __repr__(self) -> str:
        state = f"{self.num_readers} readers, {self.num_changers} changers"
        return f"<Turns {state}, {self.num_pending} steps wait, holder {self.holder}, {self.num_in_line} in line>"

    def can_read(self, is_patient: bool) -> bool:
        """Return whether a call may start to read; a patient one lets waiting steps go first."""
        return not self.num_changers and not (is_patient and self.num_pending)

    @property
    def num_in_line(self) -> int:
        return len(self._line)

    def ask_turn(self, context_id: int) -> bool:
        """Return whether it is that context's turn; if not, add it to the queue."""
        if self.holder == context_id:
            return True
        if context_id not in self._line:
            self._line.append(context_id)
        if self.holder or self._line[0] != context_id:
            return False
        self._line.popleft()
        self.holder = context_id
        return True

    def leave_line(self, context_id: int) -> None:
        if context_id in self._line:
            self._line.remove(context_id)

    def end_turn(self, context_id: int) -> bool:
        """Take a context out of the queue; return whether it was its turn."""
        self.leave_line(context_id)
        was_holder = self.holder == context_id
        if was_holder:
            self.holder = 0
        return was_holder


class Change:
    """A step on some groups: all of them at once, so that no step holds one and waits for another."""

    def __init__(self, groups: Collection[Turns], everything: Turns) -> None:
        self._groups = [*groups, everything]
        self._own = groups
        self._everything = everything  # the group of calls that may use any parameter
        self._is_waiting = self._has_begun = False

    def wait(self) -> None:
        self._is_waiting = True
        for group in self._groups:
            group.num_pending += 1

    def stop_waiting(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            for group in self._groups:
                group.num_pending -= 1

    def begin(self) -> bool:
        if self._everything.num_readers:
            return False
        for group in self._own:
            if group.num_readers or group.num_changers:
                return False
        for group in self._groups:
            group.num_changers += 1
        self._has_begun = True
        return True

    def end(self) -> None:
        """End the step, whether it has started or still waits."""
        if self._has_begun:
            self._has_begun = False
            for group in self._groups:
                group.num_changers -= 1
        self.stop_waiting()


Mode = Literal["snapshot", "serialize", "hogwild"]

_MODES = get_args(Mode)

lock = threading.RLock()  # guards the tables below, all Turns and all users; reentrant, because `find_all` guards
changed = threading.Condition(lock)  # notified when a call or a step may continue
guarded_params: dict[int, Guarded] = {}  # by id of the parameter
_by_memory: dict[int, list[Guarded]] = {}  # by address of its memory
_gone: collections.deque[Guarded] = collections.deque()  # filled by finalizers


class Group:
    __slots__ = ("__weakref__", "mode", "turns")

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.turns = Turns()

    def __repr__(self) -> str:
        return f"<Group {self.mode}: {self.turns!r}>"


EVERYTHING = Group("snapshot")
"""The group that calls read which may use any parameter."""


class Cell:
    """Memory that a parameter uses or has used."""

    __slots__ = ("_last_version", "_ref")

    def __init__(self, param: weakref.ref[torch.Tensor]) -> None:
        self._ref = param
        self._last_version: int | None = None

    @property
    def version(self) -> int | None:
        """Number of in-place changes of the values; None if they never changed and can no longer change."""
        if self._last_version is not None:
            return self._last_version
        param = self._ref()
        return param._version if param is not None else None

    def leave(self, version: int) -> None:
        """Freeze the version: the parameter has moved to other memory."""
        self._last_version = version


class Guarded:
    """One parameter that contexts share."""

    __slots__ = ("_address", "_ref", "cell", "group", "users")

    def __init__(self, param: torch.Tensor, group: Group) -> None:
        self.group = group
        # Contexts on this worker that have used its memory and have not stepped since. The list is replaced, never
        # changed, so it may be looked at without the lock.
        self.users: list[weakref.ref[UsesParameters]] = []
        self._ref = weakref.ref(param, functools.partial(_forget, id(param)))
        self.cell = Cell(self._ref)
        self._address = 0
        self.locate(param)

    def locate(self, param: torch.Tensor) -> None:
        now = address_of(param)
        if now == self._address:
            return
        self.leave()
        self._address = now
        if now:
            _by_memory.setdefault(now, []).append(self)

    def leave(self) -> None:
        """Forget the parameter's memory, because it has moved or the parameter was freed."""
        known = _by_memory.get(self._address)
        if known is not None and self in known:
            known.remove(self)
            if not known:
                del _by_memory[self._address]
        self._address = 0

    def cell_at(self, address: int) -> Cell | None:
        """Return the cell at an address, if the parameter's memory is still there."""
        cell, param = self.cell, self._ref()
        return cell if param is not None and address_of(param) == address else None

    def is_of(self, param: torch.Tensor) -> bool:
        return self._ref() is param

    def users_except(self, own: Container[int]) -> list[weakref.ref[UsesParameters]]:
        return [
            user
            for user in self.users
            if (context := user()) is not None and context.released is None and context.context_id not in own
        ]

    def move(self, param: torch.Tensor) -> None:
        """Give the parameter new memory with the same values; the old memory does not change."""
        before = self.cell
        # First, so that a thread that finds the old address has found the old cell.
        param.data = param.data.clone()
        with lock:
            before.leave(param._version)
            self.cell = Cell(self._ref)
            self.users = []  # their values are safe in the old memory
            self.locate(param)


def check_mode(mode: str) -> None:
    if mode not in _MODES:
        raise ConfigurationError(f"concurrency must be one of {', '.join(_MODES)}, not {mode!r}")


def guard(params: Iterable[torch.Tensor], mode: Mode) -> Group:
    """Set how contexts share parameters of this worker; return the group that they belong to.

    A parameter keeps the mode that was set first. Only weak references to parameters are kept.
    """
    check_mode(mode)
    group = Group(mode)
    with lock:
        while _gone:
            _gone.popleft().leave()
        for param in params:
            known = guarded_params.get(id(param))
            if known is None or not known.is_of(param):
                guarded_params[id(param)] = Guarded(param, group)
            else:
                known.locate(param)
                group = known.group if known.group.mode == mode else group
    return group


def find(param: torch.Tensor) -> Guarded | None:
    known = guarded_params.get(id(param))
    return known if known is not None and known.is_of(param) else None


def find_all(params: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, Guarded]]:
    """Return the guards of parameters; those without one get one, as ``"snapshot"``."""
    todo = list(params)
    with lock:
        found = [(param, item) for param in todo if (item := find(param)) is not None]
        if len(found) != len(todo):
            guard(todo, "snapshot")
            return find_all(todo)
        for param, item in found:
            item.locate(param)
    return found


def find_by_memory(tensor: torch.Tensor) -> list[tuple[Guarded, Cell]]:
    """Return the parameters whose memory a tensor uses; more than one if they share one buffer."""
    address = address_of(tensor)
    known = _by_memory.get(address)
    if known is None:
        return []
    return [(item, cell) for item in list(known) if (cell := item.cell_at(address)) is not None]


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has no plain storage."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, or a lazy module's before its first call
        return 0


def _forget(key: int, ref: weakref.ref[Any]) -> None:
    """Note that a parameter was freed. Runs in finalizers, so it takes no lock: single operations only."""
    known = guarded_params.get(key)
    if known is not None and known._ref is ref:
        guarded_params.pop(key, None)
        _gone.append(known)


_WAIT_S = 60.0
_SLICE_S = 0.2
_MARGIN_S = 0.5
_PATIENCE_S = 1.0  # how long a call lets steps go first which wait for other calls
IDLE_S = 2.0


class _ServedCall(threading.local):
    call: ReadingCall | None = None  # the call that the current thread serves, if it uses shared parameters


_served = _ServedCall()
_readers: set[ReadingCall] = set()  # calls that read something now; guarded by `lock`


class ReadingCall:
    """One call that uses shared parameters: in which context, and which groups it reads now."""

    __slots__ = ("_groups", "_outer", "_request", "_thread", "_ticks", "_wanted", "context")

    def __init__(self, context: UsesParameters | None) -> None:
        self.context = context  # None outside contexts
        self._wanted: set[Group] = set()
        self._groups: set[Group] = set()  # guarded by `lock`
        self._request = current_request()
        self._thread = threading.get_native_id()
        self._ticks = (0, 0.0)  # how long it had been busy at the last check, and when that was

    def __enter__(self) -> ReadingCall:
        self._outer, _served.call = _served.call, self
        if self._request is not None:
            self._request.held = self
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()
        _served.call = self._outer
        if self._request is not None:
            self._request.held = None

    @property
    def is_current(self) -> bool:
        """Whether the thread serves its request: a thread that waits may serve another one meanwhile."""
        return self._request is current_request()

    def read(self, group: Group) -> None:
        """Keep steps from changing the group until the call waits or ends."""
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
                raise late("another trainer's step on these parameters has not finished")
            _interrupts.wait(changed, _SLICE_S)

    def let_go(self) -> None:
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
        """Read again the groups that it read before. If a step takes too long for that, the next use raises."""
        with contextlib.suppress(RpcTimeout):
            for group in self._wanted:
                self.read(group)

    def pause(self) -> None:
        """Stop reading, because the call itself makes a step, which would wait for it."""
        self.let_go()
        if self._request is not None:
            self._request.held = None

    def go_on(self) -> None:
        if self._request is not None:
            self._request.held = self
        if self.is_current:
            self.take_back()

    def has_slept(self, now: float) -> bool:
        """Return whether its thread has not been busy since the first check, long enough to count as waiting."""
        found = busyness(self._thread)
        if not self._ticks[1] or found.is_ready or found.ticks != self._ticks[0]:
            self._ticks = (found.ticks, now)
        return now - self._ticks[1] >= IDLE_S


def call_of_thread() -> ReadingCall | None:
    call = _served.call
    return call if call is not None and call.is_current else None


def begin(change: Change) -> ReadingCall | None:
    """Wait until no call reads and no step changes the groups; start the change, and return the call for `end`."""
    call = _served.call
    if call is not None:
        call.pause()  # it reads nothing until `end`
    with lock:
        if change.begin():
            return call
    with contextlib.ExitStack() as stack:
        stack.callback(end, change, call)
        _wait_begun(change)
        stack.pop_all()
    return call


def end(change: Change, call: ReadingCall | None) -> None:
    with lock:
        change.end()
        changed.notify_all()
    if call is not None:
        call.go_on()


def _wait_begun(change: Change) -> None:
    deadline, next_look = deadline_here(), 0.0
    with while_waiting(), changed:
        change.wait()
        try:
            while not change.begin():
                if time.monotonic() >= deadline:
                    raise late("calls that use these parameters, or another step, have not finished")
                _interrupts.wait(changed, _SLICE_S)
                now = time.monotonic()
                if now >= next_look:  # not each time that something changes: it asks the kernel about every reader
                    next_look = now + _SLICE_S
                    for call in [call for call in _readers if call.has_slept(now)]:
                        call.let_go()
        finally:
            change.stop_waiting()
            changed.notify_all()


def deadline_here() -> float:
    """Return until when the current thread may wait: a little less than its caller, which must get the reason."""
    request, now = current_request(), time.monotonic()
    if request is None or request.deadline == float("inf"):
        return now + _WAIT_S
    return request.deadline - min(_MARGIN_S, (request.deadline - now) / 4)


def late(reason: str) -> RpcTimeout:
    request = current_request()
    worker = request.source.server.agent.info.name if request is not None else ""
    what = f"{request.function} on worker {worker}" if request is not None else "an operation of this process"
    return RpcTimeout(f"{what} timed out waiting: {reason} (phase: run)", worker, "run")
