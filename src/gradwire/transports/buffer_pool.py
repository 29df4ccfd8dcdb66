"""Pool of private memory for tensors received through sockets, reused when the tensors in it are freed.

Copying into memory that was touched before is ten times as fast as into fresh memory. A weak reference to a buffer detects
that it was freed. Its callback may run in any thread, between any two instructions, even while that thread holds the pool's
lock, so it never waits for the lock.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

from gradwire.config import KIB, MIB
from gradwire.transports.shared_memory import advise, bytes_type, round_up

_MADV_HUGEPAGE = 14  # Linux's number
_HUGE_FROM = 4 * MIB  # huge pages halve the cost of the first touch, and need some size to be found


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Statistics of a `BufferPool`: buffers in use, and number and bytes of idle ones."""

    num_lent: int
    num_idle: int
    bytes_idle: int
    num_created: int


class BufferPool:
    """Pool of buffers for one process.

    Args:
        limit_bytes: Idle memory that is kept; the rest is returned to the system.
        smallest: Size below which a plain ``bytearray`` is cheaper.
    """

    def __init__(self, limit_bytes: int, smallest: int = 256 * KIB) -> None:
        self._limit_bytes = limit_bytes
        self._smallest = smallest
        self._lock = threading.Lock()  # guards _idle and _num_created; callbacks only ever try to take it
        self._idle: list[mmap.mmap] = []  # the most recently used one is last
        self._num_created = 0
        self._freed: deque[mmap.mmap] = deque()  # from callbacks, for the thread that takes the lock next
        self._loans: dict[int, _PoolLoan] = {}  # single operations only, no lock

    def allocate(self, num_bytes: int) -> Any:
        """Return a writable buffer of exactly `num_bytes` with arbitrary contents."""
        if num_bytes < self._smallest:
            return bytearray(num_bytes)
        capacity = round_up(num_bytes)
        with self._lock:
            self._take_freed()
            memory = self._take_idle(capacity)
            self._num_created += memory is None
        self._settle()
        memory = memory or _map_private(capacity)
        buffer = bytes_type(num_bytes).from_buffer(memory)
        loan = _PoolLoan(buffer, _on_buffer_freed)
        loan.pool, loan.memory = self, memory
        self._loans[id(loan)] = loan
        return buffer

    def allocate_pinned(self, num_bytes: int) -> Any:
        """Return a buffer for a tensor that goes on to a device: pinned, where this process has an accelerator."""
        from gradwire.wire import device_copies

        memory = device_copies.allocate_pinned(num_bytes)
        if memory is None:
            return self.allocate(num_bytes)
        buffer = bytes_type(num_bytes).from_address(memory.data_ptr())
        buffer._memory = memory  # goes back to torch's allocator with the buffer
        return buffer

    def close(self) -> None:
        """Return idle memory to the system, and freed memory from now on. Buffers in use stay valid. Idempotent."""
        with self._lock:
            self._limit_bytes = 0
            self._take_freed()
        self._settle()

    def statistics(self) -> PoolStatistics:
        self._settle()
        with self._lock:
            return PoolStatistics(len(self._loans), len(self._idle), sum(map(len, self._idle)), self._num_created)

    def on_freed(self, loan: _PoolLoan) -> None:
        """Note that a buffer was freed; called by the garbage collector, from anywhere."""
        self._loans.pop(id(loan), None)
        self._freed.append(loan.memory)
        self._settle()

    def _settle(self) -> None:
        """Collect freed buffers, unless the lock is held: its holder calls this after releasing it."""
        while self._freed and self._lock.acquire(blocking=False):
            try:
                self._take_freed()
            finally:
                self._lock.release()

    def _take_freed(self) -> None:
        while self._freed:  # callbacks fill it, only the holder of the lock empties it
            self._idle.append(self._freed.popleft())
        num_dropped, num_bytes = 0, sum(map(len, self._idle))
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
    """Weak reference that notifies the pool when a buffer is freed; kept by the pool."""

    __slots__ = ("memory", "pool")
    memory: mmap.mmap
    pool: BufferPool


def _on_buffer_freed(loan: _PoolLoan) -> None:
    loan.pool.on_freed(loan)


def _map_private(capacity: int) -> mmap.mmap:
    """Map anonymous memory, in huge pages if available."""
    try:
        memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot allocate a buffer of {capacity} bytes") from error
    if capacity >= _HUGE_FROM:
        advise(ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)), capacity, _MADV_HUGEPAGE)
    return memory
