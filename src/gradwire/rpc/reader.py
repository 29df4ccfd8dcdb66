"""The right to read a connection: one thread at a time holds it.

    service thread   event -> hold -> read, run, read, run ... -> nothing left -> arm -> give up
    waiting caller   hold -> read until its own answer is there -> arm if others still wait -> give up
    clock            holder stuck in user code -> take over: the rest is read by another thread

Frames that were read but not yet handled lie in the inbox, so that whoever comes next goes on where the last one stopped.

Ctrl-C may hit a waiting caller between any two calls. A connection whose bytes may be lost then ends, a frame that may
not have been handled is handled again by a service thread, and every other step can be repeated or left out.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import logging
import os
import select
import threading
import time
from collections.abc import Callable

from gradwire.errors import ConnectionClosed, DecodeError, TransportError
from gradwire.rpc.reactor import Reactor
from gradwire.transports.stream import StreamConnection
from gradwire.wire.framing import Frame
from gradwire.wire.messages import Call, Goodbye, Message, Reply

_log = logging.getLogger("gradwire")
_LOOK_S = 0.2  # a thread that waits for its answer looks so often whether somebody else ended the call
_LINGER_S = 0.05  # how long a service thread stays with a connection after a request
_MAX_LOOKS = 500 if len(os.sched_getaffinity(0)) > 1 else 0  # about 0.6 ms: a call with a tensor of 256 KiB, and some
_FEW_LOOKS = 60
_SHORT_S = 0.0003
_yield_core = os.sched_yield
_looking = threading.RLock()  # held by the one thread of this process that looks instead of sleeping


class _Local(threading.local):
    hold: tuple[Reader, int] | None = None  # what the current thread holds, and its epoch
    passed_on: collections.deque[Frame] | None = None  # the frame that it is leaving to a service thread


_local = _Local()


class Reader:
    """Reads one connection.

    Args:
        connection: What to read.
        reactor: Whose threads read it when nobody else does.
        on_frame: Handles a frame; may run user code.
        on_end: Told once that the connection ended, and why.
        wants_reading: Whether anything is expected; otherwise the connection is watched for its end alone.

    Attributes:
        is_lingered_on: Whether a service thread may stay with the connection after a request.
        is_reading: A caller takes bytes from the connection; see `is_cut_off`.
        will_flush: A service thread is handling frames, and sends afterwards what was held back meanwhile.
    """

    def __init__(
        self,
        connection: StreamConnection,
        reactor: Reactor,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[Exception], None],
        wants_reading: Callable[[], object] = lambda: True,
    ) -> None:
        self.connection = connection
        self._reactor = reactor
        self.on_frame = on_frame
        self._on_end = on_end
        self._wants_reading = wants_reading
        self._fd = connection.fileno()
        self._inbox: collections.deque[Frame] = collections.deque()
        self._poller = select.poll()
        self._poller.register(self._fd, select.POLLIN)
        self._lock = threading.Lock()  # guards the six fields below
        self._held = False
        self._holder = 0  # the caller that holds it; 0 for service threads
        self._epoch = 0  # rises with every hold and take-over
        self._armed = False
        self._is_watched = False  # for its end at least; not since the last event
        self._ended = False
        self.is_reading = False  # by callers only; still set when the next thread begins: Ctrl-C has cut it off
        self._busy_since = 0.0
        self._in_hand: dict[int, Message] = {}  # being handled by service threads, by epoch; single operations only
        self.will_flush = False
        self._num_looks = _MAX_LOOKS
        self.is_lingered_on = True

    def start(self) -> None:
        """Begins to watch the connection."""
        self._armed = bool(self._wants_reading())
        self._is_watched = True
        self._reactor.add(self._fd, self._on_ready, armed=self._armed)

    def is_cut_off(self) -> bool:
        """Whether Ctrl-C hit a thread while it read and before it could end the connection: nothing may be sent any more."""
        with self._lock:
            return self.is_reading and not self._held

    def ensure_watched(self) -> None:
        """Something is expected from now on; whoever holds the connection will see to it, else a service thread."""
        with self._lock:
            if not (self._held or self._armed or self._ended):
                self._reactor.arm(self._fd)
                # Last: armed twice does no harm when Ctrl-C has hit in between, armed never does.
                self._armed = self._is_watched = True

    def _on_ready(self) -> None:
        with self._lock:
            self._armed = self._is_watched = False
            if self._held or self._ended:
                return  # the holder arms it again
            is_cut_off = self.is_reading
            self._held, self._holder = not is_cut_off, 0
            self._epoch += 1
            epoch = self._epoch
        if is_cut_off:
            self.end(ConnectionClosed("reading was interrupted"))
        else:
            self._pump(epoch)

    def _pump(self, epoch: int) -> None:
        """Reads and runs until nothing is left or somebody took over."""
        inbox, num_read = self._inbox, 0
        _local.hold = (self, epoch)
        self._reactor.enter(self)
        try:
            while True:
                self.will_flush = True
                while inbox:
                    try:
                        self.on_frame(self._take_in_hand(epoch))  # no name here: it would keep the tensors of a call
                    finally:
                        self._in_hand.pop(epoch, None)
                    with self._lock:  # against the clock, which decides by these two whether to take over
                        if self._epoch != epoch:
                            return
                        self._busy_since = 0.0
                self.will_flush = False
                self.connection.flush()
                frames = self._next_frames(num_read)
                if frames is None:
                    break
                num_read = len(frames)
                inbox.extend(frames)
        except TransportError as error:
            self.end(error)
            return
        except TimeoutError:
            self.end(ConnectionClosed("the other side does not read its replies"))
            return
        except Exception as error:  # never leave a connection that nobody will read again
            _log.exception("handling a frame of %r failed; please report this", self.connection)
            self.end(error)
            return
        finally:
            _local.hold = None
            if self._epoch == epoch:
                self._reactor.leave(self)
        self._give_up(epoch)

    def _take_in_hand(self, epoch: int) -> Frame:
        frame = self._inbox.popleft()
        self._in_hand[epoch] = frame.message
        self._busy_since = time.monotonic()  # last: from now on the clock may take over
        return frame

    def _next_frames(self, num_read: int) -> list[Frame] | None:
        """What comes next on this connection; None to leave it to epoll.

        A caller that has its answer often calls again. One service thread, the one that ran the last request, therefore
        stays with its connection for a while: that spares two system calls for each request of a sequence.
        Where answers come, it stays only while more are expected: the next caller is to read its own.
        """
        connection, reactor = self.connection, self._reactor
        if num_read != 1 or connection.has_hidden_bytes():
            return connection.read_nowait()
        if not (self.is_lingered_on and self._wants_reading() and reactor.begin_lingering(self)):
            return None
        try:
            return connection.read_nowait() if self._wait_readable(_LINGER_S) else None
        finally:
            reactor.end_lingering(self)

    def _wait_readable(self, timeout_s: float) -> bool:
        """Whether something can be read within that time; only for the holder.

        To sleep and be woken costs more than a short call takes. So look a number of times first, if waits on this
        connection have been short lately and nothing else in this process wants to run: twice as often as it took the last
        time, and each time in vain halves it.
        """
        poll = self._poller.poll
        if self._num_looks and self._look(poll):
            return True
        began = time.monotonic()
        is_ready = bool(poll(timeout_s * 1000))
        was_short = is_ready and time.monotonic() - began < _SHORT_S
        self._num_looks = _MAX_LOOKS if was_short else self._num_looks // 2
        return is_ready

    def _look(self, poll: Callable[[float], object]) -> bool:
        try:
            if _looking.acquire(False):
                for number in range(self._num_looks):
                    if poll(0):
                        self._num_looks = min(_MAX_LOOKS, 2 * number + _FEW_LOOKS)
                        return True
                    if self._reactor.is_process_busy():
                        break
                    _yield_core()
            return False
        finally:  # in one step that may fail: Ctrl-C may hit before anybody can note that the lock was taken
            try:  # noqa: SIM105
                _looking.release()
            except RuntimeError:
                pass

    def _give_up(self, epoch: int) -> None:
        with self._lock:
            if self._epoch != epoch or not self._held:
                return
            if not (self._ended or self.is_reading):
                if self._inbox or self.connection.has_hidden_bytes():
                    self._reactor.run_soon(self._on_ready)
                elif self._wants_reading():
                    if not self._armed:
                        self._reactor.arm(self._fd)
                        self._armed = self._is_watched = True
                elif not self._is_watched:
                    self._reactor.disarm(self._fd)
                    self._is_watched = True
            self._held = False  # last, so that it can be repeated when Ctrl-C has hit in between

    def take_over_if_stuck(self, before: float) -> None:
        """Passes the connection on when its holder has been inside one frame since before that time."""
        if 0.0 < self._busy_since < before:
            self._take_over(self._epoch, before)

    def _take_over(self, epoch: int, before: float | None = None) -> None:
        with self._lock:
            if self._epoch != epoch or not self._held:
                return
            if before is not None and not 0.0 < self._busy_since < before:
                return  # it went on meanwhile
            self._busy_since = 0.0
            self.will_flush = False
            self._holder = 0
            self._epoch += 1
            new = self._epoch
            self._reactor.leave(self)
        try:
            if self.connection.has_held_back:
                self._reactor.run_soon(self._flush)
        finally:
            self._give_up(new)

    def _flush(self) -> None:
        try:
            self.connection.flush()
        except (TransportError, TimeoutError) as error:
            self.end(error)

    def has_more(self) -> bool:
        """Whether the calling thread holds this connection and will handle another frame right after this one."""
        hold = _local.hold
        return bool(self._inbox) and hold is not None and hold[0] is self and hold[1] == self._epoch

    def serve_for(self, seconds: float, is_done: Callable[[], bool], may_run_here: Callable[[Frame], bool]) -> bool:
        """Reads and handles frames in the calling thread, which waits for what they will do, unless another one does.

        Frames that may not be handled here go to a service thread. None of those stays with the connection after a
        request any more: it would be in the way.

        Returns:
            Whether anything came.
        """
        self.is_lingered_on = False
        num_handled = 0

        def handle(frame: Frame) -> None:
            nonlocal num_handled
            num_handled += 1
            if not may_run_here(frame):
                _local.passed_on = collections.deque((frame,))
                self._pass_on(frame)
                _local.passed_on = None
                return
            epoch = self._epoch
            self._busy_since = time.monotonic()  # the clock passes the reading on if it takes long
            self._reactor.enter(self)
            try:
                # As in a thread that knows nothing of this one.
                contextvars.Context().run(self.on_frame, frame)
            finally:
                with self._lock:
                    if self._epoch == epoch:
                        self._busy_since = 0.0
                        self._reactor.leave(self)

        self.read_until(is_done, time.monotonic() + seconds, handle)
        return num_handled > 0

    def _pass_on(self, frame: Frame) -> None:
        """Leaves a frame to a service thread. Passed on again after Ctrl-C, it is handled once all the same."""
        frames = _local.passed_on
        if frames is None:
            frames = collections.deque((frame,))
        self._reactor.run_soon(functools.partial(self._handle, frames))

    def _handle(self, frames: collections.deque[Frame]) -> None:
        """In a service thread that does not hold the connection: what cannot be handled ends it, as it does elsewhere."""
        try:
            frame = frames.popleft()
        except IndexError:  # another thread has taken it
            return
        try:
            self.on_frame(frame)
        except TransportError as error:
            self.end(error)

    def read_until(
        self, is_done: Callable[[], bool], deadline: float | None, handle: Callable[[Frame], None] | None = None
    ) -> bool:
        """Reads in the calling thread until `is_done`, the deadline or the end of the connection.

        Args:
            is_done: Asked after every frame.
            deadline: In `time.monotonic` seconds.
            handle: Takes the frames in place of `on_frame`.

        Returns:
            False if another thread is reading already, so the caller must wait for it.
        """
        epoch, outer, own = 0, _local.hold, threading.get_ident()
        handle = handle or self.on_frame
        frame: Frame | None = None
        try:  # Ctrl-C may hit anywhere from here on
            with self._lock:
                # Held by this thread: Ctrl-C hit twice, and it was not given up.
                if self._ended or (self._held and self._holder != own):
                    return False
                self._held, self._holder = True, own
                self._epoch += 1
                epoch = self._epoch
                if self._armed:
                    self._armed = False
                    self._reactor.disarm(self._fd)
            _local.hold = (self, epoch)  # a callback that waits for an answer itself gives the reading up
            if self.is_reading:
                raise ConnectionClosed("reading was interrupted")
            inbox, connection = self._inbox, self.connection
            while True:
                while inbox:
                    frame = inbox[0]  # known before it is taken out
                    inbox.popleft()
                    handle(frame)
                    frame = None
                    if self._epoch != epoch:
                        return True
                if is_done():
                    return True
                left = _LOOK_S if deadline is None else deadline - time.monotonic()
                if left <= 0 or self._ended:
                    return True
                if connection.has_hidden_bytes() or self._wait_readable(min(left, _LOOK_S)):
                    self.is_reading = True
                    inbox.extend(connection.read_nowait() or ())
                    self.is_reading = False
        except TransportError as error:
            self.end(error)
            return True
        except BaseException:
            if frame is not None:  # it may be what another thread waits for
                self._pass_on(frame)
            elif epoch and self._epoch == epoch and self.is_reading:  # bytes may be lost: the rest is out of step
                self.end(ConnectionClosed("reading was interrupted"))
            raise
        finally:
            if epoch:
                _local.hold, _local.passed_on = outer, None
                try:
                    self._give_up(epoch)
                except KeyboardInterrupt:
                    self._give_up(epoch)
                    raise

    def in_hand(self) -> list[Message]:
        """Return what other threads are handling; whoever took over from them may find the end of the connection first."""
        return list(self._in_hand.values())

    @property
    def has_ended(self) -> bool:
        """Whether `end` was called."""
        return self._ended

    def end(self, error: Exception) -> None:
        """Stops reading and closes the connection. Idempotent."""
        is_first = False
        try:
            with self._lock:
                is_first, self._ended = not self._ended, True
        finally:  # Ctrl-C must not leave a connection that is closed and still in use
            if is_first:
                try:
                    self._reactor.remove(self._fd, self._on_ready)  # a message that was cut off has closed it
                    if isinstance(error, DecodeError):
                        self._say_why(error)
                finally:
                    try:
                        self.connection.close()
                    finally:
                        for message in self.in_hand():
                            if isinstance(message, Goodbye):  # it says what the end means; handled twice at worst
                                self.on_frame(Frame(message, b"", []))
                        self._on_end(error)

    def _say_why(self, error: DecodeError) -> None:
        """Tells the other side that only this connection ends; in a handshake it would not understand that."""
        if not self.connection.decoder.accept.isdisjoint((Call, Reply)):
            with contextlib.suppress(TransportError, TimeoutError):
                self.connection.send(Goodbye(f"it cannot read what came: {error}"), deadline=time.monotonic() + 0.2)


def release_hold() -> None:
    """The current thread is about to wait: somebody else shall read on."""
    hold = _local.hold
    if hold is not None:
        _local.hold = None
        reader, epoch = hold
        reader._take_over(epoch)


def has_hold() -> bool:
    """Whether the current thread holds a connection."""
    return _local.hold is not None
