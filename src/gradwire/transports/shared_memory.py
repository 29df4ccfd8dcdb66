"""Reusable shared memory between two workers on one machine.

Copying into memory that was touched before runs at 7 GB/s, into fresh memory at 0.5 GB/s or less, so slots are kept while
they may be needed again.

    sender: LendingArena                                receiver: BorrowedSlots
      offer(n): a descriptor, with any frame     ->       add_fds(fds): map it, state byte := FREE, or leave it alone
      lend(n) finds the byte at FREE, SlotRef    ->       map_slot(ref, n)
      fill(address), before or after it          ->       are_filled(), before the buffer is used
                                                          ... the tensor is used in place, then freed
      lend(m) finds the byte at FREE             <-       state byte := FREE, in the shared page itself

Every slot is a memfd of its own: one page with the slot's state and number, then the data. It is sealed against
shrinking, so that no peer can make the other one read beyond its end (SIGBUS). Its descriptor travels once and is
closed on both sides. Nothing is put into a slot before the receiver has mapped it. The tensor that a slot was made for
goes through the socket, and so does everything else where a slot cannot be had on either side: no descriptor, no memory,
no room. Giving a slot back needs no message. A slot that the sender no longer wants is marked as retired, and the
receiver unmaps it when it needs the room.

A weak reference to the buffer notices that it was freed. Its callback may run in any thread, between any two
instructions, also while that thread holds a lock of this module, so it takes none. Mappings are never closed by force,
they end with the last object that refers to them: nothing here can pull memory away from under a tensor.

The peer can change the bytes of a slot at any time. What is checked must not lie in one: sparse and bool tensors, and
between workers that only trust each other's data all integers, travel through the socket (`gradwire.wire.tensors`).
`gradwire.transports.buffer_pool` is the same idea for tensors that come that way.
"""

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
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from gradwire.errors import ConnectionClosed, DecodeError
from gradwire.wire.messages import SlotRef

PAGE = 4096
"""Bytes before a slot's data; the first one is its state."""

FREE, LENT, RETIRED, FILLING, OFFERED = 0, 1, 2, 3, 4
"""States of a slot. The sender offers, fills, lends and retires it; the receiver frees it, the first time by mapping it."""

_NUMBER = struct.Struct("<Q")  # of a slot, in its first page
_NUMBER_AT = 8
_MAX_NUMBER = 2**63 - 1
_MAP_FAILED = ctypes.c_void_p(-1).value

# Linux's numbers; other systems lack the names, and this module has to be importable there.
_F_ADD_SEALS, _F_GET_SEALS, _SEALS = 1033, 1034, 0x1 | 0x2 | 0x4  # SEAL, SHRINK, GROW
_SEAL_EXEC = 0x20  # some systems add it to every memfd
_MADV_REMOVE, _MADV_POPULATE_WRITE = 9, 23

MAX_SLOTS = 1024
"""Slots of one connection and direction: a process may have some 65,000 mappings in all."""

_MAX_OFFERED = 64  # slots that the receiver has not mapped yet
_PAUSE_S = 1.0  # no offers for so long after the system had no memory or descriptor for one
_MAX_SCAN = 256  # lent slots looked at in one lend(): bounds its time to some 30 us


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """Statistics of a `LendingArena` or `BorrowedSlots`.

    Attributes:
        num_slots: Slots that are mapped.
        num_lent: Those whose memory the receiver uses.
        bytes_mapped: Capacity of all of them, which the limit applies to.
        num_created: Slots made or mapped since the start.
        num_refused: Calls of `lend` that returned None (0 on the receiver's side).
    """

    num_slots: int
    num_lent: int
    bytes_mapped: int
    num_created: int
    num_refused: int = 0


class Lease(msgspec.Struct, frozen=True):
    """A slot for one message. If the message is not sent, pass the lease to `LendingArena.cancel`.

    Attributes:
        slot: The reference for the receiver, in the tensor's metadata.
        place: The slot itself.
        num_bytes: The requested size.
    """

    slot: SlotRef
    place: Slot
    num_bytes: int

    @property
    def target(self) -> torch.Tensor:
        """Exactly the bytes asked for, one-dimensional ``uint8``, to copy into where `fill` cannot."""
        return self.place.memory[PAGE : PAGE + self.num_bytes]

    def fill(self, address: int) -> None:
        """Copy the bytes at an address into the slot and mark it as filled for the receiver."""
        ctypes.memmove(self.place.address, address, self.num_bytes)  # a third of what two views and their copy cost
        self.place.state.value = LENT

    def mark_filled(self) -> None:
        self.place.state.value = LENT


class LendingArena:
    """The sender's side: slots lent to the receiver of one connection.

    Args:
        limit_bytes: Capacity of all slots together.
        retire_after_s: Slots that were not lent for that long make room for other sizes. The delay keeps two sizes that do
            not fit together from evicting each other with every message.
    """

    def __init__(self, limit_bytes: int, *, retire_after_s: float = 1.0) -> None:
        self._limit_bytes = limit_bytes
        self._retire_after_s = retire_after_s
        self._lock = threading.Lock()  # guards everything below; nothing under it waits or calls out
        self._free: defaultdict[int, list[Slot]] = defaultdict(list)  # by capacity; the most recently freed is last
        self._lent: defaultdict[int, deque[Slot]] = defaultdict(deque)  # by capacity; the most recently lent is last
        self._offered: list[Slot] = []  # not seen to be mapped by the receiver yet, the oldest first
        self._next_offer = 0.0
        self._num_created = 0
        self.num_bytes_lent = 0  # in all messages so far
        self._num_refused = 0
        self._bytes_mapped = 0
        self._next_retirement = 0.0  # looking at all slots is not for every refused call
        self._is_closed = False

    def lend(self, num_bytes: int) -> Lease | None:
        """Return a slot to copy `num_bytes` into, or None if they must go through the socket; then see `offer`."""
        capacity = round_up(num_bytes) if num_bytes > 0 else 0  # no slot has a capacity of 0
        with self._lock:
            free, lent = self._free[capacity], self._lent[capacity]
            slot = free.pop() if free else _pop_freed(lent) or self._pop_mapped(free)
            if slot is None or (num_bytes > slot.num_touched and not self._has_touched(slot, num_bytes)):
                self._num_refused += 1
                return None
            slot.state.value = FILLING
            slot.last_lent = time.monotonic()
            lent.append(slot)
            self.num_bytes_lent += num_bytes
        return Lease(SlotRef(slot.slot_id, capacity), slot, num_bytes)

    def offer(self, num_bytes: int) -> int | None:
        """Return the descriptor of a new slot for messages of this size, to be sent with a frame; the caller closes it.

        None where limits or the system do not allow another slot. What becomes of the frame does not matter here: a slot
        that the receiver does not map is dropped after some time.
        """
        capacity = round_up(num_bytes) if num_bytes > 0 else 0
        with self._lock:
            now = time.monotonic()
            if not capacity or self._is_closed or now < self._next_offer or not is_available():
                return None
            if not self._make_room(capacity, now):
                return None
            try:
                slot, fd = make_slot(self._num_created, capacity)
            except OSError:
                self._next_offer = now + _PAUSE_S  # no descriptor or no memory: do not try with every call
                return None
            slot.last_lent = now
            self._offered.append(slot)
            self._num_created += 1
            self._bytes_mapped += capacity
            return fd

    def cancel(self, lease: Lease) -> None:
        slot, capacity = lease.place, lease.slot.capacity
        with self._lock:
            if slot not in self._lent.get(capacity, ()):  # closed in the meantime
                return
            self._lent[capacity].remove(slot)
            slot.state.value = FREE
            self._free[capacity].append(slot)

    def close(self) -> None:
        """Let go of every slot; memory that the receiver or a `Lease.target` still uses stays valid. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._free.clear()
            self._lent.clear()
            self._offered.clear()
            self._bytes_mapped = 0

    def statistics(self) -> ArenaStatistics:
        with self._lock:
            lent = [slot for slots in self._lent.values() for slot in slots]
            num_slots = len(lent) + sum(map(len, self._free.values())) + len(self._offered)
            num_lent = sum(slot.state.value != FREE for slot in lent)
            return ArenaStatistics(num_slots, num_lent, self._bytes_mapped, self._num_created, self._num_refused)

    def _pop_mapped(self, free: list[Slot]) -> Slot | None:
        """List the slots as free that the receiver has mapped since they were offered; take one out of `free`."""
        for slot in [slot for slot in self._offered if slot.state.value == FREE]:
            self._offered.remove(slot)
            self._free[slot.capacity].append(slot)
        return free.pop() if free else None

    def _has_touched(self, slot: Slot, num_bytes: int) -> bool:
        """Allocate a free slot's pages; drop the slot if there is no memory for them."""
        try:
            slot.touch(num_bytes)
        except OSError:
            self._retire(slot)
            self._next_offer = time.monotonic() + _PAUSE_S
            return False
        return True

    def _make_room(self, capacity: int, now: float) -> bool:
        """Retire idle slots, longest idle first, until one of `capacity` fits."""
        if self._fits(capacity):
            return True
        if now < self._next_retirement:
            return False
        self._next_retirement = now + self._retire_after_s
        since = now - self._retire_after_s
        for slot in [slot for slot in self._offered if slot.last_lent <= since and slot.state.value == OFFERED]:
            self._offered.remove(slot)  # the receiver could not map it, or does not read
            self._retire(slot)
        idle = self._idle_slots(since)
        can_be_had = self._limit_bytes - self._bytes_mapped + sum(slot.capacity for slot in idle)
        if capacity > can_be_had or len(self._offered) >= _MAX_OFFERED:
            return False  # retiring slots would not help
        for slot in idle:
            if self._fits(capacity):
                break
            self._free[slot.capacity].remove(slot)
            self._retire(slot)
        return self._fits(capacity)

    def _fits(self, capacity: int) -> bool:
        return self._bytes_mapped + capacity <= self._limit_bytes and len(self._offered) < _MAX_OFFERED

    def _retire(self, slot: Slot) -> None:
        self._bytes_mapped -= slot.capacity
        slot.retire()

    def _idle_slots(self, since: float) -> list[Slot]:
        """Return the free slots that were lent last before `since`, the oldest first."""
        for capacity, lent in self._lent.items():
            for _ in range(len(lent)):
                slot = lent.popleft()
                (self._free[capacity] if slot.state.value == FREE else lent).append(slot)
        idle = (slot for slots in self._free.values() for slot in slots if slot.last_lent <= since)
        return sorted(idle, key=lambda slot: slot.last_lent)


class BorrowedSlots:
    """The receiver's side: the other worker's slots, mapped here, and which of them are in use.

    Pages are not mapped ahead. Measured for 256 KiB and 64 MiB, reading or writing them all, that costs as much as the
    faults it saves, because the kernel maps 16 neighbours of a page that is there already.

    Args:
        limit_bytes: Capacity of all slots together; slots beyond it are not mapped.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()  # guards everything below; the callback of a loan does not take it
        self._slots: dict[int, Slot] = {}
        self._num_created = 0
        self._bytes_mapped = 0
        self._is_closed = False
        self.num_bytes_borrowed = 0  # of all messages so far
        self.unfilled: list[Slot] = []  # mapped, and not seen to be filled yet; for the thread that reads

    def add_fds(self, fds: Sequence[int]) -> None:
        """Map the slots whose descriptors arrived, and close the descriptors.

        A slot that cannot be mapped is ignored: its sender notices and keeps using the socket.
        """
        try:
            with self._lock:
                for fd in fds:
                    if not self._is_closed:
                        self._add_slot(fd)
        finally:
            for fd in fds:
                os.close(fd)

    def map_slot(self, ref: SlotRef, num_bytes: int) -> Any:
        """Return the first `num_bytes` of a slot, writable; the slot returns to its sender when the buffer is freed.

        Views of the buffer (tensors, memoryviews) keep it alive. It must not be used before `are_filled`.
        """
        with self._lock:
            if self._is_closed:
                raise ConnectionClosed("the connection of this slot is closed")
            slot = self._slots.get(ref.slot_id)
            if slot is None or slot.capacity != ref.capacity:
                raise DecodeError(f"no slot {ref.slot_id} of {ref.capacity} bytes was received")
            if not 0 < num_bytes <= slot.capacity:
                raise DecodeError(f"{num_bytes} bytes do not fit slot {ref.slot_id} of {ref.capacity}")
            if slot.loan is not None:
                raise DecodeError(f"slot {ref.slot_id} was sent again while in use")
            if slot.state.value == FILLING:
                self.unfilled.append(slot)
            self.num_bytes_borrowed += num_bytes
            return slot.borrow(num_bytes)

    def map_pinned_slot(self, ref: SlotRef, num_bytes: int) -> Any:
        """Map a slot like `map_slot`, for a tensor that goes on to a device."""
        buffer = self.map_slot(ref, num_bytes)
        slot = self._slots.get(ref.slot_id)
        if slot is not None:  # else the connection was closed meanwhile
            slot.pin()
        return buffer

    def are_filled(self) -> bool:
        """Return whether the bytes of all slots that were mapped so far are there."""
        unfilled = self.unfilled
        while unfilled and unfilled[-1].state.value != FILLING:
            unfilled.pop()
        if self._is_closed:
            raise ConnectionClosed("the connection of this slot is closed")
        return not unfilled

    def close(self) -> None:
        """Let go of the slots; buffers in use stay valid. Idempotent."""
        with self._lock:
            self._is_closed = True
            slots = list(self._slots.values())
            self._slots.clear()
            self.unfilled = []  # not emptied: the thread that reads may be looking at it
            self._bytes_mapped = 0
        for slot in slots:
            slot.loan = None  # ends the circle of slot and loan

    def statistics(self) -> ArenaStatistics:
        with self._lock:
            num_lent = sum(slot.loan is not None for slot in self._slots.values())
            return ArenaStatistics(len(self._slots), num_lent, self._bytes_mapped, self._num_created)

    def _add_slot(self, fd: int) -> None:
        slot_id, capacity = check_memfd(fd)
        if slot_id in self._slots:
            raise DecodeError(f"slot {slot_id} was received twice")
        if not self._fits(capacity):
            self._drop_retired()
        if not self._fits(capacity):
            return
        try:
            slot = Slot(slot_id, capacity, fd)
        except OSError:  # no address space for it
            return
        if slot.state.value != OFFERED:  # its sender has dropped it in the meantime
            return
        self._slots[slot_id] = slot
        self._num_created += 1
        self._bytes_mapped += capacity
        slot.state.value = FREE

    def _fits(self, capacity: int) -> bool:
        return self._bytes_mapped + capacity <= self._limit_bytes and len(self._slots) < MAX_SLOTS

    def _drop_retired(self) -> None:
        for slot in list(self._slots.values()):
            if slot.loan is None and slot.state.value == RETIRED:
                del self._slots[slot.slot_id]
                self._bytes_mapped -= slot.capacity


def _pop_freed(lent: deque[Slot]) -> Slot | None:
    """Take a slot out that the receiver has freed: the newest that can be found, so that its memory is warm."""
    for _ in range(min(len(lent), _MAX_SCAN)):
        slot = lent.pop()
        if slot.state.value == FREE:
            return slot
        lent.appendleft(slot)  # the next search begins with others, so that all are seen in the end
    return None


# Slots and the memory behind them


@functools.cache
def is_available() -> bool:
    """Return whether this system has sealed memfds that can be mapped; without them tensors travel through the socket."""
    try:
        os.close(make_slot(0, PAGE)[1])
    except OSError:
        return False
    return True


class Slot:
    """One mapped memfd. The mapping ends with the last tensor or buffer that refers to `memory`."""

    __slots__ = (
        "_is_pinned",
        "_mapping",
        "address",
        "capacity",
        "last_lent",
        "loan",
        "memory",
        "num_touched",
        "process_id",
        "slot_id",
        "state",
    )

    def __init__(self, slot_id: int, capacity: int, fd: int) -> None:
        self.slot_id, self.capacity = slot_id, capacity
        self._mapping = Mapping(fd, PAGE + capacity)
        self.memory = self._mapping.as_tensor()
        self._is_pinned = False
        self.address = self._mapping.address + PAGE
        self.state = ctypes.c_uint8.from_address(self.address - PAGE)
        self.loan: SlotLoan | None = None
        self.last_lent = 0.0
        self.num_touched = 0  # data bytes whose pages are there, as far as the sender has made them
        self.process_id = os.getpid()

    def borrow(self, num_bytes: int) -> Any:
        """Return the slot's first bytes. When they are garbage collected, the slot is free."""
        buffer = bytes_type(num_bytes).from_address(self.address)
        buffer._memory = self.memory  # the mapping lives as long as the buffer
        self.loan = loan = SlotLoan(buffer, _on_slot_freed)
        loan.slot = self
        return buffer

    def touch(self, num_bytes: int) -> None:
        """Make the pages of the first bytes in one call, so that writing to them cannot fail (with a signal)."""
        code = advise(self.address - PAGE, PAGE + num_bytes, _MADV_POPULATE_WRITE)
        if code in (errno.ENOMEM, errno.EFAULT):  # anything else: a kernel before 5.14, pages come as they are touched
            raise OSError(code, os.strerror(code))
        self.num_touched = num_bytes

    def pin(self) -> None:
        """Let devices copy to and from the slot by themselves, if they can, until it is unmapped."""
        if not self._is_pinned:
            from gradwire.wire import device_copies

            self._is_pinned = True
            self._mapping.unpin = device_copies.pin(self.address, self.capacity)

    def retire(self) -> None:
        """Free the pages and mark the slot as retired for the receiver."""
        advise(self.address, self.capacity, _MADV_REMOVE)
        self.state.value = RETIRED


class SlotLoan(weakref.ref[Any]):
    """Weak reference that notifies a slot when its buffer is freed; kept by the slot."""

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
    """Return the ctypes array type of a size. Cached: each is a class, and only the cycle collector frees classes."""
    return ctypes.c_ubyte * num_bytes


def round_up(num_bytes: int) -> int:
    """Return the capacity for a size: the next power of two, and at least a page."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes > PAGE else PAGE


def make_slot(slot_id: int, capacity: int) -> tuple[Slot, int]:
    """Make a slot of that number, on offer, and return its descriptor with it."""
    fd = make_memfd(slot_id, capacity)
    try:
        return Slot(slot_id, capacity, fd), fd
    except OSError:
        os.close(fd)
        raise


def make_memfd(slot_id: int, capacity: int) -> int:
    """Make a memfd for a slot of that number that cannot be shrunk, grown or unsealed."""
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
    """Return number and capacity of a slot; refuse everything but a sealed memfd of this user."""
    # Seals come first: any other file system may stall in fstat. No other seals: read-only memory cannot be mapped.
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError as error:  # a file, a socket, a pipe
        raise DecodeError(f"received a file descriptor that is not shared memory: {error}") from error
    if seals & ~_SEAL_EXEC != _SEALS:
        raise DecodeError("received a file descriptor without the seals of a slot")
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise DecodeError("received a file descriptor of shared memory that belongs to another user")
    capacity = status.st_size - PAGE
    if capacity < PAGE or capacity & (capacity - 1):
        raise DecodeError(f"received a slot of {capacity} bytes, which is not a power of two of at least {PAGE}")
    slot_id: int = _NUMBER.unpack(os.pread(fd, _NUMBER.size, _NUMBER_AT))[0]
    if slot_id > _MAX_NUMBER:
        raise DecodeError(f"received a slot with the invalid number {slot_id}")
    return slot_id, capacity


class Mapping:
    """Shared memory of this process, unmapped when the object is freed.

    Not with `weakref.finalize`: memory is freed in any thread, also while the main thread goes through all finalizers at the
    end of the program, which takes no lock and fails if their number changes.

    Attributes:
        address: Where the memory begins.
        unpin: Called before the memory is unmapped.
    """

    __slots__ = ("_munmap", "_num_bytes", "address", "unpin")

    def __init__(self, fd: int, num_bytes: int) -> None:
        # Unlike `mmap.mmap`, this keeps no descriptor while the mapping lives; unlike `torch.from_file`, nor on failure.
        self._munmap = _libc().munmap  # module globals may be gone when it is needed
        self._num_bytes = num_bytes
        self.unpin: Callable[[], object] | None = None
        self.address = 0
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc().mmap(None, num_bytes, protection, mmap.MAP_SHARED, fd, 0)
        if address is None or address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.address = address

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():  # the process ends, and the device's driver may have ended
            return
        if self.unpin is not None:
            self.unpin()
        if self.address:
            self._munmap(self.address, self._num_bytes)

    def as_tensor(self) -> torch.Tensor:
        """Return the tensor of its bytes, which keeps the mapping alive."""
        buffer = bytes_type(self._num_bytes).from_address(self.address)
        buffer._mapping = self
        with torch.inference_mode(False):  # the slot outlives the mode of the call that happens to make it
            return torch.frombuffer(buffer, dtype=torch.uint8)


def advise(address: int, num_bytes: int, advice: int) -> int:
    """Call `madvise` and return the error number. Linux only, where the numbers mean what they say."""
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
