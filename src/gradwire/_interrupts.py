"""Ctrl-C at one door, so that the rest of gradwire never meets it.

Python raises `KeyboardInterrupt` between any two steps of the main thread: after a lock was taken and before it is noted, in
the middle of a frame, inside a finalizer. While this process has a worker, the handler here decides instead. It looks at the
frames of the main thread, the innermost first:

- a function marked with `interruptible` (it runs user code, or it is one of the waits below): the interrupt is raised;
- any other function of gradwire: the interrupt is *deferred*, and tried again every few milliseconds;
- neither: the program's own code is running, and the interrupt is raised.

So code of gradwire does nothing about Ctrl-C and pays nothing for it, as long as it waits with the functions of this module.
A second Ctrl-C within two seconds always gets through.

The handler is installed only where Python's own is in place. Where a program has a handler of its own, `KeyboardInterrupt`
can come anywhere; the one rule then is that a connection whose frame was cut off is closed.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Final, Protocol, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

_RETRY_EVERY_S: Final = 0.005
_INSIST_WITHIN_S: Final = 2.0  # a second Ctrl-C within this time is raised wherever it comes
_SLICE_S: Final = 0.05  # how long the main thread waits for a condition before it looks for a deferred interrupt
_OURS: Final = "gradwire."
_OUTSIDE: Final = (
    "gradwire.testing.",
    "gradwire.compat.__main__",
)  # these call the program, not the other way round

_interruptible: set[CodeType] = set()
_num_users = 0  # how many workers of this process rely on the handler; changed under `_lock`
_lock = threading.Lock()  # guards `_num_users` and installing
_deferred_since: float | None = None  # when a Ctrl-C came that is still to be raised; written by the main thread alone
_is_retry = False  # whether the signal on its way is one of `_retry`
_main_thread = threading.main_thread().ident


def interruptible(function: _F) -> _F:
    """Let Ctrl-C through in what this function calls; it must be safe to leave at any point."""
    _interruptible.add(function.__code__)
    return function


def install() -> None:
    """Put the handler in place for one more worker. Each call is undone by one of `uninstall`."""
    global _num_users
    with _lock:
        _num_users += 1
    ensure_installed()


def uninstall() -> None:
    """Put Python's own handler back after the last worker, if this one is still in place."""
    global _num_users
    with _lock:
        _num_users = max(0, _num_users - 1)
        is_last = not _num_users
    if is_last and _thread.get_ident() == _main_thread and signal.getsignal(signal.SIGINT) is _on_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        deliver()


def ensure_installed() -> None:
    """Install the handler again where it is gone: notebooks put Python's own back before each cell."""
    if (
        _num_users
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        and _thread.get_ident() == _main_thread
    ):
        signal.signal(signal.SIGINT, _on_interrupt)


def deliver() -> None:
    """Raise a Ctrl-C that was deferred, if this is the main thread."""
    global _deferred_since
    if _deferred_since is not None and _thread.get_ident() == _main_thread:
        _deferred_since = None
        raise KeyboardInterrupt


class Lock(Protocol):
    """What `acquire` takes: a lock of `threading`."""

    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool:
        """Take it."""
        ...


@interruptible
def acquire(lock: Lock, timeout: float = -1) -> bool:
    """Take a lock that serves as a signal: one that nobody has to release if this wait is given up."""
    return lock.acquire(True, timeout)


@interruptible
def poll(poller: Any, timeout: float) -> Any:
    """Poll ``poller``, an object of `select`; what it says is lost if the wait is given up."""
    return poller.poll(timeout)


@interruptible
def sleep(seconds: float) -> None:
    """Sleep, and let Ctrl-C end it."""
    time.sleep(seconds)


def wait(condition: threading.Condition | threading.Event, timeout: float | None = None) -> bool:
    """Wait for a condition, whose lock is held, or an event; return False if the time was over first.

    Ctrl-C is noticed between short waits: inside of one it would leave the lock of a condition in an unknown state.
    """
    if _thread.get_ident() != _main_thread:
        return condition.wait(timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = _SLICE_S if deadline is None else min(_SLICE_S, deadline - time.monotonic())
        if left <= 0:
            return False
        if condition.wait(left):
            return True
        deliver()


def _on_interrupt(_number: int, frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt`, or defer it while the main thread is in code of gradwire."""
    global _deferred_since, _is_retry
    is_retry, _is_retry = _is_retry, False
    since = _deferred_since
    if is_retry and since is None:
        return  # raised in the meantime
    insists = not is_retry and since is not None and time.monotonic() - since < _INSIST_WITHIN_S
    if not insists and _is_protected(frame):
        if not is_retry:
            _deferred_since = time.monotonic()
        if since is None:
            _thread.start_new_thread(
                _retry, ()
            )  # not `threading.Thread`: its locks may be taken by the code interrupted
        return
    _deferred_since = None
    raise KeyboardInterrupt


def _is_protected(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in _interruptible:
            return False
        name = frame.f_globals.get("__name__") or ""
        if name.startswith(_OURS) and not name.startswith(_OUTSIDE):
            return True
        frame = frame.f_back
    return False


def _retry() -> None:
    """Let the main thread's handler look again until the interrupt is raised. Runs in a thread of its own."""
    global _is_retry
    while True:
        time.sleep(_RETRY_EVERY_S)
        if _deferred_since is None or _main_thread is None:
            return
        _is_retry = True
        try:
            signal.pthread_kill(_main_thread, signal.SIGINT)
        except OSError:  # the main thread has ended
            return


def _after_fork() -> None:
    global _num_users, _deferred_since, _is_retry, _main_thread, _lock
    _lock = threading.Lock()
    _num_users, _deferred_since, _is_retry = 0, None, False
    _main_thread = threading.main_thread().ident
    if signal.getsignal(signal.SIGINT) is _on_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


os.register_at_fork(after_in_child=_after_fork)
