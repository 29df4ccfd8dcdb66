"""Encode messages as frames and decode them. No sockets, no threads.

    offset  size  prefix, little-endian
    0       2     magic "GW"
    2       1     version of the protocol
    3       1     message type (`MESSAGE_TYPES`)
    4       2     flags, 0
    6       2     reserved, 0
    8       4     header length
    12      8     payload length
    20      4     crc32 of the header, begun with type and payload length (`encode`)
    24            header (msgpack), then payload: body | segment | segment ...

A decoder checks in the order in which bytes arrive, and allocates for nothing it has not checked: the prefix when its
24 bytes are there, the header when it is complete, and then each buffer when the first of its bytes comes. So a peer
can make this worker hold as much memory as it sends, plus one segment of at most `Limits.frame_bytes`. The checksum
finds damage, not malice. Tensor bytes are not summed: TCP, TLS and Unix sockets protect them, and summing would halve
the bulk rate.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container
from typing import Any, Final, NamedTuple
from zlib import crc32

import msgspec

from gradwire.config import Limits
from gradwire.errors import CannotSend, DecodeError, LimitExceeded
from gradwire.wire.exceptions import check_error
from gradwire.wire.messages import (
    MESSAGE_TYPES,
    PROTOCOL_VERSION,
    Call,
    Challenge,
    Failure,
    Goodbye,
    Hello,
    Message,
    Refused,
    Reply,
    SlotRef,
    TensorMeta,
    check_address,
    check_text,
)
from gradwire.wire.plain import SCAN_FROM, check_structure
from gradwire.wire.tensors import SHAREABLE_DTYPES, iter_parts, validate

MAGIC: Final = b"GW"
PREFIX_BYTES: Final = 24
DIRECT_READ_FROM: Final = 32 * 1024
"""`FrameDecoder.writable` offers a buffer if at least this many of its bytes are missing."""

Allocate = Callable[[int], Any]
MapSlot = Callable[[SlotRef, int], Any]

_FRONT: Final = struct.Struct("<2sBBHH")  # the fields that have few right values
_MAX_KNOWN_NAMES: Final = 256
_PREFIX: Final = struct.Struct("<8sIQI")  # the front, then the two lengths and the checksum
_FIRST_AFTER_HANDSHAKE: Final = 16
_SMALL_BYTES: Final = 64 << 10  # a smaller payload is copied at once when all of it is there
_DEAD: Final = "this connection received invalid bytes earlier; nothing after them is read"
_encode_header: Final = msgspec.msgpack.Encoder().encode


def encode(message: Message, payload_bytes: int = 0) -> bytes:
    """Return prefix and header of a frame; the caller sends `payload_bytes` bytes of payload behind them."""
    try:
        header = _encode_header(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CannotSend(f"a {type(message).__name__} message cannot be encoded: {error}") from error
    kind = _KINDS[type(message)]
    # Begun with the prefix's numbers, so that any one changed bit of those or of the header changes it.
    checksum = crc32(header, (kind.seed ^ payload_bytes ^ payload_bytes >> 32) & 0xFFFFFFFF)
    return _PREFIX.pack(kind.front, len(header), payload_bytes, checksum) + header


class Frame(msgspec.Struct, frozen=True):
    message: Message
    body: bytes | bytearray  # the encoded arguments; empty if there are none
    buffers: list[Any]  # one writable buffer for each dense part of the tensors, in order
    shortage: str = ""  # why the payload is missing, in a process that had no memory for it


class FrameDecoder:
    """Turns the bytes of one connection into frames.

    The driver calls `feed` with what it read. While a large segment is arriving, `writable` returns the rest of its final
    buffer, so that the driver can read into it and call `advance`. After an error the decoder is dead.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        accept: frozenset[type],
        allocate: Allocate = bytearray,
        allocate_pinned: Allocate | None = None,
        map_slot: MapSlot | None = None,
        map_pinned_slot: MapSlot | None = None,
        shared_dtypes: Container[int] = SHAREABLE_DTYPES["data"],
    ) -> None:
        """Make a decoder at the start of a connection.

        `allocate` makes a writable buffer for a tensor segment of a given size (at least 1). `map_slot` returns the buffer
        of a part that lies in shared memory, of one of the `shared_dtypes`; None refuses such parts. The pinned variants
        are for tensors that are copied to a device; without them, those tensors are treated like the others.
        """
        self.accept = accept  # the driver replaces it when the handshake is over
        self.payload: IncomingPayload | None = None  # of the frame whose header is complete, to be looked at only
        self._limits = limits
        self._allocate = allocate
        self._allocate_pinned = allocate_pinned or allocate
        self._map_slot = map_slot
        self._map_pinned_slot = map_pinned_slot or map_slot
        self._shared_dtypes: Container[int] = shared_dtypes if map_slot is not None else ()
        self._known_names: set[str] = set()  # of functions and notes that were checked; a few, whatever the peer sends
        self._head = bytearray()  # a prefix and header that are not complete yet
        self._head_bytes = 0  # how many are needed to continue
        self._is_dead = False

    def __repr__(self) -> str:
        state = "dead" if self._is_dead else "idle" if self.is_idle else "inside a frame"
        return f"<FrameDecoder {state}>"

    @property
    def is_idle(self) -> bool:
        """Whether everything that was fed belongs to frames that have been returned."""
        return self.payload is None and not self._head

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Decode received bytes. `data` is copied, so the caller may reuse it."""
        if self._is_dead:
            raise DecodeError(_DEAD)
        self._is_dead = True  # unless all of it can be decoded
        frames: list[Frame] = []
        offset, end = 0, len(data)
        while offset < end:
            if self.payload is not None:
                used, frame = self.payload.fill(memoryview(data)[offset:])
                offset += used
                if frame is not None:
                    self.payload = None
                    frames.append(frame)
            elif self._head:
                size = min(self._head_bytes - len(self._head), end - offset)
                self._head += data[offset : offset + size]
                offset += size
                if len(self._head) == self._head_bytes:
                    head, self._head = self._head, bytearray()
                    self._begin(head, 0, frames)
            else:
                offset = self._begin(data, offset, frames)
        self._is_dead = False
        return frames

    def writable(self) -> memoryview | None:
        """Return the rest of the buffer that is being filled, if it is large enough to be read into directly.

        None until the first byte of a segment has arrived: a length alone must not cost memory.
        """
        target = self.payload.target if self.payload is not None else None
        return target if target is not None and len(target) >= DIRECT_READ_FROM else None

    def advance(self, num_bytes: int) -> list[Frame]:
        """Record that `num_bytes` bytes were read into `writable()`."""
        if self._is_dead:
            raise DecodeError(_DEAD)
        payload = self.payload
        if payload is None or payload.target is None or not 0 <= num_bytes <= len(payload.target):
            raise ValueError(f"advance({num_bytes}) without a writable buffer of that size")
        self._is_dead = True
        payload.target = payload.target[num_bytes:] or None
        frame = payload.fill(memoryview(b""))[1]
        self._is_dead = False
        if frame is None:
            return []
        self.payload = None
        return [frame]

    def _begin(self, data: bytes | bytearray | memoryview, offset: int, frames: list[Frame]) -> int:
        """Start the frame at `offset`, and complete it if it is small and has fully arrived; return where it ends."""
        start, end = offset + PREFIX_BYTES, len(data)
        if end < start:
            self._head, self._head_bytes = bytearray(data[offset:]), PREFIX_BYTES
            return end
        front, header_bytes, payload_bytes, checksum = _PREFIX.unpack_from(data, offset)
        kind = _KINDS_BY_FRONT.get(front)
        if kind is None or kind.type not in self.accept:
            raise DecodeError(_explain_front(front))
        limits = self._limits
        if header_bytes > (limits.handshake_bytes if kind.is_in_handshake else limits.header_bytes):
            raise LimitExceeded(f"a header of {header_bytes} bytes is larger than this worker accepts")
        if payload_bytes > (limits.frame_bytes if kind.has_payload else 0):
            raise LimitExceeded(f"a {kind.name} message with a payload of {payload_bytes} bytes is not accepted here")
        after: int = start + header_bytes
        if end < after:
            self._head, self._head_bytes = bytearray(data[offset:]), PREFIX_BYTES + header_bytes
            return end
        header = bytes(data[start:after])  # a copy: notes stay in it
        if crc32(header, (kind.seed ^ payload_bytes ^ payload_bytes >> 32) & 0xFFFFFFFF) != checksum:  # as in `encode`
            raise DecodeError("the checksum of a frame does not match its header")
        if header_bytes > SCAN_FROM:
            check_structure(header, limits)
        try:
            message = kind.decode(header)
        except RecursionError as error:
            raise LimitExceeded("a header is nested too deeply") from error
        except (ValueError, OverflowError) as error:  # msgspec's own errors are ValueErrors, as are Unicode's
            raise DecodeError(f"not a {kind.name} message: {error}") from error
        if not kind.has_payload:
            _check_message(message, limits)
            # A second spelling of the same message could hide fields that are never read. Calls are hot, and cannot.
            if _encode_header(message) != header:
                raise DecodeError(f"a {kind.name} message is not in canonical form")
            frames.append(Frame(message, b"", []))
            return after
        expected = _check_payload(message, limits, self._shared_dtypes, self._known_names)
        if expected != payload_bytes:
            raise DecodeError(f"a payload has {payload_bytes} bytes, but its parts add up to {expected}")
        if payload_bytes >= _SMALL_BYTES or end < after + payload_bytes:
            self.payload = IncomingPayload(message, self)
            return after
        offset, after = after, after + message.body_bytes
        body = bytes(data[offset:after]) if message.body_bytes else b""
        buffers: list[Any] = []
        for meta in message.tensors:
            for part in iter_parts(meta) if meta.layout or meta.device else (meta,):
                if part.slot is not None:
                    map_slot = self._map_pinned_slot if part.device else self._map_slot
                    buffers.append(map_slot(part.slot, part.num_bytes))  # type: ignore[misc]
                else:
                    buffers.append(bytearray(data[after : after + part.num_bytes]))
                    after += part.num_bytes
        frames.append(Frame(message, body, buffers))
        return after


class IncomingPayload:
    """The payload of a frame with a validated header, as it arrives in pieces.

    Slots are mapped when the frame is complete, in order. So a reader that finds one that its sender still fills knows
    that the sender waits for nothing: it has written the whole frame.
    """

    __slots__ = ("_buffers", "_decoder", "_message", "_num_skipped", "_parts", "_shortage", "target")

    def __init__(self, message: Call | Reply, decoder: FrameDecoder) -> None:
        self.target: memoryview | None = None  # the rest of the buffer that is being filled; None between segments
        self._message = message
        self._decoder = decoder  # knows where buffers come from
        self._parts: list[TensorMeta | None] = [None]  # the body, then the dense parts of the tensors
        self._parts += [part for meta in message.tensors for part in iter_parts(meta)]
        self._buffers: list[Any] = []  # of the parts that have begun
        self._shortage = ""  # why the rest is skipped
        self._num_skipped = 0  # bytes of such a frame that are still to come

    def fill(self, data: memoryview) -> tuple[int, Frame | None]:
        """Consume bytes from the start of `data`; return how many, and the frame if it is complete."""
        used, end = 0, len(data)
        while True:
            if self.target is None and not self._num_skipped:
                if len(self._buffers) == len(self._parts):
                    return used, self._make_frame()
                if not self._begin_segment(has_bytes=used < end):
                    return used, None
            elif used == end:
                return used, None
            elif self.target is not None:
                size = min(len(self.target), end - used)
                self.target[:size] = data[used : used + size]
                self.target = self.target[size:] or None
                used += size
            else:
                size = min(self._num_skipped, end - used)
                self._num_skipped -= size
                used += size

    def _begin_segment(self, has_bytes: bool) -> bool:
        """Provide the buffer of the next segment; return False if it has to wait for the first byte of it."""
        part = self._parts[len(self._buffers)]
        num_bytes = self._message.body_bytes if part is None else part.num_bytes
        if num_bytes == 0 or (part is not None and part.slot is not None):
            self._buffers.append(bytearray())
            return True
        if not has_bytes:
            return False
        try:
            if part is None:
                buffer = bytearray(num_bytes)
            elif part.device:
                buffer = self._decoder._allocate_pinned(num_bytes)
            else:
                buffer = self._decoder._allocate(num_bytes)
        except (MemoryError, OSError):  # the rest of the frame is skipped, so that the connection stays usable
            later = self._parts[len(self._buffers) + 1 :]
            self._num_skipped = num_bytes + sum(part.num_bytes for part in later if part and part.slot is None)
            self._shortage = f"cannot allocate {num_bytes:,} bytes"
            self._buffers = [bytearray()] * len(self._parts)
            return True
        self._buffers.append(buffer)
        self.target = memoryview(buffer).cast("B")[:num_bytes]
        return True

    def _make_frame(self) -> Frame:
        for index, part in enumerate(self._parts):
            if part is not None and part.slot is not None:  # in a frame that was skipped, too: it has to be given back
                map_slot = self._decoder._map_pinned_slot if part.device else self._decoder._map_slot
                assert map_slot is not None
                self._buffers[index] = map_slot(part.slot, part.num_bytes)
        return Frame(self._message, self._buffers[0], self._buffers[1:], self._shortage)


def _check_message(message: Message, limits: Limits) -> None:
    """Check a message that has no payload against `Limits`."""
    if isinstance(message, Hello | Challenge):
        check_address(message.sender, limits)
    if isinstance(message, Hello):
        check_text(message.to_name, "a worker's name", limits.name_bytes)
    elif isinstance(message, Refused | Goodbye) and len(message.reason) > limits.error_text_bytes:
        raise LimitExceeded(f"a reason of {len(message.reason)} characters exceeds Limits.error_text_bytes")
    elif isinstance(message, Failure):
        check_error(message.error, limits)


def _check_payload(message: Call | Reply, limits: Limits, shared_dtypes: Container[int], known_names: set[str]) -> int:
    """Check a message that has a payload against `Limits`, and return how long the payload has to be."""
    if type(message) is Call and message.function not in known_names:
        _check_name(message.function, "a function's name", limits, known_names)
    for name in message.notes:
        if name not in known_names:
            _check_name(name, "a note's name", limits, known_names)
    num_bytes = message.body_bytes
    if not message.tensors:
        return num_bytes
    if len(message.tensors) > limits.num_tensors:
        raise LimitExceeded(f"a message with {len(message.tensors)} tensors; at most {limits.num_tensors} are accepted")
    for meta in message.tensors:
        num_bytes += validate(meta, limits, shared_dtypes)
    return num_bytes


def _check_name(name: str, what: str, limits: Limits, known_names: set[str]) -> None:
    """Check a name and cache it, because the same few names recur."""
    check_text(name, what, limits.name_bytes)
    if len(known_names) < _MAX_KNOWN_NAMES:
        known_names.add(name)


class _Kind(NamedTuple):
    type: type[Message]
    name: str
    front: bytes  # the first eight bytes of its frames
    seed: int  # its part of what the checksum of a header begins with
    decode: Callable[[bytes], Any]
    has_payload: bool  # whether it may carry arguments and tensors
    is_in_handshake: bool  # whether its headers are limited as those of unknown callers


_KINDS: Final = {
    kind: _Kind(
        type=kind,
        name=kind.__name__,
        front=_FRONT.pack(MAGIC, PROTOCOL_VERSION, number, 0, 0),
        seed=number << 24,
        decode=msgspec.msgpack.Decoder(kind).decode,
        has_payload=kind in (Call, Reply),
        is_in_handshake=number < _FIRST_AFTER_HANDSHAKE,
    )
    for number, kind in MESSAGE_TYPES.items()
}
_KINDS_BY_FRONT: Final = {kind.front: kind for kind in _KINDS.values()}


def _explain_front(front: bytes) -> str:
    magic, version, number, flags, reserved = _FRONT.unpack(front)
    if magic != MAGIC:
        return f"peer is not a gradwire endpoint: its bytes start with {magic!r}, not {MAGIC!r}"
    if version != PROTOCOL_VERSION:
        return (
            f"peer uses protocol version {version}, but this worker uses {PROTOCOL_VERSION}; install the same version of "
            f"gradwire everywhere"
        )
    if flags or reserved:
        return f"unknown frame flags {flags:#x}, {reserved:#x}"
    kind = MESSAGE_TYPES.get(number)
    name = "an unknown" if kind is None else f"a {kind.__name__}"
    return f"{name} message (type {number}) is not allowed at this point"
