"""What one message carries, on its way out: bytes for the socket, and tensors in shared memory.

Tensors of medium size are announced early: the frame leaves first, and their bytes are copied into their slots while the
receiver wakes up and decodes it. The state of a slot says when its bytes are there.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Container, Sequence

import msgspec
import torch

from gradwire.config import MIB, Limits
from gradwire.transports.arena import Lease, LendingArena
from gradwire.transports.base import Buffer
from gradwire.wire import tensors
from gradwire.wire.messages import TensorMeta

_COPY_IN_PARALLEL_FROM = 8 * MIB  # from here on torch's copy pays, which uses several cores
_MAX_LEASES = 64
_MAX_DESCRIPTORS = 64  # the receiver has room for so many; the kernel takes 253 with one frame
# Whether another core that sees a store also sees those before it; elsewhere it takes the system call that sends a frame.
_ORDERS_STORES = platform.machine() in ("x86_64", "AMD64")
# At this size the copy takes about as long as the receiver may look for its end instead of sleeping, and what early
# announcing saves (the time to decode a frame) is little beside it. With one core there is nothing to overlap.
_ANNOUNCED_BYTES = MIB if _ORDERS_STORES and len(os.sched_getaffinity(0)) > 1 else 0


class Parcel:
    """The payload of one message.

    Attributes:
        buffers: The body, and the bytes of tensors.
        leases: Shared memory with the bytes of others.
        descriptors: Of new slots that the other side may use later.
        num_bytes: Of the payload.
    """

    __slots__ = ("_num_shared", "_owners", "_unfilled", "buffers", "descriptors", "leases", "num_bytes")

    def __init__(self, body: bytes) -> None:
        self.buffers: list[Buffer] = [body]
        self.leases: list[Lease] = []
        self.descriptors: list[int] = []
        self.num_bytes = len(body)
        self._owners: list[torch.Tensor] = []  # keeps the memory behind addresses and buffers alive
        self._unfilled: list[tuple[Lease, int]] = []  # announced, with the address of the bytes to be copied
        self._num_shared = 0  # bytes of all leases

    def place(
        self,
        values: Sequence[torch.Tensor],
        limits: Limits,
        arena: LendingArena | None,
        shared_from: int,
        shared_dtypes: Container[int],
    ) -> tuple[TensorMeta, ...]:
        """Puts each dense part into shared memory or among the buffers; returns metadata that says where.

        Args:
            values: The tensors.
            limits: What the other side accepts.
            arena: Shared memory, if the connection has it.
            shared_from: Size from which tensors go there.
            shared_dtypes: Numbers of the dtypes that may.

        Raises:
            CannotSend: A tensor cannot travel.
        """
        metas = []
        for value in values:
            meta, parts = tensors.describe(value, limits)
            metas.append(meta)
            # Sparse tensors have no bytes of their own, and so stay out of shared memory.
            if meta.num_bytes >= shared_from and arena is not None and meta.dtype in shared_dtypes:
                lease = arena.lend(meta.num_bytes) if len(self.leases) < _MAX_LEASES else None
                if lease is not None:
                    self._fill_or_announce(lease, parts[0])
                    msgspec.structs.force_setattr(meta, "slot", lease.slot)  # `describe` made it for this message
                    continue
                self._offer(arena, meta.num_bytes)
            for part in parts:
                view, owner = tensors.as_bytes(part)
                self.buffers.append(view)
                self.num_bytes += len(view)
                self._owners.append(owner)
        return tuple(metas)

    def _offer(self, arena: LendingArena, num_bytes: int) -> None:
        if len(self.descriptors) < _MAX_DESCRIPTORS:
            descriptor = arena.offer(num_bytes)
            if descriptor is not None:
                self.descriptors.append(descriptor)

    def _fill_or_announce(self, lease: Lease, part: torch.Tensor) -> None:
        self.leases.append(lease)
        # Everything that may fail is done here, so that a frame that has left can be followed by its bytes.
        is_simple = lease.num_bytes < _COPY_IN_PARALLEL_FROM and part.is_contiguous()
        address = tensors.address_of(part) if is_simple else 0
        self._num_shared += lease.num_bytes
        if not address:
            tensors.copy_into(part, lease.target)
            lease.mark_filled()
        elif self._num_shared > _ANNOUNCED_BYTES:
            lease.fill(address)
        else:
            self._owners.append(part)
            self._unfilled.append((lease, address))

    def close_descriptors(self) -> None:
        """Close the descriptors of new slots; once the message is sent, the other side has its own."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def fill(self) -> None:
        """Copies what was announced. No lock is held, so another thread may send its frame meanwhile."""
        for lease, address in self._unfilled:
            lease.fill(address)
