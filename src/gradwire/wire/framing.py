"""Frames: bytes to messages and back. No sockets, no threads.

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
from math import inf
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
    Proof,
    Refused,
    Reply,
    SlotRef,
    TensorMeta,
    Welcome,
    check_address,
    check_number,
    check_text,
)
from gradwire.wire.plain import SCAN_FROM, check_structure
from gradwire.wire.tensors import DTYPES, SHAREABLE_DTYPES, iter_parts, validate

__all__ = ["DIRECT_READ_FROM", "MAGIC", "PREFIX_BYTES", "Frame", "FrameDecoder", "encode"]


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


_INT63_MAX: Final = 2**63 - 1
_MAX_SECRET_BYTES: Final = 64
_MAX_NOTES: Final = 64
_NUM_CODECS: Final = 6


def _check_secret(secret: bytes, what: str) -> None:
    if len(secret) > _MAX_SECRET_BYTES:
        raise LimitExceeded(f"{what} of {len(secret)} bytes")


def _check_hello(message: Hello, limits: Limits) -> int:
    check_number(message.version, "version", 255)
    _check_secret(message.nonce, "a nonce")
    check_address(message.sender, limits)
    check_text(message.to_name, "a worker's name", limits.name_bytes)
    check_number(message.to_incarnation, "incarnation")
    return 0


def _check_challenge(message: Challenge, limits: Limits) -> int:
    _check_secret(message.nonce, "a nonce")
    _check_secret(message.proof, "a proof")
    check_address(message.sender, limits)
    return 0


def _check_proof(message: Proof, limits: Limits) -> int:
    _check_secret(message.proof, "a proof")
    return 0


def _check_nothing(message: Welcome, limits: Limits) -> int:
    return 0


def _check_reason(message: Refused | Goodbye, limits: Limits) -> int:
    if len(message.reason) > limits.error_text_bytes:
        raise LimitExceeded(f"a reason of {len(message.reason)} characters")
    return 0


def _check_payload(message: Call | Reply, limits: Limits) -> int:
    num_bytes = message.body_bytes
    if not (0 <= message.call_id <= _INT63_MAX and 0 <= num_bytes <= limits.frame_bytes):
        check_number(message.call_id, "call id")
        check_number(num_bytes, "body length", limits.frame_bytes)
    if not 0 <= message.codec < _NUM_CODECS:
        raise DecodeError(f"unknown codec {message.codec}")
    if message.notes:
        _check_notes(message.notes, limits)
    tensors = message.tensors
    if len(tensors) > limits.num_tensors:
        raise LimitExceeded(f"a message with {len(tensors)} tensors; at most {limits.num_tensors} are accepted")
    for meta in tensors:
        num_bytes += validate(meta, limits)
    return num_bytes


def _check_call(message: Call, limits: Limits) -> int:
    if not 0 <= message.timeout_s < inf:
        raise DecodeError(f"a timeout of {message.timeout_s} s")
    name = message.function
    if not (name.isascii() and name.isprintable() and len(name) <= limits.name_bytes):
        check_text(name, "a function's name", limits.name_bytes)
    return _check_payload(message, limits)


def _check_notes(notes: dict[str, Any], limits: Limits) -> None:
    if len(notes) > _MAX_NOTES:
        raise LimitExceeded(f"a message with {len(notes)} notes; at most {_MAX_NOTES} are accepted")
    for name in notes:
        if not (name.isascii() and name.isprintable() and 0 < len(name) <= limits.name_bytes):
            check_text(name, "a note's name", limits.name_bytes)


def _check_failure(message: Failure, limits: Limits) -> int:
    check_number(message.call_id, "call id")
    check_error(message.error, limits)
    return 0


CHECKS: Final[dict[type[Message], Callable[[Any, Limits], int]]] = {
    Hello: _check_hello,
    Challenge: _check_challenge,
    Proof: _check_proof,
    Welcome: _check_nothing,
    Refused: _check_reason,
    Call: _check_call,
    Reply: _check_payload,
    Failure: _check_failure,
    Goodbye: _check_reason,
}


MAGIC: Final = b"GW"
PREFIX_BYTES: Final = 24
DIRECT_READ_FROM: Final = 32 * 1024
"""`FrameDecoder.writable` offers a buffer when at least so many of its bytes are missing."""

_FRONT: Final = struct.Struct("<2sBBHH")  # everything that has few right values
_PREFIX: Final = struct.Struct("<8sIQI")  # the front, then the two lengths and the checksum
_FIRST_AFTER_HANDSHAKE: Final = 16
_DEAD: Final = "this connection carried bytes that are not a frame; nothing after them is read"
_encode_header: Final = msgspec.msgpack.Encoder().encode


class _Kind:
    """What there is to know about one type of message.

    Attributes:
        type: Its class, and `name` of that.
        front: The first eight bytes of its frames.
        seed: Its part of what the checksum of a header begins with.
        decode: Makes a message of a header.
        check: Says how long the payload of a message has to be, or what is wrong with it.
        has_payload: Whether it may carry arguments and tensors.
        is_in_handshake: Whether its headers are limited as those of strangers.
    """

    __slots__ = ("check", "decode", "front", "has_payload", "is_in_handshake", "name", "seed", "type")

    def __init__(self, number: int, type_: type[Message]) -> None:
        self.type, self.name = type_, type_.__name__
        self.front = _FRONT.pack(MAGIC, PROTOCOL_VERSION, number, 0, 0)
        self.seed = number << 24
        self.decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder(type_).decode
        self.check = CHECKS[type_]
        self.has_payload = type_ is Call or type_ is Reply
        self.is_in_handshake = number < _FIRST_AFTER_HANDSHAKE


_KINDS: Final = {type_: _Kind(number, type_) for number, type_ in MESSAGE_TYPES.items()}
_BY_FRONT: Final = {kind.front: kind for kind in _KINDS.values()}


def encode(message: Message, payload_bytes: int = 0) -> bytes:
    """Prefix and header of a frame; the caller sends `payload_bytes` bytes of payload behind them.

    Raises:
        CannotSend: A field of the message (in practice a note) is not plain data.
    """
    try:
        header = _encode_header(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CannotSend(f"a {type(message).__name__} message cannot be encoded: {error}") from error
    kind = _KINDS[type(message)]
    # Begun with the prefix's numbers, so that any one changed bit of those or of the header changes it.
    checksum = crc32(header, (kind.seed ^ payload_bytes ^ payload_bytes >> 32) & 0xFFFFFFFF)
    return _PREFIX.pack(kind.front, len(header), payload_bytes, checksum) + header


class FrameDecoder:
    """Turns the bytes of one connection into frames.

    The driver calls `feed` with what it read. While a large segment is arriving, `writable` gives the rest of its final
    buffer, so that the driver can read into it and say `advance`. After an error the decoder is dead.

    Attributes:
        accept: Message types that are allowed now; the driver replaces it when the handshake is over.
        payload: Of the frame whose header is complete, to be looked at only; without one, nothing is `writable`.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        accept: frozenset[type],
        allocate: Allocate = bytearray,
        map_slot: MapSlot | None = None,
        shared_dtypes: Container[int] = SHAREABLE_DTYPES["data"],
    ) -> None:
        """Make a decoder at the start of a connection.

        Args:
            limits: What is accepted.
            accept: Message types that are allowed now.
            allocate: Makes a writable buffer for a tensor segment of so many bytes (at least 1).
            map_slot: Gives the buffer of a part that lies in shared memory; None refuses such parts.
            shared_dtypes: Numbers of the dtypes that may lie there.
        """
        self.accept = accept
        self._limits = limits
        self._memory = Memory(allocate, map_slot, shared_dtypes)
        self._head = bytearray()  # a prefix and header that are not complete yet
        self.payload: Payload | None = None
        self._is_dead = False

    def __repr__(self) -> str:
        state = "dead" if self._is_dead else "idle" if self.is_idle else "inside a frame"
        return f"<FrameDecoder {state}>"

    @property
    def is_idle(self) -> bool:
        """Whether everything that was fed belongs to frames that have been returned."""
        return self.payload is None and not self._head

    def eof(self) -> None:
        """Note that the connection ended.

        Raises:
            DecodeError: It ended inside a frame.
        """
        if not self.is_idle:
            self._kill()
            raise DecodeError("the connection ended inside a frame")

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Decode what arrived. `data` is copied, and may be used again by the caller.

        Raises:
            DecodeError: Bytes that are not a frame.
            LimitExceeded: A frame larger than the limits.
        """
        if self._is_dead:
            raise DecodeError(_DEAD)
        try:
            if self.payload is None and not self._head:
                used, done = self._open(data)
                if used == len(data):  # one whole frame: the usual case
                    return done
                return done + self._feed(memoryview(data)[used:])
            return self._feed(memoryview(data))
        except BaseException:
            self._kill()
            raise

    def writable(self) -> memoryview | None:
        """The rest of the buffer that is being filled, if it is large enough to be read into directly.

        None until the first byte of a segment has come: a length alone must not cost memory.
        """
        target = self.payload.target if self.payload is not None else None
        return target if target is not None and len(target) >= DIRECT_READ_FROM else None

    def advance(self, num_bytes: int) -> list[Frame]:
        """Note that so many bytes were read into `writable()`.

        Raises:
            DecodeError: The frame is complete and names shared memory that cannot be mapped, or the decoder is dead.
        """
        if self._is_dead:
            raise DecodeError(_DEAD)
        payload = self.payload
        if payload is None or payload.target is None or not 0 <= num_bytes <= len(payload.target):
            raise ValueError(f"advance({num_bytes}) without a writable buffer of that size")
        if not payload.advance(num_bytes):
            return []
        try:
            return self._fill(payload, memoryview(b""))[1]
        except BaseException:
            self._kill()
            raise

    def _kill(self) -> None:
        self._is_dead = True
        self.payload, self._head = None, bytearray()

    def _feed(self, data: memoryview) -> list[Frame]:
        frames: list[Frame] = []
        while data:
            if self.payload is not None:
                used, done = self._fill(self.payload, data)
            else:
                used, done = self._open(data)
            frames += done
            data = data[used:]
        return frames

    def _fill(self, payload: Payload, data: memoryview) -> tuple[int, list[Frame]]:
        used, frame = payload.fill(data)
        if frame is None:
            return used, []
        self.payload = None
        return used, [frame]

    def _open(self, data: bytes | bytearray | memoryview) -> tuple[int, list[Frame]]:
        """Begin a frame at the start of `data`, and finish it if all of it is there."""
        if self._head or len(data) < PREFIX_BYTES:
            return self._open_in_pieces(memoryview(data))
        kind, header_bytes, payload_bytes, checksum = self._check_prefix(data)
        start = PREFIX_BYTES + header_bytes
        if len(data) < start:
            return self._open_in_pieces(memoryview(data))
        message = self._check_header(kind, bytes(data[PREFIX_BYTES:start]), payload_bytes, checksum)
        end = start + payload_bytes
        if not kind.has_payload:
            return end, [Frame(message, b"", [])]
        if len(data) >= end:
            return end, [take_whole(message, data, start, self._memory)]
        self.payload = Payload(message, self._memory)
        return start, []

    def _open_in_pieces(self, data: memoryview) -> tuple[int, list[Frame]]:
        """Collect prefix and header that arrive in several chunks."""
        head = self._head
        used = self._collect(PREFIX_BYTES, data)
        if len(head) < PREFIX_BYTES:
            return used, []
        kind, header_bytes, payload_bytes, checksum = self._check_prefix(head)
        used += self._collect(PREFIX_BYTES + header_bytes, data[used:])
        if len(head) < PREFIX_BYTES + header_bytes:
            return used, []
        self._head, header = bytearray(), bytes(head[PREFIX_BYTES:])
        message = self._check_header(kind, header, payload_bytes, checksum)
        if not kind.has_payload:
            return used, [Frame(message, b"", [])]
        self.payload = Payload(message, self._memory)
        more, frames = self._fill(self.payload, data[used:])
        return used + more, frames

    def _collect(self, up_to: int, data: memoryview) -> int:
        size = max(0, min(up_to - len(self._head), len(data)))
        self._head += data[:size]
        return size

    def _check_prefix(self, data: bytes | bytearray | memoryview) -> tuple[_Kind, int, int, int]:
        front, header_bytes, payload_bytes, checksum = _PREFIX.unpack_from(data)
        kind = _BY_FRONT.get(front)
        if kind is None or kind.type not in self.accept:
            raise DecodeError(_explain_front(front))
        limits = self._limits
        if header_bytes > (limits.handshake_bytes if kind.is_in_handshake else limits.header_bytes):
            raise LimitExceeded(f"a header of {header_bytes} bytes is larger than this worker accepts")
        if payload_bytes:
            if not kind.has_payload:
                raise DecodeError(f"a {kind.name} message has no payload")
            if payload_bytes > limits.frame_bytes:
                raise LimitExceeded(f"a payload of {payload_bytes} bytes; at most {limits.frame_bytes} are accepted")
        return kind, header_bytes, payload_bytes, checksum

    def _check_header(self, kind: _Kind, header: bytes, payload_bytes: int, checksum: int) -> Any:
        # As in `encode`.
        if crc32(header, (kind.seed ^ payload_bytes ^ payload_bytes >> 32) & 0xFFFFFFFF) != checksum:
            raise DecodeError("the checksum of a frame does not fit its header")
        if len(header) > SCAN_FROM:
            check_structure(header, self._limits)
        try:
            message = kind.decode(header)
        except RecursionError as error:
            raise LimitExceeded("a header that is nested too deeply") from error
        except (ValueError, OverflowError) as error:  # msgspec's own errors are ValueErrors, as are Unicode's
            raise DecodeError(f"not a {kind.name} message: {error}") from error
        expected = kind.check(message, self._limits)
        if expected != payload_bytes:
            raise DecodeError(f"a payload of {payload_bytes} bytes whose parts have {expected}")
        # A second spelling of the same message could hide fields that nobody reads. Calls are hot, and cannot.
        if not kind.has_payload and _encode_header(message) != header:
            raise DecodeError(f"a {kind.name} message that is not in its one spelling")
        return message


def _explain_front(front: bytes) -> str:
    """What is wrong with the first eight bytes of a frame."""
    magic, version, number, flags, reserved = _FRONT.unpack(front)
    if magic != MAGIC:
        return f"a frame starts with {MAGIC!r}, not {magic!r}: the other side does not speak gradwire"
    if version != PROTOCOL_VERSION:
        return f"protocol version {version}; this worker speaks {PROTOCOL_VERSION}"
    if flags or reserved:
        return f"unknown frame flags {flags:#x}, {reserved:#x}"
    kind = MESSAGE_TYPES.get(number)
    name = "an unknown" if kind is None else f"a {kind.__name__}"
    return f"{name} message (type {number}) is not allowed at this point"
