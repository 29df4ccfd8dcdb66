"""A wake-up call that Ctrl-C cannot break.

`threading.Event` guards itself with a lock that it takes in Python code. A signal that hits there leaves the lock taken,
and whoever sets the event next waits for ever. A bell is one lock and nothing else: each of its operations is one step.
"""

from __future__ import annotations

import threading


class Bell:
    """Wakes one waiting thread; rung while nobody waits, it lets the next one pass. Rung twice is rung once."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()  # taken: nobody has rung; released by any thread
        self._lock.acquire()

    def ring(self) -> None:
        """Wakes whoever waits."""
        try:  # noqa: SIM105  (it is on the way of every call, and suppress() costs more than the release)
            self._lock.release()
        except RuntimeError:  # it was rung already
            pass

    def wait(self, timeout_s: float) -> bool:
        """Whether it was rung within that time."""
        return self._lock.acquire(timeout=max(0.0, timeout_s))
