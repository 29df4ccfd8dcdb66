"""A connection: frames in and out of a byte stream.

Sending captures: when `send` returns, every byte of the message is in the kernel or in shared memory, so the caller may
change its tensors. Several threads may send; frames never mix. One thread at a time reads, the one that holds the reader
(see `gradwire.rpc.reader`), and large segments are read straight into their final buffers.

A frame may arrive before its shared memory is filled (`_SharedParts`). It is handed out afterwards, a few microseconds later
as a rule. If that takes longer, `read_nowait` returns nothing new and `has_hidden_bytes` is true, so that the reader comes
back for it and its deadlines count on.

All transports are byte streams under one `StreamConnection`. They differ in the `Channel`, which moves bytes: a socket,
a Unix socket that also passes descriptors of shared memory, or TLS.
"""

from __future__ import annotations

import array
import contextlib
import errno
import functools
import os
import platform
import select
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from gradwire import _interrupts
from gradwire.config import KIB, MIB, Limits
from gradwire.errors import ConnectionClosed, ConnectionLost, DecodeError, LimitExceeded, ResourceExhausted
from gradwire.transports.buffer_pool import BufferPool
from gradwire.transports.shared_memory import BorrowedSlots, Lease, LendingArena
from gradwire.wire.devices import DeviceNames
from gradwire.wire.framing import Frame, FrameDecoder, encode
from gradwire.wire.messages import Message, TensorMeta
from gradwire.wire.tensors import SHAREABLE_DTYPES, address_of, as_bytes, copy_into, describe

if TYPE_CHECKING:
    from gradwire.wire.device_copies import HostCopies

Buffer = Any
"""An object with the buffer protocol (Python 3.10 and 3.11 have no type for it)."""

_SCRATCH_BYTES = 64 * KIB
_JOIN_BELOW = 16 * KIB  # below this, one copy is cheaper than a scatter-gather call
_FLUSH_S = 60.0
_FILL_S = 30.0  # for a frame's shared memory: time enough for a thread that must wait for the GIL of its process
_MAX_LOOKS = 300  # for the same, before sleeping: about a quarter of a millisecond, in which 1 MiB is copied
_SLEEP_MS = 1
_SLICE_S = 0.05  # how long a thread waits for its turn to write before it looks for a deferred Ctrl-C
_scratch = threading.local()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Resources shared by the connections of one worker."""

    limits: Limits = field(default_factory=Limits)
    shared_memory_from: int = 64 * KIB
    shared_dtypes: frozenset[int] = SHAREABLE_DTYPES["code"]
    pool: BufferPool = field(default_factory=lambda: BufferPool(256 * MIB))


class StreamConnection:
    """Sends and receives frames over a `Channel`.

    Args:
        slots: Shared memory lent by the peer, if the channel passes descriptors; this side then lends some as well.
        label: Name of the connection in errors, e.g. ``unix:///.../w1.sock``.
    """

    def __init__(self, channel: Channel, options: StreamOptions, *, slots: BorrowedSlots | None, label: str) -> None:
        limits = options.limits
        self.channel = channel
        self._hides_bytes = channel.hides_bytes
        self._limits = limits
        self._slots = slots
        self.arena = LendingArena(limits.arena_bytes) if slots is not None else None
        self._shared_from: float = options.shared_memory_from if slots is not None else float("inf")
        self._shared_dtypes = options.shared_dtypes
        self.label = label
        self.decoder = FrameDecoder(
            limits,
            accept=frozenset(),
            allocate=options.pool.allocate,
            allocate_pinned=options.pool.allocate_pinned,
            map_slot=slots.map_slot if slots is not None else None,
            map_pinned_slot=slots.map_pinned_slot if slots is not None else None,
            shared_dtypes=options.shared_dtypes,
        )
        self._write_lock = threading.Lock()  # one frame at a time on the wire; guards the three fields below
        self._held_back: list[bytes] = []
        self._num_held_back = 0  # bytes
        self._write_error: str | None = None
        self.is_closed = False
        self._unfilled: list[Frame] = []  # complete but for shared memory, which the other side is filling
        self._fill_deadline = 0.0
        self.bytes_sent = 0
        self.bytes_received = 0

    def __repr__(self) -> str:
        return f"<StreamConnection {self.label} {'closed' if self.is_closed else 'open'}>"

    def fileno(self) -> int:
        return self.channel.fileno()

    def traffic(self) -> tuple[int, int]:
        """Return how many bytes were sent and received, those in shared memory included."""
        num_lent = 0 if self.arena is None else self.arena.num_bytes_lent
        num_borrowed = 0 if self._slots is None else self._slots.num_bytes_borrowed
        return self.bytes_sent + num_lent, self.bytes_received + num_borrowed

    def send(
        self,
        message: Message,
        body: bytes = b"",
        values: Sequence[torch.Tensor] = (),
        deadline: float | None = None,
        hold_back: bool = False,
        devices: DeviceNames | None = None,
    ) -> None:
        """Write one frame; return when all of it has been captured. The ``tensors`` of its header are set here.

        Args:
            hold_back: Whether a small frame may be held until the next one or `flush`, whichever comes first.
            devices: The receiver's name for each device here; None if they are the same.

        Raises:
            CannotSend: A tensor cannot be sent; nothing was sent.
            LimitExceeded: The message is larger than `Limits.frame_bytes`; nothing was sent.
            TimeoutError: The deadline passed; if a frame was partly sent, the connection is closed.
            ConnectionLost: The peer has closed the connection.
            ConnectionClosed: This side has closed the connection.
        """
        limits, shared, copies, is_out = self._limits, None, None, False
        buffers: list[Buffer] = [body]
        num_bytes = len(body)
        try:
            if values:
                if len(values) > limits.num_tensors:
                    raise LimitExceeded(
                        f"a message with {len(values):,} tensors exceeds Limits.num_tensors ({limits.num_tensors:,}); "
                        f"stack them, or raise the limit on both workers"
                    )
                metas, owners = [], []  # owners keep the memory behind the buffers alive
                for value in values:
                    meta, parts = describe(value, limits, devices)
                    metas.append(meta)
                    is_on_device = (meta.device or devices is not None) and bool(parts) and not parts[0].is_cpu
                    if is_on_device and copies is None:
                        copies = start_copies()
                    # Sparse tensors have no bytes of their own, and so stay out of shared memory.
                    if meta.num_bytes >= self._shared_from and meta.dtype in self._shared_dtypes:
                        assert self.arena is not None
                        shared = shared or _SharedParts(self.arena)
                        if shared.place(meta, parts, copies if is_on_device else None):
                            continue
                    for part in parts:
                        view, owner = copies.launch_bytes(part) if is_on_device else as_bytes(part)  # type: ignore[union-attr]
                        buffers.append(view)
                        owners.append(owner)
                        num_bytes += len(view)
                message.tensors = tuple(metas)  # type: ignore[union-attr]
            if num_bytes > limits.frame_bytes:  # the other side would refuse it, and end the connection
                raise LimitExceeded(
                    f"a message of {num_bytes:,} bytes exceeds Limits.frame_bytes ({limits.frame_bytes:,}); send it in "
                    f"pieces or raise the limit on both workers"
                )
            if copies is not None:
                copies.wait(deadline)
            buffers.insert(0, encode(message, num_bytes))
            if num_bytes < _JOIN_BELOW:
                buffers = [b"".join(buffers)]
            if shared is not None:
                self._write(buffers, shared.descriptors, deadline)
                is_out = True
                shared.fill()  # the lock is free, so another thread may send its frame at the same time
            elif not (hold_back and self._hold_back(buffers)):
                self._write(buffers, (), deadline)
        finally:
            if shared is not None:
                if is_out and not shared.is_filled:  # the receiver waits for bytes that will not come
                    self.close()
                shared.close(copies)

    def _hold_back(self, buffers: list[Buffer]) -> bool:
        if not self._write_lock.acquire(False):
            return False  # another thread writes: `_write` waits for the turn
        try:
            num_bytes = self._num_held_back + len(buffers[0])
            if self.is_closed or len(buffers) > 1 or num_bytes > _JOIN_BELOW:
                return False  # if closed, writing it raises the error
            self._held_back.append(buffers[0])
            self._num_held_back = num_bytes
            return True
        finally:
            self._write_lock.release()

    @property
    def has_held_back(self) -> bool:
        return bool(self._held_back)

    def flush(self, deadline: float | None = None) -> None:
        """Write the frames that were held back."""
        if self._held_back:
            self._write([], (), time.monotonic() + _FLUSH_S if deadline is None else deadline)

    def _write(self, buffers: list[Buffer], descriptors: Sequence[int], deadline: float | None) -> None:
        """Write all of the buffers.

        An exception of any kind in the middle of it, KeyboardInterrupt included, closes the connection: nothing sensible
        can follow half a frame. One before the first byte does not, and frames that were held back wait on.
        """
        lock, channel = self._write_lock, self.channel
        if not lock.acquire(False):
            self._wait_for_turn(deadline)
        is_cut = False  # whether part of a frame may be out
        try:
            if self.is_closed:
                raise ConnectionClosed(f"{self.label} was closed by this worker")
            if self._write_error is not None:
                raise ConnectionLost(self._write_error)
            if self._held_back:
                buffers = [b"".join(self._held_back), *buffers]
            elif not buffers:
                return
            is_cut = True
            while (written := channel.write(buffers, descriptors)) is None and not channel.holds_unsent():
                is_cut = False
                self._wait_writable(deadline)
                is_cut = True
            if self._held_back:
                self._held_back, self._num_held_back = [], 0
            total = len(buffers[0]) if len(buffers) == 1 else sum(map(_num_bytes, buffers))
            self.bytes_sent += total
            if written != total:
                self._write_rest(buffers, written or 0, deadline)
            is_cut = False
        except ConnectionLost as error:
            is_cut = False  # it is closed, but data received before that can still be read
            self._write_error = str(error)  # part of a frame may be out, so nothing may follow
            if self.is_closed:
                raise ConnectionClosed(f"{self.label} was closed by this worker") from None
            raise
        finally:
            if is_cut:
                self.close()
            lock.release()

    def _wait_for_turn(self, deadline: float | None) -> None:
        left = _SLICE_S
        while not self._write_lock.acquire(timeout=left):
            _interrupts.deliver()
            if deadline is not None:
                left = min(_SLICE_S, deadline - time.monotonic())
                if left <= 0:
                    raise TimeoutError(f"another message is still being sent on {self.label}")

    def _write_rest(self, buffers: list[Buffer], written: int, deadline: float | None) -> None:
        rest: list[Buffer] = [memoryview(item).cast("B") for item in buffers]
        while True:
            while rest and written >= len(rest[0]):
                written -= len(rest.pop(0))
            if not rest:
                return
            rest[0] = rest[0][written:]
            step = self.channel.write(rest, ())
            if step is None:
                self._wait_writable(deadline)
            written = step or 0

    def _wait_writable(self, deadline: float | None) -> None:
        event = select.POLLIN if self.channel.write_waits_for_reading() else select.POLLOUT
        while not _poll(self.channel.fileno(), event, 200):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{self.label} accepted no bytes")
        if self.is_closed:
            raise ConnectionLost(f"{self.label} ended")

    def read_nowait(self) -> list[Frame] | None:
        """Read available bytes; return the completed frames (possibly none), or None if no bytes are available.

        Raises:
            ConnectionLost: The peer has closed the connection.
            ConnectionClosed: This side has closed it.
            DecodeError: The bytes are not frames, or shared memory is never filled; close the connection.
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
            num_bytes = self.channel.read_into(scratch if target is None else target)
        except ConnectionLost:
            if self.is_closed:
                raise ConnectionClosed(f"{self.label} was closed by this worker") from None
            raise
        if num_bytes is None:
            return None
        if num_bytes == 0:
            if self.is_closed:
                raise ConnectionClosed(f"{self.label} was closed by this worker")
            raise ConnectionLost(f"{self.label} was closed by the peer")
        self.bytes_received += num_bytes
        frames = decoder.advance(num_bytes) if target is not None else decoder.feed(scratch[:num_bytes])
        if self._slots is not None and self._slots.unfilled:
            return self._look_filled(frames)
        return frames

    def _look_filled(self, frames: list[Frame]) -> list[Frame]:
        """Return the frames if their shared memory is filled soon; else keep them."""
        assert self._slots is not None
        are_filled = self._slots.are_filled
        for _ in range(_MAX_LOOKS):
            if are_filled():
                return frames
            os.sched_yield()
        self._unfilled, self._fill_deadline = frames, time.monotonic() + _FILL_S
        return []

    def _wait_filled(self) -> list[Frame]:
        """Return the frames that wait for shared memory, or none if it is not filled within a moment.

        Nothing can be waited for but the end of the connection.
        """
        assert self._slots is not None
        # Asked first: what was filled before the end counts. Without an event to wait for, unread bytes do not hide it.
        has_ended = _poll(self.channel.fileno(), 0, _SLEEP_MS)
        if self.is_closed:
            raise ConnectionClosed(f"{self.label} was closed by this worker")
        if self._slots.are_filled():
            frames, self._unfilled = self._unfilled, []
            return frames
        if has_ended:
            raise ConnectionLost(f"{self.label} was closed by the peer")
        if time.monotonic() > self._fill_deadline:
            raise DecodeError(f"announced shared memory was not filled within {_FILL_S:g} s")
        return []

    def has_hidden_bytes(self) -> bool:
        """Return whether something can be read that waiting for the descriptor would not show (TLS decrypts ahead)."""
        return bool(self._unfilled) or (self._hides_bytes and self.channel.has_hidden_bytes())

    def wait_readable(self, timeout_s: float) -> bool:
        """Return whether something can be read within that time (or the connection closed)."""
        return _poll(self.channel.fileno(), select.POLLIN, timeout_s * 1000)

    def receive(self, deadline: float) -> Frame:
        """Return the next frame, for the handshake of the side that connects."""
        while True:
            frames = self.read_nowait()
            if frames:
                if len(frames) > 1:
                    raise DecodeError(
                        f"received {len(frames)} messages at once in a handshake, which allows one at a time"
                    )
                return frames[0]
            if frames is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no answer from {self.label}")
                self.wait_readable(min(left, 0.2))

    def close(self) -> None:
        """Close the connection. Tensors received through its shared memory stay valid. Idempotent."""
        self.is_closed = True
        self.channel.close()
        self._unfilled = []
        if self.arena is not None:
            self.arena.close()
        if self._slots is not None:
            self._slots.close()


def start_copies() -> HostCopies:
    """Make ready for the tensors of a message that are on devices; most programs have none, and never import this."""
    from gradwire.wire import device_copies

    return device_copies.HostCopies()


_COPY_IN_PARALLEL_FROM = 8 * MIB  # from here on torch's copy pays, which uses several cores
_MAX_LEASES = 64
_MAX_DESCRIPTORS = 64  # the receiver's limit; the kernel accepts 253 with one frame
# Whether another core that sees a store also sees those before it; elsewhere it takes the system call that sends a frame.
_ORDERS_STORES = platform.machine() in ("x86_64", "AMD64")
# At this size the copy takes about as long as the receiver may look for its end instead of sleeping, and what early
# announcing saves (the time to decode a frame) is little beside it. With one core there is nothing to overlap.
_ANNOUNCED_BYTES = MIB if _ORDERS_STORES and len(os.sched_getaffinity(0)) > 1 else 0


class _SharedParts:
    """The parts of one message that are in shared memory.

    Attributes:
        descriptors: Descriptors of new slots that the peer may use later.
        is_filled: Whether the bytes of all parts have been copied; set by `fill`, after the frame is sent.
    """

    def __init__(self, arena: LendingArena) -> None:
        self.descriptors: list[int] = []
        self.is_filled = False
        self._arena = arena
        self._leases: list[Lease] = []
        self._unfilled: list[tuple[Lease, int]] = []  # announced, with the address of the bytes to be copied
        self._owners: list[torch.Tensor] = []  # keeps the memory behind the addresses alive
        self._num_bytes = 0  # of all leases
        self._copied: list[Lease] = []  # those that a device writes to

    def place(self, meta: TensorMeta, parts: Sequence[torch.Tensor], copies: HostCopies | None) -> bool:
        """Assign a slot to a dense tensor and record it in its metadata; return False if there is no slot for it.

        Args:
            copies: For a tensor on a device, which is in its slot once they have been waited for.
        """
        lease = self._arena.lend(meta.num_bytes) if len(self._leases) < _MAX_LEASES else None
        if lease is None:
            descriptor = self._arena.offer(meta.num_bytes) if len(self.descriptors) < _MAX_DESCRIPTORS else None
            if descriptor is not None:
                self.descriptors.append(descriptor)
            return False
        self._leases.append(lease)
        self._num_bytes += lease.num_bytes
        # Everything that may fail is done here, so that a frame that has left can be followed by its bytes.
        (part,) = parts
        if copies is not None:
            self._copied.append(lease)
            lease.place.pin()
            copies.launch(part, lease.target)
            msgspec.structs.force_setattr(meta, "slot", lease.slot)
            return True
        is_simple = lease.num_bytes < _COPY_IN_PARALLEL_FROM and part.is_contiguous()
        address = address_of(part) if is_simple else 0
        if not address:
            copy_into(part, lease.target)
            lease.mark_filled()
        elif self._num_bytes > _ANNOUNCED_BYTES:
            lease.fill(address)
        else:
            self._owners.append(part)
            self._unfilled.append((lease, address))
        msgspec.structs.force_setattr(meta, "slot", lease.slot)  # `describe` made it for this message
        return True

    def fill(self) -> None:
        for lease, address in self._unfilled:
            lease.fill(address)
        for lease in self._copied:
            lease.mark_filled()
        self.is_filled = True

    def close(self, copies: HostCopies | None) -> None:
        """Close the descriptors, of which the peer has its own copies, and cancel leases that were not sent."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        if not self.is_filled:
            self._cancel([lease for lease in self._leases if lease not in self._copied])
            if copies is not None and self._copied:  # a device may still be writing to these
                copies.abandon(functools.partial(self._cancel, self._copied))

    def _cancel(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self._arena.cancel(lease)


_MAX_BUFFERS = 512  # the kernel takes 1,024 pieces in one call
_CANNOT_PASS = (errno.ETOOMANYREFS, errno.ENOMEM, errno.ENOBUFS, errno.EMFILE)  # descriptors; bytes may still go


class Channel:
    """Moves the bytes of one connection over a socket, without ever blocking.

    One thread reads and one writes at a time; they may be different ones.

    Attributes:
        can_vanish: Whether the peer can disappear without an event on the descriptor; see `is_vanished`.
        hides_bytes: Whether `has_hidden_bytes` must be checked.
    """

    can_vanish = False  # on one machine the kernel reports the end of a process at once
    hides_bytes = False

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock

    def fileno(self) -> int:
        return self._socket.fileno()

    def read_into(self, buffer: Buffer) -> int | None:
        """Return the number of bytes read; 0 at the end of the stream; None if no bytes are available.

        Raises:
            ConnectionLost: The connection broke.
        """
        try:
            return self._socket.recv_into(buffer)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionLost(f"the connection broke while reading: {error}") from error

    def write(self, buffers: Sequence[Buffer], descriptors: Sequence[int]) -> int | None:
        """Return the number of bytes written, which may be fewer than given; None if there is no room.

        Raises:
            ConnectionLost: The connection broke.
        """
        try:
            if descriptors:  # only on Unix sockets
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
                try:
                    return self._socket.sendmsg(buffers[:_MAX_BUFFERS], [rights])
                except OSError as error:
                    if error.errno not in _CANNOT_PASS:
                        raise
            if len(buffers) == 1:
                return self._socket.send(buffers[0])
            return self._socket.sendmsg(buffers[:_MAX_BUFFERS])
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionLost(f"the connection broke while writing: {error}") from error

    def write_waits_for_reading(self) -> bool:
        """Return whether the last `write` stopped because it must read first (a TLS handshake does that)."""
        return False

    def holds_unsent(self) -> bool:
        """Return whether the last `write` accepted bytes that it did not report (TLS cannot return a record)."""
        return False

    def has_hidden_bytes(self) -> bool:
        """Return whether bytes were taken from the descriptor but not read yet (TLS decrypts ahead)."""
        return False

    def certified_names(self) -> frozenset[str] | None:
        """Return the worker names that the peer's certificate is valid for; None without certificates."""
        return None

    def is_vanished(self) -> bool:
        """Return whether the other machine has acknowledged nothing for seconds, although data is outstanding.

        Must be polled if `can_vanish`: there is no event for it.
        """
        return False

    def close(self) -> None:
        """Close the connection and wake up a thread that waits for the descriptor. Idempotent."""
        end_socket(self._socket)


class SocketListener:
    """Accepts connections of one listening socket."""

    def __init__(self, sock: socket.socket, uri: str, options: StreamOptions) -> None:
        sock.setblocking(False)
        self.uri = uri
        self._socket = sock
        self._options = options

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept_socket(self) -> socket.socket | None:
        """Return the next connected socket, or None when there is none now."""
        try:
            return self._socket.accept()[0]
        except OSError as error:
            check_exhausted(error)
            return None

    def close(self) -> None:
        end_socket(self._socket)


def _poll(descriptor: int, events: int, timeout_ms: float) -> bool:
    """Return whether an event or the end of the connection comes within that time."""
    if descriptor < 0:
        return True
    poller = select.poll()
    poller.register(descriptor, events)
    return bool(_interrupts.poll(poller, max(0.0, timeout_ms)))


def _num_bytes(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


def check_exhausted(error: OSError) -> None:
    """Distinguish running out of descriptors from a peer that does not listen."""
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
        has_few_descriptors = error.errno in (errno.EMFILE, errno.ENFILE)
        step = "raise the limit (ulimit -n)" if has_few_descriptors else "free some memory on this machine"
        raise ResourceExhausted(f"cannot open a connection: {error}; {step}") from error


def end_socket(sock: socket.socket) -> None:
    """Shut a connection down, which wakes up waiting threads, then close its descriptor."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        sock.close()
