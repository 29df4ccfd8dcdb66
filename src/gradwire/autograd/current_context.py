"""Which context, and which run of torch's engine, the current code belongs to.

The context is a context variable, so it goes where Python carries those: into asyncio tasks, into callbacks of futures
(`gradwire.rpc` runs them in the context in which they were added), and into threads started inside. Python does the last by
itself only from 3.14 on, with ``thread_inherit_context``; before that, `carry_into_threads` patches
`threading.Thread.start`, which is the only place that sees both the starting and the
started thread. Threads of torch's engine find the context through the run that they work for.
"""

from __future__ import annotations

import contextvars
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from gradwire._torch import Carried
from gradwire.observe import log

current_context: contextvars.ContextVar[int] = contextvars.ContextVar("gradwire_autograd_context", default=0)
"""The context that code of this thread or task is in, or 0. Threads of torch's engine need `current_context_id`."""


class LocalRun(Protocol):
    """A run of the local engine, as the nodes of messages see it."""

    thread: int  # that began it
    ambient_id: int  # the context that thread was in, or 0

    # A recv was reached; what a send hands on; block until a message for a send has come.
    def fire(self, context_id: int, message_id: int, gradients: Sequence[torch.Tensor | None]) -> None: ...
    def gradients_of(self, message_id: int) -> Sequence[torch.Tensor | None]: ...
    def wait_settled(self, message_id: int) -> None: ...


current_run: Carried[LocalRun | None] = Carried("gradwire.autograd.run", None)
"""The current run of torch's engine, in all its threads."""


def current_context_id() -> int:
    """Return the context that the current code runs in, or 0."""
    context_id = current_context.get()
    if not context_id:
        run = current_run.get()
        # The thread that began the run has its own variable, and may serve a call without a context while it waits.
        if run is not None and run.thread != threading.get_ident():
            return run.ambient_id
    return context_id


log.current_context_id = current_context_id


def begin_run(run: LocalRun) -> LocalRun | None:
    """Make nodes report to a run, in any thread of the engine; return the previous run."""
    run.thread = threading.get_ident()
    run.ambient_id = current_context_id()
    return current_run.set(run)


def leave(token: contextvars.Token[int]) -> None:
    """Return to the previous context; to none, in another thread or task than the one that entered it."""
    try:
        current_context.reset(token)
    except ValueError:
        current_context.set(0)


@functools.cache
def carry_into_threads() -> None:
    """Run threads that are started inside a context in that context; called when the first worker is created."""
    if getattr(sys.flags, "thread_inherit_context", False):
        return
    start = threading.Thread.start

    @functools.wraps(start)
    def start_inside(self: threading.Thread) -> Any:
        # Only threads started inside a context; all others stay as they are.
        if current_context.get():
            self.run = _inside(self, contextvars.copy_context())  # type: ignore[method-assign]
        return start(self)

    threading.Thread.start = start_inside  # type: ignore[method-assign]


def _inside(thread: threading.Thread, surroundings: contextvars.Context) -> Callable[[], None]:
    """Return a `run` method with the context variables of the code that starts the thread."""
    run = thread.run

    def run_inside() -> None:
        del thread.run  # the thread would hold itself
        surroundings.run(run)

    return run_inside
