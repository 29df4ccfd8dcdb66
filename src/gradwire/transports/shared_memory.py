"""Shared memory between two workers of one machine, used again.

Memory that was touched before takes a copy at 7 GB/s, fresh memory at 0.5 GB/s and less, so nothing here is given up
while it may be needed again.

    sender: LendingArena                                receiver: BorrowedSlots
      offer(n): a descriptor, with any frame     ->       add_fds(fds): map it, state byte := FREE, or leave it alone
      lend(n) finds the byte at FREE, SlotRef    ->       map_slot(ref, n)
      fill(address), before or after it          ->       are_filled(), before anybody sees the buffer
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
`BufferPool` is the same idea for tensors that come that way.
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
from gradwire.transports.memory import (
    FILLING,
    FREE,
    LENT,
    OFFERED,
    PAGE,
    RETIRED,
    Buffer,
    BufferPool,
    PoolStatistics,
    Slot,
    check_memfd,
    is_available,
    make_memfd,
    round_up,
)
from gradwire.wire.messages import SlotRef

__all__ = [
    "MAX_SLOTS",
    "PAGE",
    "ArenaStatistics",
    "BorrowedSlots",
    "BufferPool",
    "Lease",
    "LendingArena",
    "PoolStatistics",
    "is_available",
]


MAX_SLOTS = 1024
"""Slots of one connection and direction: a process may have some 65,000 mappings in all."""

_MAX_OFFERED = 64  # slots that the receiver has not mapped yet
_PAUSE_S = 1.0  # no offers for so long after the system had no memory or descriptor for one
_MAX_SCAN = 256  # lent slots looked at in one lend(): bounds its time to some 30 us


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """What a `LendingArena` or `BorrowedSlots` holds.

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
    """A slot for one message. If that is not sent, give the lease to `LendingArena.cancel`.

    Attributes:
        slot: What the receiver needs to know, for the tensor's metadata.
        place: The slot itself.
        num_bytes: What was asked for.
    """

    slot: SlotRef
    place: Slot
    num_bytes: int

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
        self._offered: list[Slot] = []  # not seen to be mapped by the receiver yet, the oldest first
        self._next_offer = 0.0
        self._num_created = 0
        self._num_refused = 0
        self._bytes_mapped = 0
        self._next_retirement = 0.0  # looking at all slots is not for every refused call
        self._is_closed = False

    def lend(self, num_bytes: int) -> Lease | None:
        """A slot to copy `num_bytes` into, or None if the tensor has to travel through the socket; then see `offer`."""
        capacity = round_up(num_bytes) if num_bytes > 0 else 0  # no slot has a capacity of 0
        with self._lock:
            lent = self._lent.get(capacity)
            if lent is None:
                self._free[capacity] = []
                lent = self._lent[capacity] = deque()
            free = self._free[capacity]
            slot = free.pop() if free else _pop_freed(lent) or self._pop_mapped(free)
            if slot is None or (num_bytes > slot.num_touched and not self._has_touched(slot, num_bytes)):
                self._num_refused += 1
                return None
            slot.state.value = FILLING  # first: if Ctrl-C hits, a slot that is in no list must not look free
            slot.last_lent = time.monotonic()
            lent.append(slot)
        return Lease(SlotRef(slot.slot_id, capacity), slot, num_bytes)

    def offer(self, num_bytes: int) -> int | None:
        """The descriptor of a new slot for messages like this one, to be sent along with it; the caller closes it.

        None where limits or the system do not allow another slot. What becomes of the frame does not matter here: a slot
        that the receiver does not map is given up after a while.
        """
        capacity = round_up(num_bytes) if num_bytes > 0 else 0
        with self._lock:
            now = time.monotonic()
            if not capacity or self._is_closed or now < self._next_offer or not is_available():
                return None
            if not self._make_room(capacity, now):
                return None
            fd = None
            try:
                fd = make_memfd(self._num_created, capacity)
                slot = Slot(self._num_created, capacity, fd)
            except BaseException as error:
                if fd is not None:
                    os.close(fd)
                if not isinstance(error, OSError):  # Ctrl-C
                    raise
                self._next_offer = now + _PAUSE_S  # no descriptor or no memory: do not try with every call
                return None
            slot.last_lent = now
            self._free.setdefault(capacity, [])
            self._lent.setdefault(capacity, deque())
            self._offered.append(slot)
            self._num_created += 1
            self._bytes_mapped += capacity
            return fd

    def cancel(self, lease: Lease) -> None:
        """The frame was not sent: the slot is free again."""
        slot, capacity = lease.place, lease.slot.capacity
        with self._lock:
            if slot not in self._lent.get(capacity, ()):  # closed meanwhile
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
        """What the arena holds now."""
        with self._lock:
            lent = [slot for slots in self._lent.values() for slot in slots]
            num_slots = len(lent) + sum(map(len, self._free.values())) + len(self._offered)
            num_lent = sum(slot.state.value != FREE for slot in lent)
            return ArenaStatistics(num_slots, num_lent, self._bytes_mapped, self._num_created, self._num_refused)

    def _pop_mapped(self, free: list[Slot]) -> Slot | None:
        """List the slots as free that the receiver has mapped since they were offered; take one out of `free`."""
        mapped = [slot for slot in self._offered if slot.state.value == FREE]
        for slot in mapped:
            self._offered.remove(slot)
            self._free[slot.capacity].append(slot)
        return free.pop() if free else None

    def _has_touched(self, slot: Slot, num_bytes: int) -> bool:
        """Make a free slot's pages; without memory for them it is given up."""
        try:
            slot.touch(num_bytes)
        except OSError:
            self._retire(slot)
            self._next_offer = time.monotonic() + _PAUSE_S
            return False
        return True

    def _make_room(self, capacity: int, now: float) -> bool:
        """Retire slots that have been idle, the longest idle first, until one of `capacity` fits."""
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
        limit_bytes: Capacity of all slots together; what is offered beyond it is not mapped.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()  # guards everything below; the callback of a loan does not take it
        self._slots: dict[int, Slot] = {}
        self._num_created = 0
        self._bytes_mapped = 0
        self._is_closed = False
        self.unfilled: list[Slot] = []  # mapped, and not seen to be filled yet; for the thread that reads

    def add_fds(self, fds: Sequence[int]) -> None:
        """Map the slots whose descriptors arrived, and close these.

        A slot that cannot be mapped is left alone: its sender sees that, and goes on to use the socket.

        Raises:
            DecodeError: One of them is not a slot, or its number is in use.
        """
        for index, fd in enumerate(fds):
            try:
                with self._lock:
                    if not self._is_closed:
                        self._add_slot(fd)
            except BaseException:
                for other in fds[index + 1 :]:
                    os.close(other)
                raise
            finally:
                os.close(fd)

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
            slot = self._slots.get(ref.slot_id)
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
        """Let go of the slots; buffers in use stay valid. Idempotent."""
        with self._lock:
            self._is_closed = True
            slots = list(self._slots.values())
            self._slots.clear()
            self.unfilled = []  # not emptied: the thread that reads may be looking at it
            self._bytes_mapped = 0
        for slot in slots:
            slot.loan = None  # ends the circle of slot and loan: nobody waits for this slot any more

    def statistics(self) -> ArenaStatistics:
        """What is mapped now."""
        with self._lock:
            num_lent = sum(slot.loan is not None for slot in self._slots.values())
            return ArenaStatistics(len(self._slots), num_lent, self._bytes_mapped, self._num_created)

    def _add_slot(self, fd: int) -> None:
        slot_id, capacity = check_memfd(fd)
        if slot_id in self._slots:
            raise DecodeError(f"slot {slot_id} came twice")
        if not self._fits(capacity):
            self._drop_retired()
        if not self._fits(capacity):
            return
        try:
            slot = Slot(slot_id, capacity, fd)
        except OSError:  # no address space for it
            return
        if slot.state.value != OFFERED:  # its sender has given it up meanwhile
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
