"""A connection: frames in and out of a byte stream.

Sending captures: when `send` returns, every byte of the message is in the kernel or in shared memory, so the caller may
change its tensors. Several threads may send; frames never mix. Reading is for one thread at a time, whoever holds the
right to (see `gradwire.rpc.reader`), and goes straight into the final buffers where segments are large.

A frame may arrive before its shared memory is filled (see `_parcel`). It is handed out afterwards, a few microseconds later
as a rule. If that takes longer, `read_nowait` returns nothing new and `has_hidden_bytes` says that there is something to
come back for, so the deadlines of whoever reads count on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import select
import socket
import threading
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec
import torch

from gradwire.config import KIB, MIB, Limits
from gradwire.errors import ConnectionClosed, ConnectionLost, DecodeError, LimitExceeded, ResourceExhausted
from gradwire.transports.base import Buffer, Channel
from gradwire.transports.shared_memory import BorrowedSlots, BufferPool, Lease, LendingArena
from gradwire.wire import framing, tensors
from gradwire.wire.messages import Call, Message, Reply, TensorMeta

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


_SCRATCH_BYTES = 64 * KIB
_JOIN_BELOW = 16 * KIB  # below this, one copy is cheaper than a scatter-gather call
_FLUSH_S = 60.0
_FILL_S = 30.0  # for a frame's shared memory: time enough for a thread that must wait for the GIL of its process
_MAX_LOOKS = 300  # for the same, before sleeping: about a quarter of a millisecond, in which 1 MiB is copied
_SLEEP_MS = 1
_WITH_TENSORS = (Call, Reply)
_scratch = threading.local()
_yield_core = os.sched_yield


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """What the connections of one worker share."""

    limits: Limits = field(default_factory=Limits)
    shared_memory_from: int = 64 * KIB
    shared_dtypes: frozenset[int] = tensors.SHAREABLE_DTYPES["code"]
    pool: BufferPool = field(default_factory=lambda: BufferPool(256 * MIB))


class StreamConnection:
    """Frames over a `Channel`.

    Args:
        channel: Moves the bytes.
        options: Shared settings.
        slots: Shared memory that the other side lends, where the channel passes descriptors; then this side lends too.
        label: What to call the connection in errors, e.g. ``unix:///.../w1.sock``.
    """

    def __init__(self, channel: Channel, options: StreamOptions, *, slots: BorrowedSlots | None, label: str) -> None:
        self._channel = channel
        self._options = options
        self._slots = slots
        self._arena = LendingArena(options.limits.arena_bytes) if slots is not None else None
        self._shared_from = options.shared_memory_from
        self._max_bytes, self._max_tensors = options.limits.frame_bytes, options.limits.num_tensors
        self.label = label
        self.decoder = framing.FrameDecoder(
            options.limits,
            accept=frozenset(),
            allocate=options.pool.allocate,
            map_slot=slots.map_slot if slots is not None else None,
            shared_dtypes=options.shared_dtypes,
        )
        # One frame at a time on the wire; guards the three fields below. It knows its owner: see `_write`.
        self._write_lock: Any = threading.RLock()
        self._is_writing = False  # still set when the next one begins: Ctrl-C has cut a frame off
        self._held_back: list[bytes] = []
        self._num_held_back = 0
        self._closed = False
        self._unfilled: list[framing.Frame] = []  # complete but for shared memory, which the other side is filling
        self._fill_deadline = 0.0
        self.last_seen = time.time()
        self.bytes_sent = 0
        self.bytes_received = 0

    def __repr__(self) -> str:
        return f"<StreamConnection {self.label} {'closed' if self._closed else 'open'}>"

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def certified_names(self) -> frozenset[str] | None:
        """Worker names that the other side's certificate is good for; None without certificates."""
        return self._channel.certified_names()

    @property
    def can_vanish(self) -> bool:
        """Whether `is_vanished` must be asked now and then."""
        return self._channel.can_vanish

    def is_vanished(self) -> bool:
        """Whether the other machine seems to be gone although the connection still stands."""
        return self._channel.is_vanished()

    # -- sending -------------------------------------------------------------------------------------------------

    def send(
        self,
        message: Message,
        body: bytes = b"",
        values: Sequence[torch.Tensor] = (),
        deadline: float | None = None,
        hold_back: bool = False,
    ) -> None:
        """Writes one frame; returns when all of it has been captured.

        Args:
            message: The header.
            body: Encoded arguments.
            values: Tensors.
            deadline: In `time.monotonic` seconds.
            hold_back: A small frame may wait for the next one or for `flush`, whichever comes first.

        Raises:
            CannotSend: A tensor cannot travel; nothing was sent.
            LimitExceeded: The message is larger than `Limits.frame_bytes`; nothing was sent.
            TimeoutError: The deadline passed; a frame that was cut in the middle has closed the connection.
            ConnectionLost: The other side is gone.
            ConnectionClosed: This side had closed the connection.
        """
        if not values:
            if len(body) > self._max_bytes:
                self._refuse(len(body), 0)
            head = framing.encode(message, len(body))
            if len(body) >= _JOIN_BELOW:
                self._write([head, body], (), deadline)
            elif not (hold_back and self._hold_back(head + body)):
                self._write([head + body], (), deadline)
            return
        assert isinstance(message, _WITH_TENSORS)
        if len(values) > self._max_tensors:
            self._refuse(0, len(values))
        parcel, arena, options, is_out = Parcel(body), self._arena, self._options, False
        try:
            message.tensors = parcel.place(values, options.limits, arena, self._shared_from, options.shared_dtypes)
            if parcel.num_bytes > self._max_bytes:
                self._refuse(parcel.num_bytes, 0)
            buffers = [framing.encode(message, parcel.num_bytes), *parcel.buffers]
            if parcel.num_bytes < _JOIN_BELOW:
                buffers = [b"".join(buffers)]
            if parcel.leases:
                self._write(buffers, parcel.descriptors, deadline)
                is_out = True
                parcel.fill()
            elif not (hold_back and len(buffers) == 1 and self._hold_back(buffers[0])):
                self._write(buffers, parcel.descriptors, deadline)
        except BaseException as error:
            if parcel.leases and (is_out or not isinstance(error, Exception)):
                self.close()  # Ctrl-C: the message may be out, and its slots in use there
            for lease in parcel.leases:
                assert arena is not None
                arena.cancel(lease)
            raise
        finally:
            parcel.close_descriptors()

    def _refuse(self, num_bytes: int, num_tensors: int) -> NoReturn:
        """Refuses here what the other side would refuse there, where it would cost the connection."""
        if num_tensors:
            raise LimitExceeded(
                f"a message with {num_tensors:,} tensors exceeds Limits.num_tensors ({self._max_tensors:,}); stack them, "
                f"or raise the limit on both workers"
            )
        raise LimitExceeded(
            f"a message of {num_bytes:,} bytes exceeds Limits.frame_bytes ({self._max_bytes:,}); send it in "
            f"pieces or raise the limit on both workers"
        )

    def _hold_back(self, frame: bytes) -> bool:
        with self._write_lock:
            if self._closed or self._num_held_back + len(frame) > _JOIN_BELOW:
                return False  # if closed, whoever writes it is told
            self._held_back.append(frame)
            self._num_held_back += len(frame)
            return True

    @property
    def has_held_back(self) -> bool:
        """Whether frames wait for `flush`."""
        return bool(self._held_back)

    def flush(self, deadline: float | None = None) -> None:
        """Writes the frames that were held back.

        Raises:
            TimeoutError, ConnectionLost, ConnectionClosed: As `send`.
        """
        if self._held_back:
            self._write([], (), time.monotonic() + _FLUSH_S if deadline is None else deadline)

    def _write(self, buffers: list[Buffer], descriptors: Sequence[int], deadline: float | None) -> None:
        lock = self._write_lock
        held_back: list[Buffer] = []
        try:
            if not lock.acquire(False) and not lock.acquire(
                timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())
            ):
                raise TimeoutError(f"another message still occupies {self.label}")
            if self._is_writing or self._closed:  # Ctrl-C has cut off a message, or the end of the connection
                self.close()
                raise ConnectionClosed(f"{self.label} was closed here")
            held_back = self._held_back
            if held_back:
                buffers = [b"".join(held_back), *buffers]
                self._held_back, self._num_held_back = [], 0
            elif not buffers:
                return
            self._is_writing = True
            written = self._channel.write(buffers, descriptors)
            total = len(buffers[0]) if len(buffers) == 1 else sum(map(_num_bytes, buffers))
            self.bytes_sent += total
            if written != total:
                self._write_rest(buffers, descriptors, written, deadline)
            self._is_writing = False
        except ConnectionLost:
            self._is_writing = False
            if self._closed:
                raise ConnectionClosed(f"{self.label} was closed here") from None
            raise
        except TimeoutError:
            if held_back and not self._closed:  # not a byte has left: what was accepted before waits on
                self._held_back, self._num_held_back = held_back, len(buffers[0])
            raise
        except BaseException:
            if self._is_writing and lock._is_owned():  # Ctrl-C: nobody knows how much of the message is out
                self.close()
            raise
        finally:
            # Tried, because Ctrl-C may hit before anybody can note that the lock was taken; in one step, because asking
            # first would be one more place for it.
            try:  # noqa: SIM105
                lock.release()
            except RuntimeError:
                pass

    def _write_rest(
        self, buffers: list[Buffer], descriptors: Sequence[int], written: int | None, deadline: float | None
    ) -> None:
        rest: list[Buffer] = [memoryview(item).cast("B") for item in buffers if _num_bytes(item)]
        started = False
        try:
            while True:
                if written:
                    started, descriptors = True, ()
                    _skip(rest, written)
                if not rest:
                    return
                if written is None:
                    self._wait_writable(deadline)
                written = self._channel.write(rest, descriptors)
        except TimeoutError:
            if started or self._channel.holds_unsent():  # half a frame is out: nothing sensible can follow it
                self.close()
            else:
                self._is_writing = False
            raise

    def _wait_writable(self, deadline: float | None) -> None:
        reading = self._channel.write_waits_for_reading()
        descriptor = self._channel.fileno()
        if descriptor < 0:  # closed here a moment ago
            raise ConnectionLost(f"{self.label} ended")
        poller = select.poll()
        poller.register(descriptor, select.POLLIN if reading else select.POLLOUT)
        while not poller.poll(200):
            if self._closed:
                raise ConnectionLost(f"{self.label} ended")
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{self.label} took no bytes")

    # -- reading -------------------------------------------------------------------------------------------------

    def read_nowait(self) -> list[framing.Frame] | None:
        """Reads what is there: the frames it completed (maybe none), or None when nothing is there now.

        Raises:
            ConnectionLost: The other side ended the connection.
            ConnectionClosed: This side did.
            DecodeError: The bytes are no frames, or shared memory is never filled; close the connection.
        """
        if self._unfilled:
            return self._wait_filled()
        decoder = self.decoder
        target = decoder.writable() if decoder.payload is not None else None  # mostly there is none to be asked
        if target is None:
            try:
                scratch = _scratch.buffer
            except AttributeError:
                scratch = _scratch.buffer = memoryview(bytearray(_SCRATCH_BYTES))
        try:
            num_bytes = self._channel.read_into(scratch if target is None else target)
        except ConnectionLost:
            if self._closed:
                raise ConnectionClosed(f"{self.label} was closed here") from None
            raise
        if num_bytes is None:
            return None
        if num_bytes == 0:
            if self._closed:
                raise ConnectionClosed(f"{self.label} was closed here")
            raise ConnectionLost(f"{self.label} was ended by the other side")
        self.bytes_received += num_bytes
        frames = decoder.advance(num_bytes) if target is not None else decoder.feed(scratch[:num_bytes])
        if self._slots is not None and self._slots.unfilled:
            return self._look_filled(frames)
        return frames

    def _look_filled(self, frames: list[framing.Frame]) -> list[framing.Frame]:
        """The frames if their shared memory is filled soon; else they are kept."""
        assert self._slots is not None
        are_filled = self._slots.are_filled
        for _ in range(_MAX_LOOKS):
            if are_filled():
                return frames
            _yield_core()
        self._unfilled, self._fill_deadline = frames, time.monotonic() + _FILL_S
        return []

    def _wait_filled(self) -> list[framing.Frame]:
        """The frames that were kept, or none if their shared memory is not filled within a moment.

        Nothing can be waited for but the end of the connection.
        """
        assert self._slots is not None
        has_ended = _has_hung_up(self._channel.fileno(), _SLEEP_MS)  # asked first: what was filled before it counts
        if self._closed:
            raise ConnectionClosed(f"{self.label} was closed here")
        if self._slots.are_filled():
            frames, self._unfilled = self._unfilled, []
            return frames
        if has_ended:
            raise ConnectionLost(f"{self.label} was ended by the other side")
        if time.monotonic() > self._fill_deadline:
            raise DecodeError(f"shared memory that was announced was not filled within {_FILL_S:g} s")
        return []

    def has_hidden_bytes(self) -> bool:
        """Whether something can be read that waiting for the descriptor would not show (TLS decrypts ahead)."""
        return bool(self._unfilled) or self._channel.has_hidden_bytes()

    def wait_readable(self, timeout_s: float) -> bool:
        """Whether something can be read within that time (or the connection ended)."""
        return wait_readable(self._channel.fileno(), timeout_s)

    def receive(self, deadline: float) -> framing.Frame:
        """The next frame, for the handshake of the side that connects.

        Raises:
            TimeoutError: Nothing came before the deadline.
            ConnectionLost, ConnectionClosed, DecodeError: As `read_nowait`.
        """
        while True:
            frames = self.read_nowait()
            if frames:
                if len(frames) > 1:
                    raise DecodeError(f"{len(frames)} messages at once in a handshake, which takes turns")
                return frames[0]
            if frames is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no answer from {self.label}")
                self.wait_readable(min(left, 0.2))

    def close(self) -> None:
        """Ends the connection. Tensors that came through its shared memory stay valid. Idempotent."""
        self._closed = True
        self._channel.close()  # each step can be repeated: Ctrl-C may have cut the first attempt off
        self._unfilled = []
        if self._arena is not None:
            self._arena.close()
        if self._slots is not None:
            self._slots.close()

    def statistics(self) -> StreamStatistics:
        """Bytes moved so far and what the shared memory holds."""
        return StreamStatistics(
            label=self.label,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            arena=self._arena.statistics() if self._arena is not None else None,
        )


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """A snapshot of one connection."""

    label: str
    bytes_sent: int
    bytes_received: int
    arena: Any


def wait_readable(descriptor: int, timeout_s: float) -> bool:
    """Whether the descriptor can be read (or was hung up) within that time."""
    if descriptor < 0:
        return True
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(max(0.0, timeout_s * 1000)))


def _has_hung_up(descriptor: int, timeout_ms: int) -> bool:
    """Whether the other side has closed its socket, or does so within that time; unread bytes do not hide it."""
    if descriptor < 0:
        return True
    poller = select.poll()
    poller.register(descriptor, 0)
    return bool(poller.poll(timeout_ms))


def _num_bytes(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


def _skip(buffers: list[Buffer], num_bytes: int) -> None:
    """Drops the first `num_bytes` of the buffers, in place."""
    while num_bytes:
        size = _num_bytes(buffers[0])
        if num_bytes < size:
            buffers[0] = buffers[0][num_bytes:]
            return
        num_bytes -= size
        del buffers[0]


_MAX_BUFFERS = 512  # the kernel takes 1,024 pieces in one call


class PlainChannel:
    """Bytes over a connected socket; serves `inproc` and unencrypted loopback `tcp`."""

    can_vanish = False  # on one machine the kernel reports the end of a process at once

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock

    def fileno(self) -> int:
        return self._socket.fileno()

    def read_into(self, buffer: Buffer) -> int | None:
        try:
            return self._socket.recv_into(buffer)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionLost(f"the connection broke while reading: {error}") from error

    def write(self, buffers: Sequence[Buffer], descriptors: Sequence[int]) -> int | None:
        try:
            if len(buffers) == 1:
                return self._socket.send(buffers[0])
            return self._socket.sendmsg(buffers[:_MAX_BUFFERS])
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionLost(f"the connection broke while writing: {error}") from error

    def write_waits_for_reading(self) -> bool:
        return False

    def holds_unsent(self) -> bool:
        return False

    def has_hidden_bytes(self) -> bool:
        return False

    def certified_names(self) -> frozenset[str] | None:
        return None

    def is_vanished(self) -> bool:
        return False

    def close(self) -> None:
        end(self._socket)


def check_exhausted(error: OSError) -> None:
    """Tells a process that is out of descriptors from another side that is not there.

    Raises:
        ResourceExhausted: The process is out of descriptors or memory; try again later.
    """
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
        raise ResourceExhausted(f"no connection can be opened: {error}; raise the limit (ulimit -n)") from error


def end(sock: socket.socket) -> None:
    """Ends a connection so that a thread waiting for it wakes up, then closes its descriptor."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        sock.close()
