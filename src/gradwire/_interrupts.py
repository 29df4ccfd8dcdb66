"""Defer Ctrl-C while the main thread runs gradwire code, so that the rest of gradwire need not handle it.

Python can raise `KeyboardInterrupt` between any two steps of the main thread: just after a lock is acquired, in the middle
of a frame, inside a finalizer. While this process has a worker, the handler here decides instead. It inspects the stack of
the main thread, innermost frame first:

- a function marked with `interruptible` (it runs user code, or is one of the waits below): the interrupt is raised;
- any other gradwire function: the interrupt is *deferred* and retried every few milliseconds;
- a ``__del__`` or a callback of the garbage collector: it is deferred as well, because Python drops exceptions of these
  (if it waits in gradwire, the wait is ended and the interrupt is lost);
- none of them: the program's own code is running, and the interrupt is raised.

So gradwire code ignores Ctrl-C at no cost, as long as it waits with the functions of this module. A second Ctrl-C while one
is deferred is raised at once, unless it arrives together with a retry: the system makes one signal of both.

The handler is installed only if Python's default handler is in place. If a program has its own, `KeyboardInterrupt` can
occur anywhere, and the only guarantee is that a connection with a partly sent frame is closed. If the program's handler
calls the one it replaced, it is called again for each retry. `asyncio.run` leaves this handler in place, so Ctrl-C ends the
loop with `KeyboardInterrupt`, as before Python 3.11.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
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
_SLICE_S: Final = 0.05  # how long the main thread waits for a condition before it checks for a deferred interrupt
_OURS: Final = "gradwire."
_OUTSIDE: Final = ("gradwire.testing.", "gradwire.compat.__main__.")  # these call the program, not the other way round

_interruptible: set[CodeType] = set()
_users: list[None] = []  # one item for each open worker; no lock, because a finalizer may run while it is being changed
_deferred_since: float | None = None  # when the deferred Ctrl-C arrived
_is_retry = False  # whether `_retry` has sent a signal that the handler has not seen yet
_main_thread = threading.main_thread().ident


def interruptible(function: _F) -> _F:
    """Allow Ctrl-C to be raised in the code this function calls, which must be safe to leave at any point."""
    if hasattr(function, "__wrapped__"):
        raise TypeError(f"apply @interruptible to {function.__qualname__} before any other decorator")
    _interruptible.add(function.__code__)
    return function


def install() -> None:
    """Install the handler for one more worker. Pair each call with one of `uninstall`."""
    _users.append(None)
    ensure_installed()


def uninstall() -> None:
    """Restore Python's default handler after the last worker, if this one is still in place.

    If called outside the main thread, or while an interrupt is deferred, the handler stays until it has raised one.
    """
    with contextlib.suppress(IndexError):
        _users.pop()
    if not _users and _deferred_since is None and _thread.get_ident() == _main_thread:
        _restore_default()
        if _deferred_since is not None:  # it arrived during the lines above
            signal.signal(signal.SIGINT, _on_interrupt)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Keep the handler installed inside the block, before the first worker starts or after the last one ends."""
    install()
    try:
        yield
    finally:
        uninstall()


def ensure_installed() -> None:
    """Reinstall the handler if it was removed: notebooks restore Python's default before each cell."""
    global _deferred_since, _is_retry
    if _users and signal.getsignal(signal.SIGINT) is signal.default_int_handler and _thread.get_ident() == _main_thread:
        # An interrupt that arrived before the handler was removed must not be raised in another cell.
        _deferred_since, _is_retry = None, False
        signal.signal(signal.SIGINT, _on_interrupt)


def deliver() -> None:
    """Raise a deferred Ctrl-C if this is the main thread."""
    if _deferred_since is not None and _thread.get_ident() == _main_thread:
        _raise()


class Lock(Protocol):
    """A lock of `threading`, as taken by `acquire`."""

    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool: ...


@interruptible
def acquire(lock: Lock, timeout: float = -1) -> bool:
    """Acquire a lock used as a signal: it need not be released if Ctrl-C ends this wait."""
    return lock.acquire(True, timeout)


@interruptible
def poll(poller: Any, timeout: float) -> Any:
    """Poll ``poller``, an object of `select`; its result is lost if Ctrl-C ends the wait."""
    return poller.poll(timeout)


@interruptible
def get(queue: SimpleQueue[_T], timeout: float) -> _T:
    """Take an item from a queue or raise `queue.Empty`; the item is lost if Ctrl-C ends the wait."""
    return queue.get(timeout=timeout)


@interruptible
def sleep(seconds: float) -> None:
    time.sleep(seconds)


def wait(condition: threading.Condition | threading.Event, timeout: float | None = None) -> bool:
    """Wait for a condition, whose lock is held, or an event; return False on timeout.

    Ctrl-C is checked between short waits: inside one, it would leave the lock of a condition in an unknown state.
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
    """Wait until ``predicate``, guarded and signalled by `condition`, holds; return False on timeout."""
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    while not predicate():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        wait(condition, None if timeout is None else left)
    return True


def _on_interrupt(_number: int, frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt`, or defer it while the main thread is in gradwire code.

    A signal that arrives during this function finds its frame, which is gradwire code: it is deferred or, if second, raised.
    """
    global _deferred_since, _is_retry
    is_retry, _is_retry = _is_retry, False
    if is_retry and _deferred_since is None:  # raised in the meantime
        if not _users:
            _restore_default()
        return
    is_second = not is_retry and _deferred_since is not None
    if is_second or not _is_protected(frame):
        _raise()
    if _deferred_since is None:
        _deferred_since = since = time.monotonic()
        with contextlib.suppress(RuntimeError):  # no thread can be started: the next wait or Ctrl-C raises it
            # Not `threading.Thread`: the code that was interrupted may hold its locks.
            _thread.start_new_thread(_retry, (since, signal.getsignal(signal.SIGINT)))


def _is_protected(frame: FrameType | None) -> bool:
    of_collector = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        if frame.f_code in _interruptible:
            return False
        if frame.f_code.co_name == "__del__" or frame.f_code in of_collector:
            return True
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
    # A retry that is on its way would be a second interrupt for Python's handler: this one takes it, and then restores.
    if signal.getsignal(signal.SIGINT) is _on_interrupt and not _is_retry:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _retry(since: float, handler: object) -> None:
    """Make the main thread's handler try again until the interrupt `since` is raised. Runs in its own thread.

    `handler` is the one in place at that time: a program's handler that called this module's is called again.
    """
    global _deferred_since, _is_retry
    time.sleep(_RETRY_EVERY_S)
    while _deferred_since == since:
        if signal.getsignal(signal.SIGINT) is not handler:
            _deferred_since = None  # the program replaced the handler, which drops the deferred interrupt
        elif not _is_retry:  # one at a time: the handler would mistake a second one for the user's
            _is_retry = True
            if _deferred_since == since:  # looked at after the line above, as `_raise` and `_restore_default` do
                os.kill(os.getpid(), signal.SIGINT)
            else:
                _is_retry = False
        time.sleep(_RETRY_EVERY_S)


def _after_fork() -> None:
    global _deferred_since, _is_retry, _main_thread
    _users.clear()
    _deferred_since, _is_retry = None, False
    _main_thread = threading.main_thread().ident
    _restore_default()


os.register_at_fork(after_in_child=_after_fork)
