"""Private memory that is used again, for tensors that arrive through sockets.

Whoever frees the last view of a buffer runs a callback, in any thread and between any two instructions, also inside
`BufferPool.allocate`. It appends to a deque, which is one atomic step, and only *tries* to take the lock. Whoever holds
the lock looks at the deque again after letting go of it, so nothing that was freed is left lying.

Ctrl-C may hit between any two calls, too. ``with lock`` stands that; a lock that is only tried is taken inside of ``try``
and released in one step that may fail, so that no moment is left in which it is held and nobody will release it.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

from gradwire.config import KIB
from gradwire.transports._memory import Buffer, bytes_type, map_private, round_up


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """What a `BufferPool` holds: memory in use by others, and idle memory by number and bytes."""

    num_lent: int
    num_idle: int
    bytes_idle: int
    num_created: int


class BufferPool:
    """Private memory for what arrives through sockets, used again when the tensors in it are freed.

    Args:
        limit_bytes: Idle memory that is kept; more is given back to the system.
        smallest: Below this a plain ``bytearray`` is cheaper.
    """

    def __init__(self, limit_bytes: int, smallest: int = 256 * KIB) -> None:
        self._limit_bytes = limit_bytes
        self._smallest = smallest
        # Guards _idle and _num_created; callbacks only ever try to take it. It knows its owner: see `_settle`.
        self._lock: Any = threading.RLock()
        self._idle: list[mmap.mmap] = []  # the most recently used one is last
        self._num_created = 0
        self._freed: deque[mmap.mmap] = deque()  # from callbacks, for whoever holds the lock next
        self._loans: dict[int, _PoolLoan] = {}  # single operations only, no lock

    def allocate(self, num_bytes: int) -> Buffer:
        """A writable buffer of exactly `num_bytes`; what is in it is left from before.

        Raises:
            MemoryError: The system has no such memory.
        """
        if num_bytes < self._smallest:
            return bytearray(num_bytes)
        capacity = round_up(num_bytes)
        with self._lock:
            self._take_freed()
            memory = self._take_idle(capacity)
            self._num_created += memory is None
        self._settle()
        memory = memory or map_private(capacity)
        buffer = bytes_type(num_bytes).from_buffer(memory)
        loan = _PoolLoan(buffer, _on_buffer_freed)
        loan.pool, loan.memory = self, memory
        self._loans[id(loan)] = loan
        return buffer

    def close(self) -> None:
        """Give idle memory back, and from now on all that is freed. Buffers in use stay valid. Idempotent."""
        with self._lock:
            self._limit_bytes = 0
            self._take_freed()
        self._settle()

    def statistics(self) -> PoolStatistics:
        """What the pool holds now."""
        self._settle()
        with self._lock:
            return PoolStatistics(len(self._loans), len(self._idle), sum(map(len, self._idle)), self._num_created)

    def on_freed(self, loan: _PoolLoan) -> None:
        """A buffer was freed; called by the garbage collector, from anywhere."""
        self._loans.pop(id(loan), None)
        self._freed.append(loan.memory)
        self._settle()

    def _settle(self) -> None:
        """Take in what was freed, unless somebody holds the lock: they come by here after they let go of it."""
        while self._freed and not self._lock._is_owned():
            try:
                if not self._lock.acquire(blocking=False):
                    return
                self._take_freed()
            finally:
                try:  # noqa: SIM105  (a call of suppress() would be one more place for Ctrl-C)
                    self._lock.release()
                except RuntimeError:  # not taken
                    pass

    def _take_freed(self) -> None:
        while self._freed:  # callbacks fill it, only the holder of the lock empties it
            self._idle.append(self._freed.popleft())
        num_dropped, num_bytes = 0, sum(map(len, self._idle))  # counted each time: Ctrl-C cannot make it wrong
        while num_bytes > self._limit_bytes:
            num_bytes -= len(self._idle[num_dropped])
            num_dropped += 1
        del self._idle[:num_dropped]

    def _take_idle(self, capacity: int) -> mmap.mmap | None:
        for index in range(len(self._idle) - 1, -1, -1):
            if len(self._idle[index]) == capacity:
                return self._idle.pop(index)
        return None


class _PoolLoan(weakref.ref[Any]):
    """Tells a pool that a buffer is gone; kept by the pool."""

    __slots__ = ("memory", "pool")
    memory: mmap.mmap
    pool: BufferPool


def _on_buffer_freed(loan: _PoolLoan) -> None:
    loan.pool.on_freed(loan)
