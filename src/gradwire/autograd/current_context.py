"""Which context the current code runs in.

A context variable, so it goes where Python carries those: into asyncio tasks, into callbacks of futures (`gradwire.rpc`
runs them in the context in which they were added), and into threads started inside. Python does the last by itself only from
3.14 on, with ``thread_inherit_context``; before that, entering a context for the first time teaches
`threading.Thread.start` to do the same. Threads of torch's engine see it by `carried`.
"""

from __future__ import annotations

import contextvars
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from gradwire._torch import Carried

_current: contextvars.ContextVar[int] = contextvars.ContextVar("gradwire_autograd_context", default=0)
# The thread that began the run of the engine at hand, and its context: for the threads of devices.
_of_run: Carried[tuple[int, int]] = Carried("gradwire.autograd.context", (0, 0))
_lock = threading.Lock()  # guards _carries_over
_carries_over = bool(getattr(sys.flags, "thread_inherit_context", False))


def current_context_id() -> int:
    """The context that the current code runs in, or 0."""
    return _current.get() or _context_of_run()


def _context_of_run() -> int:
    thread, context_id = _of_run.get()
    # The thread that began the run has its own variable, and may serve a call without a context while it waits.
    return context_id if thread != threading.get_ident() else 0


def enter(context_id: int) -> contextvars.Token[int]:
    """Makes a context the current one."""
    return _current.set(context_id)


def leave(token: contextvars.Token[int]) -> None:
    """Goes back to the context before; in another thread or task than `enter`, to none."""
    try:
        _current.reset(token)
    except ValueError:
        _current.set(0)


class inside:
    """Runs a block in a context."""

    __slots__ = ("_context_id", "_token")

    def __init__(self, context_id: int) -> None:
        self._context_id = context_id

    def __enter__(self) -> None:
        self._token = _current.set(self._context_id)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


class carried:
    """Takes the current context along into the threads of devices, for a run of torch's engine."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = _of_run.set((threading.get_ident(), current_context_id()))

    def __exit__(self, *_: object) -> None:
        _of_run.set(self._before)


def carry_into_threads() -> None:
    """From now on, a thread started inside a context runs in it."""
    global _carries_over
    with _lock:
        if _carries_over:
            return
        _carries_over = True
        start = threading.Thread.start

        @functools.wraps(start)
        def start_inside(self: threading.Thread) -> Any:
            # Only threads started inside a context: all others are left alone.
            if _current.get():
                self.run = _inside(self, contextvars.copy_context())  # type: ignore[method-assign]
            return start(self)

        threading.Thread.start = start_inside  # type: ignore[method-assign]


def _inside(thread: threading.Thread, surroundings: contextvars.Context) -> Callable[[], None]:
    """What a thread runs, with the context variables of the code that starts it."""
    run = thread.run

    def run_inside() -> None:
        del thread.run  # the thread would hold itself
        surroundings.run(run)

    return run_inside
