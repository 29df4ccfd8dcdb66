"""How many user functions run at once: events in, requests to run out. No threads inside.

`num_worker_threads` bounds the functions that run, not those that wait: a function that waits for another call gives its
slot back until the answer is there, so nested calls of any depth end, with one slot too. Waiting that cannot be seen (a
lock, a C++ future) is told from work by the processor time that it does not use: `on_stall` then grants further slots,
twice as many each time.
"""

from __future__ import annotations

import collections
from typing import Generic, TypeVar

R = TypeVar("R")


class Slots(Generic[R]):
    """Decides which request may run now.

    Args:
        limit: Functions that run at once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_running = 0
        self._num_waiting = 0
        self._queue: collections.deque[R] = collections.deque()
        self._num_finished = 0
        self._finished_at_last_look = -1
        self._num_granted = 1

    def __repr__(self) -> str:
        return (
            f"<Slots {self._num_running}/{self._limit} running, {self._num_waiting} waiting, {len(self._queue)} queued>"
        )

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def on_request(self, request: R) -> bool:
        """A request arrived: True if it may run now; else it is queued."""
        if self._num_running < self._limit:
            self._num_running += 1
            return True
        self._queue.append(request)
        return False

    def on_finished(self) -> R | None:
        """A function ended: the request that gets its slot."""
        self._num_running -= 1
        self._num_finished += 1
        return self._next() if self._queue else None

    def on_wait(self) -> R | None:
        """A running function begins to wait for a call: the request that gets its slot."""
        self._num_running -= 1
        self._num_waiting += 1
        return self._next()

    def on_wait_over(self) -> None:
        """It goes on. It does not queue again, so for a moment more than `limit` may run."""
        self._num_waiting -= 1
        self._num_running += 1

    def on_cancelled(self, request: R) -> bool:
        """A request is no longer wanted: True if it was still queued."""
        try:
            self._queue.remove(request)
        except ValueError:
            return False
        return True

    def on_stall(self, is_working: bool = False) -> list[R]:
        """Called now and then: requests to run beyond the limit if nothing has moved since the last look.

        Args:
            is_working: Whether a function that runs has used the processor; then it is at work and not waiting.
        """
        has_progressed = is_working or self._num_finished != self._finished_at_last_look
        self._finished_at_last_look = self._num_finished
        if has_progressed or not self._queue:
            self._num_granted = 1
            return []
        granted = [self._queue.popleft() for _ in range(min(self._num_granted, len(self._queue)))]
        self._num_granted *= 2
        self._num_running += len(granted)
        return granted

    def _next(self) -> R | None:
        if self._queue and self._num_running < self._limit:
            self._num_running += 1
            return self._queue.popleft()
        return None
