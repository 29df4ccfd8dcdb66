"""Shared memory between two workers of one machine, used again.

Memory that was touched before takes a copy at 7 GB/s, fresh memory at 0.5 GB/s and less, so nothing here is given up
while it may be needed again.

    sender: LendingArena                                receiver: BorrowedSlots
      lend(n), send SlotRef (+ fd once)          ->       add_fd(fd) once, map_slot(ref, n)
      fill(address), before or after it          ->       are_filled(), before anybody sees the buffer
                                                          ... the tensor is used in place, then freed
      lend(m) finds the byte at 0                <-       state byte := 0, in the shared page itself

Every slot is a memfd of its own: one page whose first byte is the slot's state, then the data. It is sealed against
shrinking, so that no peer can make the other one read beyond its end (SIGBUS). Its descriptor travels once and is
closed on both sides. Giving a slot back needs no message. A slot that the sender no longer wants is marked as retired,
and the receiver unmaps it when it needs the room.

A weak reference to the buffer notices that it was freed. Its callback may run in any thread, between any two
instructions, also while that thread holds a lock of this module, so it takes none. Mappings are never closed by force,
they end with the last object that refers to them: nothing here can pull memory away from under a tensor.

The peer can change the bytes of a slot at any time. What must still hold after it was checked (the indices of a sparse
tensor, say) has to be copied out first. `BufferPool` is the same idea for tensors that come through a socket.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from gradwire.errors import ConnectionClosed, DecodeError
from gradwire.transports._memory import (
    FILLING,
    FREE,
    LENT,
    PAGE,
    RETIRED,
    Buffer,
    Slot,
    check_memfd,
    is_available,
    make_memfd,
    populate,
    round_up,
)
from gradwire.transports._pool import BufferPool, PoolStatistics
from gradwire.wire.messages import SlotRef

__all__ = [
    "MAX_WAITING_FDS",
    "PAGE",
    "ArenaStatistics",
    "BorrowedSlots",
    "BufferPool",
    "Lease",
    "LendingArena",
    "PoolStatistics",
    "is_available",
]

MAX_WAITING_FDS = 128
"""Descriptors that may have arrived and not be mapped yet: 64 of a frame whose last bytes are still to be decoded, and 64
that the same read brought for the frame behind it."""

_MAX_SCAN = 256  # lent slots looked at in one lend(): bounds its time to some 30 us


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """What a `LendingArena` or `BorrowedSlots` holds.

    Attributes:
        num_slots: Slots that are mapped.
        num_lent: Those whose memory the receiver uses.
        bytes_mapped: Capacity of all of them, which the limit applies to.
        num_created: Slots made or received since the start.
        num_refused: Calls of `lend` that returned None (0 on the receiver's side).
    """

    num_slots: int
    num_lent: int
    bytes_mapped: int
    num_created: int
    num_refused: int = 0


class Lease(msgspec.Struct, frozen=True):
    """A slot for one message. If that is not sent, give the lease to `LendingArena.cancel`.

    Attributes:
        slot: What the receiver needs to know, for the tensor's metadata.
        place: The slot itself.
        num_bytes: What was asked for.
        fd: Descriptor to send along, for a new slot only. It is the caller's, who closes it once the frame has left
            (`cancel` closes it, too). An arena that is closed meanwhile leaves it alone, or another file could travel
            under its number.
    """

    slot: SlotRef
    place: Slot
    num_bytes: int
    fd: int | None

    @property
    def target(self) -> torch.Tensor:
        """Exactly the bytes asked for, one-dimensional ``uint8``, to copy into where `fill` cannot."""
        return self.place.memory[PAGE : PAGE + self.num_bytes]

    def fill(self, address: int) -> None:
        """Copy the bytes that lie there, and tell the receiver."""
        ctypes.memmove(self.place.address, address, self.num_bytes)  # a third of what two views and their copy cost
        self.place.state.value = LENT

    def mark_filled(self) -> None:
        """Tell the receiver that the bytes are there."""
        self.place.state.value = LENT


class LendingArena:
    """The sender's side: slots that it lends to the receiver of one connection.

    Args:
        limit_bytes: Capacity of all slots together.
        retire_after_s: Slots that were not lent for so long make room for other sizes. A wait at all is what keeps two
            sizes that do not fit together from pushing each other out with every message.
    """

    def __init__(self, limit_bytes: int, *, retire_after_s: float = 1.0) -> None:
        self._limit_bytes = limit_bytes
        self._retire_after_s = retire_after_s
        self._lock = threading.Lock()  # guards everything below; nothing under it waits or calls out
        self._free: dict[int, list[Slot]] = {}  # by capacity; the most recently freed one is last
        self._lent: dict[int, deque[Slot]] = {}  # by capacity; the most recently lent one is last
        self._num_created = 0
        self._num_refused = 0
        self._bytes_mapped = 0
        self._next_retirement = 0.0  # looking at all slots is not for every refused call
        self._is_closed = False

    def lend(self, num_bytes: int) -> Lease | None:
        """A slot to copy `num_bytes` into, or None if the tensor has to travel through the socket."""
        capacity = round_up(num_bytes) if num_bytes > 0 else 0  # no slot has a capacity of 0
        fd = None
        with self._lock:
            lent = self._lent.get(capacity)
            if lent is None:
                self._free[capacity] = []
                lent = self._lent[capacity] = deque()
            free = self._free[capacity]
            slot = free.pop() if free else _pop_freed(lent)
            if slot is None:
                made = self._make_slot(num_bytes, capacity)
                if made is None:
                    self._num_refused += 1
                    return None
                slot, fd = made
            slot.state.value = FILLING  # first: if Ctrl-C hits, a slot that is in no list must not look free
            slot.last_lent = time.monotonic()
            lent.append(slot)
        return Lease(SlotRef(slot.slot_id, capacity, fd is not None), slot, num_bytes, fd)

    def cancel(self, lease: Lease) -> None:
        """The frame was not sent: the slot is free again, or gone if the receiver never heard of it."""
        if lease.fd is not None:
            os.close(lease.fd)
        slot, capacity = lease.place, lease.slot.capacity
        with self._lock:
            if slot not in self._lent.get(capacity, ()):  # closed meanwhile
                return
            self._lent[capacity].remove(slot)
            slot.state.value = FREE
            if lease.slot.is_new:
                self._bytes_mapped -= capacity
            else:
                self._free[capacity].append(slot)

    def close(self) -> None:
        """Let go of every slot; memory that the receiver or a `Lease.target` still uses stays valid. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._free.clear()
            self._lent.clear()
            self._bytes_mapped = 0

    def statistics(self) -> ArenaStatistics:
        """What the arena holds now."""
        with self._lock:
            lent = [slot for slots in self._lent.values() for slot in slots]
            num_slots = len(lent) + sum(map(len, self._free.values()))
            num_lent = sum(slot.state.value != FREE for slot in lent)
            return ArenaStatistics(num_slots, num_lent, self._bytes_mapped, self._num_created, self._num_refused)

    def _make_slot(self, num_bytes: int, capacity: int) -> tuple[Slot, int] | None:
        """A new slot and its descriptor, or None where limits or the system do not allow it."""
        if not capacity or self._is_closed or capacity > self._limit_bytes:
            return None
        if not is_available() or not self._make_room(capacity):
            return None
        try:
            fd = make_memfd(PAGE + capacity)
        except OSError:  # out of descriptors: the socket is the way that needs none
            return None
        try:
            slot = Slot(self._num_created, capacity, fd)
            populate(slot.memory.data_ptr(), PAGE + num_bytes)
        except (OSError, RuntimeError):
            os.close(fd)
            self._limit_bytes = self._bytes_mapped  # out of memory: live with what there is, do not try with every call
            return None
        self._num_created += 1
        self._bytes_mapped += capacity
        return slot, fd

    def _make_room(self, capacity: int) -> bool:
        """Retire slots that have been idle, the longest idle first, until `capacity` fits."""
        if self._bytes_mapped + capacity <= self._limit_bytes:
            return True
        now = time.monotonic()
        if now < self._next_retirement:
            return False
        self._next_retirement = now + self._retire_after_s
        idle = self._idle_slots(now - self._retire_after_s)
        if self._bytes_mapped + capacity - sum(slot.capacity for slot in idle) > self._limit_bytes:
            return False
        for slot in idle:
            if self._bytes_mapped + capacity <= self._limit_bytes:
                break
            self._free[slot.capacity].remove(slot)
            self._bytes_mapped -= slot.capacity
            slot.retire()
        return True

    def _idle_slots(self, since: float) -> list[Slot]:
        """Free slots that were lent last before `since`, the oldest first."""
        for capacity, lent in self._lent.items():
            for _ in range(len(lent)):
                slot = lent.popleft()
                (self._free[capacity] if slot.state.value == FREE else lent).append(slot)
        idle = (slot for slots in self._free.values() for slot in slots if slot.last_lent <= since)
        return sorted(idle, key=lambda slot: slot.last_lent)


class BorrowedSlots:
    """The receiver's side: the other worker's slots, mapped here, and whether something here uses them.

    Pages are not mapped ahead. Measured for 256 KiB and 64 MiB, reading or writing them all, that costs as much as the
    faults it saves, because the kernel maps 16 neighbours of a page that is there already.

    Args:
        limit_bytes: Capacity of all slots together; a sender that goes beyond is refused.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()  # guards everything below; the callback of a loan does not take it
        self._fds: deque[int] = deque()  # received and not yet mapped, in order of arrival
        self._slots: dict[int, Slot] = {}
        self._num_created = 0
        self._bytes_mapped = 0
        self._is_closed = False
        self.unfilled: list[Slot] = []  # mapped, and not seen to be filled yet; for the thread that reads

    def add_fd(self, fd: int) -> None:
        """Take over a descriptor that arrived; the next new slot is mapped from it.

        Raises:
            DecodeError: More descriptors arrived than any sender leaves waiting. This one is closed.
        """
        with self._lock:
            if not self._is_closed and len(self._fds) < MAX_WAITING_FDS:
                self._fds.append(fd)
                return
            is_closed = self._is_closed
        os.close(fd)
        if not is_closed:
            raise DecodeError(f"more than {MAX_WAITING_FDS} file descriptors arrived without a slot that names them")

    def add_fds(self, fds: Sequence[int]) -> None:
        """Take over all descriptors that one read brought.

        Raises:
            DecodeError: As `add_fd`; those behind the one too many are closed, too.
        """
        for index, fd in enumerate(fds):
            try:
                self.add_fd(fd)
            except DecodeError:
                for other in fds[index + 1 :]:
                    os.close(other)
                raise

    def map_slot(self, ref: SlotRef, num_bytes: int) -> Buffer:
        """The first `num_bytes` of a slot, writable; the slot goes back to its sender when the buffer is freed.

        Views of the buffer (tensors, memoryviews) keep it. Nobody may see it before `are_filled`.

        Raises:
            DecodeError: `ref` is no slot that may be borrowed now, or its memory is not what it has to be.
            ConnectionClosed: `close` was called.
        """
        with self._lock:
            if self._is_closed:
                raise ConnectionClosed("the connection of this slot is closed")
            slot = self._add_slot(ref, num_bytes) if ref.is_new else self._slots.get(ref.slot_id)
            if (
                slot is None
                or slot.loan is not None
                or slot.capacity != ref.capacity
                or not 0 < num_bytes <= slot.capacity
            ):
                raise DecodeError(_explain_refusal(ref, num_bytes, slot))
            if slot.state.value == FILLING:
                self.unfilled.append(slot)
            return slot.borrow(num_bytes)

    def are_filled(self) -> bool:
        """Whether the bytes of all slots that were mapped so far are there.

        Raises:
            ConnectionClosed: `close` was called, and nobody knows any more.
        """
        unfilled = self.unfilled
        while unfilled and unfilled[-1].state.value != FILLING:
            unfilled.pop()
        if self._is_closed:
            raise ConnectionClosed("the connection of this slot is closed")
        return not unfilled

    def close(self) -> None:
        """Close waiting descriptors and let go of the slots; buffers in use stay valid. Idempotent."""
        with self._lock:
            self._is_closed = True
            slots, fds = list(self._slots.values()), list(self._fds)
            self._slots.clear()
            self._fds.clear()
            self.unfilled = []  # not emptied: the thread that reads may be looking at it
            self._bytes_mapped = 0
        for fd in fds:
            os.close(fd)
        for slot in slots:
            slot.loan = None  # ends the circle of slot and loan: nobody waits for this slot any more

    def statistics(self) -> ArenaStatistics:
        """What is mapped now."""
        with self._lock:
            num_lent = sum(slot.loan is not None for slot in self._slots.values())
            return ArenaStatistics(len(self._slots), num_lent, self._bytes_mapped, self._num_created)

    def _add_slot(self, ref: SlotRef, num_bytes: int) -> Slot:
        if not self._fds:
            raise DecodeError(f"slot {ref.slot_id} is new, but no file descriptor came with it")
        fd = self._fds.popleft()
        try:
            self._check_new(ref, num_bytes)
            check_memfd(fd, PAGE + ref.capacity)
            slot = Slot(ref.slot_id, ref.capacity, fd)
        except (OSError, RuntimeError) as error:
            raise DecodeError(f"the memory of slot {ref.slot_id} cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        self._slots[ref.slot_id] = slot
        self._num_created += 1
        self._bytes_mapped += ref.capacity
        return slot

    def _check_new(self, ref: SlotRef, num_bytes: int) -> None:
        if not 0 < num_bytes <= ref.capacity:
            raise DecodeError(_explain_refusal(ref, num_bytes, None))
        if ref.slot_id in self._slots:
            raise DecodeError(f"slot {ref.slot_id} came twice")
        if ref.capacity < PAGE or ref.capacity & (ref.capacity - 1):
            raise DecodeError(f"slot {ref.slot_id} has {ref.capacity} bytes, which is not a power of two from {PAGE}")
        if self._bytes_mapped + ref.capacity > self._limit_bytes:
            self._drop_retired()
        if self._bytes_mapped + ref.capacity > self._limit_bytes:
            raise DecodeError(f"slot {ref.slot_id} of {ref.capacity} bytes is beyond the limit of {self._limit_bytes}")

    def _drop_retired(self) -> None:
        for slot in list(self._slots.values()):
            if slot.loan is None and slot.state.value == RETIRED:
                del self._slots[slot.slot_id]
                self._bytes_mapped -= slot.capacity


def _explain_refusal(ref: SlotRef, num_bytes: int, slot: Slot | None) -> str:
    """Why the receiver does not lend this slot's bytes to anybody; `slot` is the one it knows by that number."""
    if not 0 < num_bytes <= ref.capacity:
        return f"{num_bytes} bytes do not fit slot {ref.slot_id} of {ref.capacity}"
    if slot is None or slot.capacity != ref.capacity:
        return f"no slot {ref.slot_id} of {ref.capacity} bytes was received"
    return f"slot {ref.slot_id} was lent again while it is in use"


def _pop_freed(lent: deque[Slot]) -> Slot | None:
    """Take a slot out that the receiver has freed: the newest that can be found, so that its memory is warm."""
    for _ in range(min(len(lent), _MAX_SCAN)):
        slot = lent.pop()
        if slot.state.value == FREE:
            return slot
        lent.appendleft(slot)  # the next search begins with others, so that all are seen in the end
    return None
