"""Defer Ctrl-C while the main thread runs code of gradwire, so that the rest of gradwire never meets it.

Python raises `KeyboardInterrupt` between any two steps of the main thread: after a lock was taken and before that is noted,
in the middle of a frame, inside a finalizer. While this process has a worker, the handler here decides instead. It looks at
the frames of the main thread, the innermost first:

- a function marked with `interruptible` (it runs user code, or it is one of the waits below): the interrupt is raised;
- any other function of gradwire: the interrupt is *deferred*, and tried again every few milliseconds;
- neither: the program's own code is running, and the interrupt is raised.

So code of gradwire does nothing about Ctrl-C and pays nothing for it, as long as it waits with the functions of this module.
A second Ctrl-C while one is deferred is raised wherever it comes.

The handler is installed only where Python's own is in place. Where a program has a handler of its own, `KeyboardInterrupt`
can come anywhere; the one rule then is that a connection whose frame was cut off is closed. A program's handler that calls
the one it replaced is called again for each attempt. `asyncio.run` leaves this handler in place, so Ctrl-C ends the loop
with `KeyboardInterrupt`, as it did before Python 3.11.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import CodeType, FrameType
from typing import Any, Final, NoReturn, Protocol, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")

_RETRY_EVERY_S: Final = 0.005
_SLICE_S: Final = 0.05  # how long the main thread waits for a condition before it looks for a deferred interrupt
_OURS: Final = "gradwire."
_OUTSIDE: Final = ("gradwire.testing.", "gradwire.compat.__main__.")  # these call the program, not the other way round

_interruptible: set[CodeType] = set()
_users: list[None] = []  # one item for each open worker; no lock, because a finalizer may change it in mid-change
_deferred_since: float | None = None  # when a Ctrl-C came that is still to be raised
_is_retry = False  # whether `_retry` has sent a signal that the handler has not seen yet
_main_thread = threading.main_thread().ident


def interruptible(function: _F) -> _F:
    """Let Ctrl-C through in what this function calls; it must be safe to leave at any point."""
    if hasattr(function, "__wrapped__"):
        raise TypeError(f"apply @interruptible to {function.__qualname__} before any other decorator")
    _interruptible.add(function.__code__)
    return function


def install() -> None:
    """Put the handler in place for one more worker. Each call is undone by one of `uninstall`."""
    _users.append(None)
    ensure_installed()


def uninstall() -> None:
    """Put Python's own handler back after the last worker, if this one is still in place.

    In another thread than the main one, and while an interrupt is deferred, the handler stays until it has raised one.
    """
    with contextlib.suppress(IndexError):
        _users.pop()
    if not _users and _deferred_since is None and _thread.get_ident() == _main_thread:
        _restore_default()
        if _deferred_since is not None:  # it came in the lines above
            signal.signal(signal.SIGINT, _on_interrupt)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Have the handler in place inside the block: for what starts before the first worker, or ends after the last."""
    install()
    try:
        yield
    finally:
        uninstall()


def ensure_installed() -> None:
    """Install the handler again where it is gone: notebooks put Python's own back before each cell."""
    global _deferred_since, _is_retry
    if _users and signal.getsignal(signal.SIGINT) is signal.default_int_handler and _thread.get_ident() == _main_thread:
        # What came before the handler was taken out is not raised in another cell.
        _deferred_since, _is_retry = None, False
        signal.signal(signal.SIGINT, _on_interrupt)


def deliver() -> None:
    """Raise a Ctrl-C that was deferred, if this is the main thread."""
    if _deferred_since is not None and _thread.get_ident() == _main_thread:
        _raise()


class Lock(Protocol):
    """What `acquire` takes: a lock of `threading`."""

    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool: ...


@interruptible
def acquire(lock: Lock, timeout: float = -1) -> bool:
    """Take a lock that serves as a signal: it need not be released if Ctrl-C ends this wait."""
    return lock.acquire(True, timeout)


@interruptible
def poll(poller: Any, timeout: float) -> Any:
    """Poll ``poller``, an object of `select`; what it returns is lost if Ctrl-C ends the wait."""
    return poller.poll(timeout)


@interruptible
def get(queue: SimpleQueue[_T], timeout: float) -> _T:
    """Take from a queue or raise `queue.Empty`; what was taken is lost if Ctrl-C ends the wait."""
    return queue.get(timeout=timeout)


@interruptible
def sleep(seconds: float) -> None:
    time.sleep(seconds)


def wait(condition: threading.Condition | threading.Event, timeout: float | None = None) -> bool:
    """Wait for a condition, whose lock is held, or an event; return False if the time was over first.

    Ctrl-C is noticed between short waits: inside of one it would leave the lock of a condition in an unknown state.
    """
    if _thread.get_ident() != _main_thread:
        return condition.wait(timeout)
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    while True:
        deliver()
        left = deadline - time.monotonic()
        if condition.wait(max(0.0, min(_SLICE_S, left))):
            return True
        if left <= _SLICE_S:
            return False


def wait_for(condition: threading.Condition, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
    """Wait until ``predicate`` holds, which `condition` guards and announces; return False if the time was over first."""
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    while not predicate():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        wait(condition, None if timeout is None else left)
    return True


def _on_interrupt(_number: int, frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt`, or defer it while the main thread is in code of gradwire.

    A signal that arrives in here finds this frame, which is gradwire's, and is deferred or, as the second one, raised.
    """
    global _deferred_since, _is_retry
    is_retry, _is_retry = _is_retry, False
    if is_retry and _deferred_since is None:
        return  # raised in the meantime
    is_second = not is_retry and _deferred_since is not None
    if is_second or not _is_protected(frame):
        _raise()
    if _deferred_since is None:
        _deferred_since = since = time.monotonic()
        with contextlib.suppress(RuntimeError):  # no thread can be started: the next wait or Ctrl-C raises it
            # Not `threading.Thread`: the code that was interrupted may hold its locks.
            _thread.start_new_thread(_retry, (since, signal.getsignal(signal.SIGINT)))


def _is_protected(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in _interruptible:
            return False
        name = f"{frame.f_globals.get('__name__')}."
        if name.startswith(_OURS) and not name.startswith(_OUTSIDE):
            return True
        frame = frame.f_back
    return False


def _raise() -> NoReturn:
    global _deferred_since
    _deferred_since = None
    if not _users:
        _restore_default()
    raise KeyboardInterrupt


def _restore_default() -> None:
    if signal.getsignal(signal.SIGINT) is _on_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _retry(since: float, handler: object) -> None:
    """Have the main thread's handler look again until the interrupt `since` is raised. Runs in a thread of its own.

    The handler is the one that was in place then: a program's may have called this module's, and is called again.
    """
    global _deferred_since, _is_retry
    time.sleep(_RETRY_EVERY_S)
    while _deferred_since == since:
        if signal.getsignal(signal.SIGINT) is not handler:
            _deferred_since = None  # the program took the handler out, and with it what it had deferred
        elif not _is_retry:  # one at a time: the handler would take a second one for the user's
            _is_retry = True
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(_RETRY_EVERY_S)


def _after_fork() -> None:
    global _deferred_since, _is_retry, _main_thread
    _users.clear()
    _deferred_since, _is_retry = None, False
    _main_thread = threading.main_thread().ident
    _restore_default()


os.register_at_fork(after_in_child=_after_fork)
