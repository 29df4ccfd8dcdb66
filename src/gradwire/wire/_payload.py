"""The payload of one frame on its way into its final buffers."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, NamedTuple

import msgspec

from gradwire.errors import DecodeError
from gradwire.wire.messages import Call, Message, Reply, SlotRef, TensorMeta
from gradwire.wire.tensors import DTYPES, iter_parts

Allocate = Callable[[int], Any]
MapSlot = Callable[[SlotRef, int], Any]
_SMALL_BYTES = 64 << 10  # below this a copy is made without asking for memory first


class Frame(msgspec.Struct, frozen=True):
    """One decoded frame.

    Attributes:
        message: The header.
        body: The encoded arguments; empty if there are none.
        buffers: One writable buffer for each dense part of the tensors, in order.
        shortage: Why the payload is not there: this process had no memory for it. Empty for frames that are whole.
    """

    message: Message
    body: bytes | bytearray
    buffers: list[Any]
    shortage: str = ""


class Memory(NamedTuple):
    """Where buffers come from: fresh ones, and those in shared memory (None: this connection has none)."""

    allocate: Allocate
    map_slot: MapSlot | None
    shared_dtypes: Container[int]

    def fresh(self, num_bytes: int) -> Any:
        """A writable buffer.

        Raises:
            MemoryError: There is not so much memory.
        """
        try:
            return self.allocate(num_bytes)
        except (MemoryError, OSError) as error:
            raise MemoryError(f"no memory for {num_bytes:,} bytes") from error

    def check_shared(self, part: TensorMeta) -> None:
        """Check that a part may lie in shared memory.

        Raises:
            DecodeError: The connection has none, or a part of this dtype must be where its sender cannot change it.
        """
        if self.map_slot is None:
            raise DecodeError("a tensor in shared memory, which this connection does not have")
        if part.dtype not in self.shared_dtypes:
            raise DecodeError(
                f"a tensor of {DTYPES[part.dtype]} in shared memory, where its sender could still change it"
            )

    def shared(self, part: TensorMeta) -> Any:
        """The buffer of a part in shared memory.

        Raises:
            DecodeError: There is no such part.
        """
        self.check_shared(part)
        assert self.map_slot is not None
        assert part.slot is not None
        return self.map_slot(part.slot, part.num_bytes)

    def copy(self, data: bytes | bytearray | memoryview, offset: int, num_bytes: int) -> Any:
        """A buffer with bytes that have arrived already."""
        buffer = self.fresh(num_bytes)
        memoryview(buffer).cast("B")[:num_bytes] = data[offset : offset + num_bytes]
        return buffer


def take_whole(message: Call | Reply, data: bytes | bytearray | memoryview, offset: int, memory: Memory) -> Frame:
    """The frame whose payload is in `data` from `offset` on."""
    end = offset + message.body_bytes
    body = bytes(data[offset:end]) if message.body_bytes else b""
    buffers: list[Any] = []
    if not message.tensors:
        return Frame(message, body, buffers)
    shortage = ""
    for meta in message.tensors:
        for part in iter_parts(meta) if meta.layout or meta.device else (meta,):
            num_bytes = part.num_bytes
            if part.slot is not None:
                buffers.append(memory.shared(part))
                continue
            try:
                if num_bytes < _SMALL_BYTES:
                    buffers.append(bytearray(data[end : end + num_bytes]))
                else:
                    buffers.append(memory.copy(data, end, num_bytes))
            except MemoryError as error:
                shortage = str(error) or "no memory"
            end += num_bytes
    return Frame(message, body, buffers, shortage)


class Payload:
    """A frame whose header is checked and whose payload arrives in pieces.

    Slots are mapped when the frame is complete, in order. So whoever finds one that its sender still fills knows that the
    sender waits for nothing: it has written the whole frame.

    Attributes:
        target: The rest of the buffer that is being filled; None between segments.
    """

    __slots__ = ("_body", "_buffers", "_memory", "_message", "_next", "_num_skipped", "_parts", "_shortage", "target")

    def __init__(self, message: Call | Reply, memory: Memory) -> None:
        self.target: memoryview | None = None
        self._message = message
        self._memory = memory
        self._body = bytearray()
        self._buffers: list[Any] = []
        self._parts = [part for meta in message.tensors for part in iter_parts(meta)]
        self._next = 0  # segments before this one have a buffer; the first is the body
        self._shortage: MemoryError | None = None  # there was no memory for a segment
        self._num_skipped = 0  # bytes of such a frame that are still to come
        for part in self._parts:
            if part.slot is not None:
                memory.check_shared(part)

    def fill(self, data: memoryview) -> tuple[int, Frame | None]:
        """Take bytes from the start of `data`: how many were used, and the frame if it is complete."""
        used, end = 0, len(data)
        if self._shortage is not None:
            used = min(end, self._num_skipped)
            self._num_skipped -= used
            return used, self._finished()
        while self.target is not None or self._begin(has_bytes=used < end):
            target = self.target
            assert target is not None
            size = min(len(target), end - used)
            target[:size] = data[used : used + size]
            used += size
            if not self.advance(size):
                return used, None
        if self._shortage is not None:
            more, frame = self.fill(data[used:])
            return used + more, frame
        return used, self._finished()

    def advance(self, num_bytes: int) -> bool:
        """Note that bytes were written to the start of `target`; whether that filled it."""
        assert self.target is not None
        rest = self.target[num_bytes:]
        self.target = rest if rest else None
        return self.target is None

    def _begin(self, has_bytes: bool) -> bool:
        """Provide the buffer of the next segment that needs bytes; False if there is none, or no byte of it yet."""
        while self._next <= len(self._parts):
            part = self._parts[self._next - 1] if self._next else None
            num_bytes = self._message.body_bytes if part is None else part.num_bytes
            if num_bytes == 0 or (part is not None and part.slot is not None):
                self._place(bytearray())
            elif has_bytes:
                try:
                    buffer = bytearray(num_bytes) if part is None else self._memory.fresh(num_bytes)
                except MemoryError as error:
                    self._give_up(error, num_bytes)
                    return False
                self._place(buffer)
                self.target = memoryview(buffer).cast("B")[:num_bytes]
                return True
            else:
                return False
        return False

    def _give_up(self, error: MemoryError, num_bytes: int) -> None:
        """Skip the rest of the frame, so that the connection can go on."""
        later = self._parts[self._next :]
        self._shortage, self._num_skipped = (
            error,
            num_bytes + sum(part.num_bytes for part in later if part.slot is None),
        )
        self._body, self._buffers, self._next = bytearray(), [], len(self._parts) + 1

    def _place(self, buffer: Any) -> None:
        if self._next == 0:
            self._body = buffer
        else:
            self._buffers.append(buffer)
        self._next += 1

    def _finished(self) -> Frame | None:
        if self.target is not None or self._next <= len(self._parts) or self._num_skipped:
            return None
        if self._shortage is not None:
            shared = [self._memory.shared(part) for part in self._parts if part.slot is not None]  # to be given back
            return Frame(self._message, b"", shared, str(self._shortage) or "no memory")
        for index, part in enumerate(self._parts):
            if part.slot is not None:
                self._buffers[index] = self._memory.shared(part)
        return Frame(self._message, self._body, self._buffers)
