"""How many user functions run at once: events in, requests to run out. No threads inside.

`num_worker_threads` bounds the functions that run, not those that wait: a function that waits for another call gives its
slot back until the answer is there, so nested calls of any depth end, with one slot too. Waiting that cannot be seen (a
lock, a C++ future) is told from work by the processor time that it does not use: `on_stall` then grants further slots,
twice as many each time.

A worker that does not serve yet holds requests back: they join the queue, in their order, when it starts to serve.
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
        self._held: collections.deque[R] = collections.deque()  # empty while the worker serves
        self._is_serving = True
        self._num_finished = 0
        self._finished_at_last_look = -1
        self._num_granted = 1

    def __repr__(self) -> str:
        return (
            f"<Slots {self._num_running}/{self._limit} running, {self._num_waiting} waiting, {len(self._queue)} queued"
            f"{'' if self._is_serving else f', {len(self._held)} held back'}>"
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

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def is_serving(self) -> bool:
        return self._is_serving

    def on_hold(self) -> None:
        """The worker does not serve yet: requests of others that arrive are held back."""
        self._is_serving = False

    def on_serve(self) -> list[R]:
        """The worker serves from now on: the requests to run at once."""
        self._is_serving = True
        self._queue.extend(self._held)
        self._held.clear()
        granted = []
        while (request := self._next()) is not None:
            granted.append(request)
        return granted

    def on_request(self, request: R, *, is_own: bool = False) -> bool:
        """A request arrived: True if it may run now; else it is queued, or held back unless it is the worker's own."""
        if not (self._is_serving or is_own):
            self._held.append(request)
            return False
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
        """A request is no longer wanted: True if it was still queued or held back."""
        for requests in (self._queue, self._held):
            if request in requests:
                requests.remove(request)
                return True
        return False

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
