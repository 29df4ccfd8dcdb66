"""Memory from the system: sealed memfds for slots, private mappings for the pool, and advice to the kernel."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import stat
import struct
import sys
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.config import KIB, MIB
from gradwire.errors import DecodeError

PAGE = 4096
"""Bytes before a slot's data; the first one is its state."""

FREE, LENT, RETIRED, FILLING, OFFERED = 0, 1, 2, 3, 4
"""States of a slot. The sender offers, fills, lends and retires it; the receiver frees it, the first time by mapping it."""

_NUMBER = struct.Struct("<Q")  # of a slot, in its first page
_NUMBER_AT = 8
_MAX_NUMBER = 2**63 - 1
_MAP_FAILED = ctypes.c_void_p(-1).value

Buffer = Any
"""A writable object with the buffer protocol, for which `typing` has no name before Python 3.12."""

# Linux's numbers; other systems lack the names, and this module has to be importable there.
_F_ADD_SEALS, _F_GET_SEALS, _SEALS = 1033, 1034, 0x1 | 0x2 | 0x4  # SEAL, SHRINK, GROW
_SEAL_EXEC = 0x20  # some systems add it to every memfd
_MADV_REMOVE, _MADV_POPULATE_WRITE, _MADV_HUGEPAGE = 9, 23, 14
_HUGE_FROM = 4 * MIB  # huge pages halve the cost of the first touch, and need some size to be found


@functools.cache
def is_available() -> bool:
    """Whether this system has sealed memfds that can be mapped; without them tensors travel through the socket."""
    try:
        fd = make_memfd(0, PAGE)
    except OSError:
        return False
    try:
        Slot(0, PAGE, fd)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


class Slot:
    """One mapped memfd. The mapping ends with the last tensor or buffer that refers to `memory`."""

    __slots__ = ("address", "capacity", "last_lent", "loan", "memory", "num_touched", "process_id", "slot_id", "state")

    def __init__(self, slot_id: int, capacity: int, fd: int) -> None:
        self.slot_id, self.capacity = slot_id, capacity
        self.memory = _map_shared(fd, PAGE + capacity)
        self.address = self.memory.data_ptr() + PAGE
        self.state = ctypes.c_uint8.from_address(self.address - PAGE)
        self.loan: SlotLoan | None = None
        self.last_lent = 0.0
        self.num_touched = 0  # data bytes whose pages are there, as far as the sender has made them
        self.process_id = os.getpid()

    def borrow(self, num_bytes: int) -> Buffer:
        """The slot's first bytes. When they are garbage collected, the slot is free."""
        buffer = bytes_type(num_bytes).from_address(self.address)
        buffer._memory = self.memory  # the mapping lives as long as the buffer
        self.loan = loan = SlotLoan(buffer, _on_slot_freed)
        loan.slot = self
        return buffer

    def touch(self, num_bytes: int) -> None:
        """Make the pages of the first bytes, so that writing to them cannot fail.

        Raises:
            OSError: There is no memory.
        """
        populate(self.address - PAGE, PAGE + num_bytes)
        self.num_touched = num_bytes

    def retire(self) -> None:
        """Free the pages and tell the receiver that the slot will not be lent again."""
        _advise(self.address, self.capacity, _MADV_REMOVE)
        self.state.value = RETIRED


class SlotLoan(weakref.ref[Any]):
    """Tells a slot that its buffer is gone; kept by the slot."""

    __slots__ = ("slot",)
    slot: Slot


# What it needs is bound as defaults, because module globals may be gone when the interpreter ends.
def _on_slot_freed(loan: SlotLoan, getpid: Any = os.getpid, free: int = FREE) -> None:
    slot = loan.slot
    if slot.process_id == getpid():  # a forked child frees its copy of the tensor; the parent still uses the slot
        slot.loan = None  # first, so that a slot the sender sees as free can be borrowed
        slot.state.value = free


@functools.lru_cache(maxsize=256)
def bytes_type(num_bytes: int) -> Any:
    """The ctypes array of so many bytes. Cached: each is a class, and only the cycle collector frees classes."""
    return ctypes.c_ubyte * num_bytes


def round_up(num_bytes: int) -> int:
    """The capacity for so many bytes: a power of two, and no less than a page."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes > PAGE else PAGE


def make_memfd(slot_id: int, capacity: int) -> int:
    """A memfd for a slot of that number, on offer, that nobody can shrink, grow or unseal.

    Raises:
        OSError: No descriptor or no memory is left, or the system has no memfds.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memfd_create")
    fd = os.memfd_create("gradwire", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, PAGE + capacity)
        os.pwrite(fd, bytes([OFFERED]), 0)
        os.pwrite(fd, _NUMBER.pack(slot_id), _NUMBER_AT)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def check_memfd(fd: int) -> tuple[int, int]:
    """Return number and capacity of a slot; refuse everything but a sealed memfd of this user.

    Raises:
        DecodeError: It is something else, or has a size that no slot has.
    """
    # Seals come first: any other file system may stall in fstat. No other seals: read-only memory cannot be mapped.
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError as error:  # a file, a socket, a pipe
        raise DecodeError(f"a file descriptor arrived that is not shared memory: {error}") from error
    if seals & ~_SEAL_EXEC != _SEALS:
        raise DecodeError("a file descriptor arrived that does not have the seals of a slot")
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise DecodeError("a file descriptor arrived that is not shared memory of this user")
    capacity = status.st_size - PAGE
    if capacity < PAGE or capacity & (capacity - 1):
        raise DecodeError(f"a slot of {capacity} bytes arrived, which is not a power of two from {PAGE}")
    slot_id: int = _NUMBER.unpack(os.pread(fd, _NUMBER.size, _NUMBER_AT))[0]
    if slot_id > _MAX_NUMBER:
        raise DecodeError(f"a slot of number {slot_id} arrived")
    return slot_id, capacity


class _Mapping:
    """Ends a mapping with the last object that refers to it."""

    __slots__ = ("_address", "_num_bytes", "_unmap")

    def __init__(self, address: int, num_bytes: int) -> None:
        self._address, self._num_bytes = address, num_bytes
        self._unmap = _libc().munmap  # module globals may be gone when the interpreter ends

    def __del__(self) -> None:
        self._unmap(self._address, self._num_bytes)


def _map_shared(fd: int, num_bytes: int) -> torch.Tensor:
    """Map a file. Unlike `mmap.mmap`, keep no descriptor while the mapping lives; unlike `torch.from_file`, nor on failure.

    Raises:
        OSError: There is no address space or no memory for it.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc().mmap(None, num_bytes, protection, mmap.MAP_SHARED, fd, 0)
    if address is None or address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    mapping = _Mapping(address, num_bytes)
    buffer = bytes_type(num_bytes).from_address(address)
    buffer._mapping = mapping
    with torch.inference_mode(False):  # the slot outlives the mode of the call that happens to make it
        return torch.frombuffer(buffer, dtype=torch.uint8)


def populate(address: int, num_bytes: int) -> None:
    """Make pages in one call instead of a fault for each. No memory is then an error here, and not a signal later.

    Raises:
        OSError: There is no memory.
    """
    code = _advise(address, num_bytes, _MADV_POPULATE_WRITE)
    if code in (errno.ENOMEM, errno.EFAULT):  # anything else: a kernel before 5.14, pages come as they are touched
        raise OSError(code, os.strerror(code))


def map_private(capacity: int) -> mmap.mmap:
    """Anonymous memory, in huge pages where the system has them.

    Raises:
        MemoryError: The system has no such memory.
    """
    try:
        memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for a buffer of {capacity} bytes") from error
    if capacity >= _HUGE_FROM:
        _advise(ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)), capacity, _MADV_HUGEPAGE)
    return memory


def _advise(address: int, num_bytes: int, advice: int) -> int:
    """`madvise`; returns the error number. Linux only, where the numbers mean what they say."""
    if not sys.platform.startswith("linux"):
        return errno.ENOSYS
    return ctypes.get_errno() if _libc().madvise(address, num_bytes, advice) else 0


@functools.cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    library.mmap.restype = ctypes.c_void_p
    return library


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
