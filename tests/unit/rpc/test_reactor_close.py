"""Closing a reactor ends every thread, also when one of them takes the wake-up call that was meant for another."""

from __future__ import annotations

import threading

from gradwire.rpc.reactor import Reactor
from gradwire.testing import wait_until


def _threads(name: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(f"gradwire-{name}-")]


def test_a_task_that_takes_the_wake_up_call_passes_it_on() -> None:
    """The task runs while `close` rings: its thread has read the event, and the others never see it."""
    reactor = Reactor("swallow", 4, lambda now: float("inf"))
    reactor.start()
    running, go_on = threading.Event(), threading.Event()

    def task() -> None:
        running.set()
        assert go_on.wait(10)

    reactor.run_soon(task)
    assert running.wait(10)
    wake = reactor._wake
    is_first = True

    def wake_in_vain() -> None:
        """The first call is swallowed, as by a thread that reads the event for its task."""
        nonlocal is_first
        if is_first:
            is_first = False
            go_on.set()
        else:
            wake()

    reactor._wake = wake_in_vain  # type: ignore[method-assign]
    reactor.close()
    assert not is_first
    wait_until(lambda: not _threads("swallow"), 20.0, "that no thread is left")
