"""The right to read a connection: one thread at a time holds it.

    service thread   event -> hold -> read, run, read, run ... -> nothing left -> arm -> release
    waiting caller   hold -> read until its own reply has arrived -> arm if others still wait -> release
    backward pass    hold several -> read, handle frames of the pass, read ... -> arm -> release
    clock            holder stuck in user code -> take over: another thread reads the rest

Frames that were read but not yet handled are kept in the inbox, so that the next holder continues where the last stopped.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from gradwire import _interrupts
from gradwire.errors import ConnectionClosed, ConnectionLost, DecodeError, TransportError
from gradwire.observe.log import get_logger
from gradwire.rpc.reactor import Reactor, busy
from gradwire.transports.stream import StreamConnection
from gradwire.wire.framing import Frame
from gradwire.wire.messages import Call, Goodbye, Refused, Reply

if TYPE_CHECKING:
    from gradwire.rpc.connection import Request
    from gradwire.rpc.pending_calls import PendingCall

_log = get_logger(__name__)
_LOOK_S = 0.2  # how often a waiting thread checks whether another thread has completed the call
_REST_S = 1.0  # until everything is read that a peer sent before it closed the connection
_REST_LOOK_S = 0.002
_TELL_S = 0.1  # until another thread has told of the end; it may run callbacks that wait for the calling thread
_NEVER = float("inf")
_LINGER_S = 0.05  # how long a service thread stays with a connection after a request

# When threads busy-poll: see `_Poller.wait`.
_MAX_LOOKS = 500 if len(os.sched_getaffinity(0)) > 1 else 0  # about 0.6 ms: a call with a tensor of 256 KiB, and some
_FEW_LOOKS = 60
_SHORT_S = 0.0003
_yield_core = os.sched_yield
_looking = threading.Lock()  # held by the one thread of this process that busy-polls


Hold = tuple["Reader", int]
"""A connection, and the epoch in which a thread holds it."""


class _Current(threading.local):
    request: Request | None = None  # the request that the current thread serves
    holds: Sequence[Hold] = ()  # the connections that it holds


current = _Current()


class Until:
    """A goal of `Reader.read_until` that a function decides about."""

    __slots__ = ("_is_over",)

    def __init__(self, is_over: Callable[[], object]) -> None:
        self._is_over = is_over

    @property
    def is_over(self) -> object:
        return self._is_over()


class _Poller:
    """Waits until any of some connections can be read; only for their holder."""

    def __init__(self, descriptors: Iterable[int]) -> None:
        self._poller = select.poll()
        for descriptor in descriptors:
            self._poller.register(descriptor, select.POLLIN)
        self._num_looks = _MAX_LOOKS

    def wait(self, timeout_s: float) -> list[tuple[int, int]]:
        """Return the readable descriptors with their events; empty if there are none within that time.

        Sleeping and waking up cost more than a short call. So busy-poll first if recent waits were short and nothing else
        in this process wants to run: for twice as many polls as the last success took, halved by each failure.
        """
        if self._num_looks and _looking.acquire(False):
            try:
                num_taken, found = _busy_poll(self._poller.poll, self._num_looks)
            finally:
                _looking.release()
            if found:
                self._num_looks = min(_MAX_LOOKS, 2 * num_taken + _FEW_LOOKS)
                return found
        began = time.monotonic()
        ready: list[tuple[int, int]] = _interrupts.poll(self._poller, timeout_s * 1000)
        was_short = bool(ready) and time.monotonic() - began < _SHORT_S
        self._num_looks = _MAX_LOOKS if was_short else self._num_looks // 2
        return ready


class Reader:
    """Reads one connection, in a waiting caller or in a thread of `reactor`.

    Args:
        on_frame: Handles a frame; may run user code after `allow_take_over`.
        on_end: Called once when the connection ends, with the reason.
        wants_reading: Whether data is expected; otherwise the connection is only watched for its end. None: always.

    Attributes:
        inbox: Frames that were read but not handled yet.
        is_lingered_on: Whether a service thread may stay with the connection after a request.
        will_flush: A service thread is handling frames and will then send frames that were held back.
        must_flush: Set after a frame may have been held back.
    """

    def __init__(
        self,
        stream: StreamConnection,
        reactor: Reactor,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[Exception], None],
        wants_reading: Callable[[], object] | None = None,
    ) -> None:
        self.stream = stream
        self.reactor = reactor
        self.on_frame = on_frame
        self._on_end = on_end
        self._wants_reading = wants_reading
        self._fd = stream.fileno()
        self.inbox: collections.deque[Frame] = collections.deque()
        self._poller = _Poller([self._fd])
        self._lock = threading.Lock()  # guards the five fields below
        self._held = False
        self._epoch = 0  # rises with every hold and take-over
        self._armed = False
        self._is_watched = False  # for its end at least; not since the last event
        self.has_ended = False
        self._will_end = False  # a thread waits for the rest to be read
        self._is_end_told = False  # `on_end` has returned
        self._busy_since = 0.0
        self.will_flush = False
        self.must_flush = False
        self.is_lingered_on = True

    def start(self) -> None:
        self._armed = self._wants_reading is None or bool(self._wants_reading())
        self._is_watched = True
        self.reactor.add(self._fd, self._on_ready, armed=self._armed)

    def ensure_watched(self) -> None:
        """Expect something from now on: the holder of the connection sees to it, or else a service thread."""
        with self._lock:
            if not (self._held or self._armed or self.has_ended):
                self._armed = self._is_watched = True
                self.reactor.arm(self._fd)

    def _on_ready(self) -> None:
        """Read and run until nothing is left or another thread has taken over."""
        with self._lock:
            self._armed = self._is_watched = False
            if self._held or self.has_ended:
                return  # the holder arms it again
            self._held = True
            self._busy_since = 0.0
            self._epoch += 1
            epoch = self._epoch
        inbox, num_read, lock = self.inbox, 0, self._lock
        current.holds = ((self, epoch),)
        self._enter()
        try:
            while True:
                self.will_flush = True
                while inbox:
                    self.on_frame(inbox.popleft())  # no name here: it would keep the tensors of a call
                    with lock:  # against the clock, which decides by these two whether to take over
                        if self._epoch != epoch:
                            return
                        self._busy_since = 0.0
                self.will_flush = False
                if self.must_flush:
                    self.must_flush = False
                    try:
                        self.stream.flush()
                    except ConnectionLost as error:  # what the peer sent before that is read first, here
                        if not self._will_end:
                            self._will_end = True
                            self.reactor.run_soon(functools.partial(self.end_when_read, error))
                frames = self._next_frames(num_read)
                if frames is None:
                    break
                num_read = len(frames)
                inbox.extend(frames)
        except TransportError as error:
            self.end(error)
            return
        except TimeoutError:
            self.end(ConnectionClosed("the peer is not reading its replies"))
            return
        except BaseException as error:  # never leave a connection that no thread will read again
            _log.exception("handling a frame of %r failed; please report this", self.stream)
            self.end(error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}"))
            return
        finally:
            current.holds = ()
            if self._epoch == epoch:
                busy.discard(self)
        self._give_up(epoch)

    def allow_take_over(self) -> None:
        """Let the clock pass the connection on from now on, if the calling thread holds it.

        Called by `on_frame` when the frame is recorded and handling it may take long. Until then the next frames, and the
        end of the connection, must not overtake it.
        """
        with self._lock:
            if (self, self._epoch) in current.holds:
                self._busy_since = time.monotonic()

    def _begin(self, epoch: int, now: float) -> None:
        """Mark one of several connections that a thread holds as busy, unless it was passed on."""
        with self._lock:
            if self._epoch == epoch:
                self._busy_since = now
                self._enter()

    def _enter(self) -> None:
        """Let the clock watch this connection while its holder runs a request."""
        busy.add(self)
        if not self.reactor.clock.is_awake:
            self.reactor.clock.wake()

    def _next_frames(self, num_read: int) -> list[Frame] | None:
        """Return the next frames on this connection; None to leave it to epoll.

        A caller often calls again after its reply. So the service thread that ran the last request stays with its
        connection briefly, which saves two system calls for each request of a sequence. On a connection for replies, it
        stays only while more are expected: the next caller should read its own.
        """
        stream, linger = self.stream, self.reactor.linger
        if num_read != 1 or stream.has_hidden_bytes():
            return stream.read_nowait()
        if not self.is_lingered_on or (self._wants_reading is not None and not self._wants_reading()):
            return None
        if not linger.acquire(False):
            return None
        busy.discard(self)
        try:
            is_ready = self._wait_readable(_LINGER_S)
        finally:
            linger.release()
            self._enter()
        return stream.read_nowait() if is_ready else None

    def _wait_readable(self, timeout_s: float) -> bool:
        return bool(self._poller.wait(timeout_s))

    def _give_up(self, epoch: int) -> None:
        with self._lock:
            if self._epoch != epoch or not self._held:
                return
            self._held = False
            if self.has_ended:
                return
            if self.inbox or self.stream.has_hidden_bytes():
                self.reactor.run_soon(self._on_ready)
            elif self._wants_reading is None or self._wants_reading():
                if not self._armed:
                    self._armed = self._is_watched = True
                    self.reactor.arm(self._fd)
            elif not self._is_watched:
                self._is_watched = True
                self.reactor.disarm(self._fd)

    def take_over_if_stuck(self, before: float) -> bool:
        """Pass the connection on, and return True, when its holder has been inside one frame since before that time."""
        is_stuck = 0.0 < self._busy_since < before
        if is_stuck:
            self._take_over(self._epoch, before)
        return is_stuck

    def _take_over(self, epoch: int, before: float | None = None) -> None:
        with self._lock:
            if self._epoch != epoch or not self._held:
                return
            if before is not None and not 0.0 < self._busy_since < before:
                return  # it has resumed in the meantime
            self._busy_since = 0.0
            self.will_flush = False
            self._epoch += 1
            new = self._epoch
            busy.discard(self)
        if self.must_flush:
            self.must_flush = False
            self.reactor.run_soon(self._flush)
        self._give_up(new)

    def _flush(self) -> None:
        try:
            self.stream.flush()
        except ConnectionLost as error:
            self.end_when_read(error)
        except (TransportError, TimeoutError) as error:
            self.end(error)

    def has_more(self) -> bool:
        """Return whether the calling thread holds this connection and will handle another frame right after this one."""
        return bool(self.inbox) and (self, self._epoch) in current.holds

    def _take_hold(self) -> int | None:
        """Return the epoch in which the calling thread holds the connection now; None if it cannot."""
        with self._lock:
            if self._held or self.has_ended:
                return None
            self._held = True
            self._epoch += 1
            if self._armed:
                self._armed = False
                self.reactor.disarm(self._fd)
            return self._epoch

    def read_until(self, goal: PendingCall | Until, deadline: float) -> bool:
        """Read in the calling thread until the goal is reached, the deadline passes or the connection ends.

        Return False if another thread is already reading, so that the caller must wait for it.
        """
        epoch = self._take_hold()
        if epoch is None:
            return False
        outer, inbox, stream = current.holds, self.inbox, self.stream
        current.holds = ((self, epoch),)  # a callback that waits for an answer itself gives the reading up
        try:
            while True:
                while inbox:
                    self.on_frame(inbox.popleft())
                    if self._epoch != epoch:
                        return True
                if goal.is_over:
                    return True
                left = deadline - time.monotonic()
                if left <= 0 or self.has_ended:
                    return True
                if stream.has_hidden_bytes() or self._wait_readable(min(left, _LOOK_S)):
                    inbox.extend(stream.read_nowait() or ())
        except TransportError as error:
            self.end(error)
            return True
        finally:
            current.holds = outer
            self._give_up(epoch)

    def _read_into_inbox(self) -> None:
        try:
            self.inbox.extend(self.stream.read_nowait() or ())
        except TransportError as error:
            self.end(error)

    def _handle_elsewhere(self, frame: Frame) -> None:
        """Handle a frame in a service thread that does not hold the connection; a failure closes it as well."""
        try:
            self.on_frame(frame)
        except TransportError as error:
            self.end(error)

    def end_when_read(self, error: ConnectionLost, deadline: float = _NEVER) -> None:
        """End a connection that could not be written to, once everything that the peer sent has been read.

        A peer that has closed it may have sent replies before, and why it leaves.
        """
        release_hold()
        self.ensure_watched()
        until = min(time.monotonic() + _REST_S, deadline)
        while not self.has_ended and time.monotonic() < until:
            time.sleep(_REST_LOOK_S)  # not interrupted: the message is neither sent nor refused yet
        self.end(error)
        until = min(time.monotonic() + _TELL_S, deadline)
        while not self._is_end_told and time.monotonic() < until:
            time.sleep(_REST_LOOK_S)

    def end(self, error: Exception) -> None:
        """Stop reading and close the connection. Idempotent."""
        with self._lock:
            if self.has_ended:
                return
            self.has_ended = True
        self.reactor.remove(self._fd, self._on_ready)  # a message that was cut off has closed it
        if isinstance(error, DecodeError):
            # Tell the other side why, and after the handshake that only this connection ends. One with another version of
            # the protocol does not understand it, and names that version.
            reason = f"it cannot read the received data: {error}"
            is_in_handshake = self.stream.decoder.accept.isdisjoint((Call, Reply))
            with contextlib.suppress(TransportError, TimeoutError):
                answer = Refused(reason) if is_in_handshake else Goodbye(reason)
                self.stream.send(answer, deadline=time.monotonic() + 0.2)
        self.stream.close()
        try:
            self._on_end(error)
        finally:
            self._is_end_told = True


@_interrupts.interruptible
def _busy_poll(poll: Callable[[float], list[tuple[int, int]]], num_looks: int) -> tuple[int, list[tuple[int, int]]]:
    """Return after how many polls there was something to read, and what; nothing if other threads want to run."""
    for number in range(num_looks):
        ready = poll(0)
        if ready:
            return number, ready
        if busy:
            break
        _yield_core()
    return num_looks, []


def serve_together(
    readers: Iterable[Reader], seconds: float, goal: Until, may_run_here: Callable[[Frame], bool]
) -> bool:
    """Read connections and handle frames in the calling thread, which waits for their effects.

    Frames that may not be handled here go to a service thread. Service threads no longer stay with these connections after
    a request, where they would be in the way.

    Returns:
        Whether anything was received.
    """
    holds, by_descriptor, num_handled = [], {}, 0
    for reader in readers:
        reader.is_lingered_on = False
        epoch = reader._take_hold()
        if epoch is not None:
            holds.append((reader, epoch))
            by_descriptor[reader._fd] = reader
    if not holds:
        return False

    def handle(reader: Reader, frame: Frame) -> None:
        if type(frame.message) is Goodbye:  # which the end of the connection must not overtake
            reader.on_frame(frame)
            return
        if not may_run_here(frame):
            reader.reactor.run_soon(functools.partial(reader._handle_elsewhere, frame))
            return
        now = time.monotonic()
        for held, epoch in holds:  # the clock passes all of them on if it takes long
            held._begin(epoch, now)
        try:
            # As in a thread independent of this one.
            contextvars.Context().run(reader.on_frame, frame)
        except TransportError as error:
            reader.end(error)
        finally:
            for held, epoch in holds:
                with held._lock:
                    if held._epoch == epoch:
                        held._busy_since = 0.0
                        busy.discard(held)

    outer, current.holds = current.holds, holds
    poller, deadline = _Poller(by_descriptor), time.monotonic() + seconds
    try:
        while True:
            for reader, epoch in holds:
                while reader.inbox and reader._epoch == epoch:
                    num_handled += 1
                    handle(reader, reader.inbox.popleft())
            if goal.is_over or any(reader._epoch != epoch or reader.has_ended for reader, epoch in holds):
                return num_handled > 0
            left = deadline - time.monotonic()
            if left <= 0:
                return num_handled > 0
            ready = [reader for reader, _ in holds if reader.stream.has_hidden_bytes()]
            for reader in ready or [by_descriptor[number] for number, _ in poller.wait(min(left, _LOOK_S))]:
                reader._read_into_inbox()
    finally:
        current.holds = outer
        for reader, epoch in holds:
            reader._give_up(epoch)


def release_hold() -> None:
    """Let another thread read on: the current one is about to wait."""
    holds, current.holds = current.holds, ()
    for reader, epoch in holds:
        reader._take_over(epoch)
