"""Service threads around one epoll, and the clock.

The thread that reads is the thread that runs: handing a message to another thread costs more than the socket. All service
threads wait in one `epoll`; the kernel delivers an event to one of them (the one that waited last, whose caches are warm).
That thread reads a request and runs it. At least one more thread is always waiting, so that reading continues whatever the
first one runs. Events are one-shot: a connection that is being read wakes no other thread until it is armed again.

The clock thread sleeps while the worker is idle. While a function runs, it checks whether a reader is stuck in user code and
hands that reader's connection over (`Reader.take_over_if_stuck`): every 2 ms while that happens, and less often, down to
every 16 ms, while it does not. It also calls the agent's deadline sweep.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from gradwire.errors import ConnectionClosed
from gradwire.observe import log
from gradwire.observe.log import get_logger

if TYPE_CHECKING:
    from gradwire.rpc.reader import Reader


class GilMeter:
    """Sample the wait for the GIL: release it and measure how long it takes to get it back."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._num_samples = 0

    def sample(self) -> None:
        began = time.perf_counter()
        time.sleep(0)  # releases the GIL and acquires it again
        self._total_s += time.perf_counter() - began
        self._num_samples += 1

    @property
    def average_us(self) -> float:
        return self._total_s / self._num_samples * 1e6 if self._num_samples else 0.0


_log = get_logger(__name__)

_ARMED = select.EPOLLIN | select.EPOLLONESHOT
_DISARMED = select.EPOLLRDHUP | select.EPOLLONESHOT  # the end of a connection is reported in any case
_TICK_S = 0.002
_MAX_TICK_S = 0.016  # waking a thread costs as much as a small call, and most functions are short
_SWEEP_S = 1.0
_AWAKE_S = 0.1  # how long the clock keeps ticking after the last activity
_JOIN_S = 2.0
_SAMPLE_S = 0.02

_local = threading.local()  # .reactor: whose service thread this is


busy: set[Reader] = set()
"""Readers of this process, of all its workers, that run what they read; changed by single operations only."""


class Reactor:
    """Service threads around one epoll.

    Args:
        name: The worker's name, for thread names.
        max_idle: Number of idle threads that are kept.
        sweep: Called by the clock; returns when to call it again.
    """

    def __init__(self, name: str, max_idle: int, sweep: Callable[[float], float]) -> None:
        self.name = name
        self._max_idle = max(2, max_idle)
        self.sweep = sweep
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN | select.EPOLLET)
        self._handlers: dict[int, Callable[[], None]] = {}
        self._registering = threading.Lock()  # guards changes of _handlers and of what epoll watches, which go together
        self._tasks: collections.deque[Callable[[], object]] = collections.deque()
        self._lock = threading.Lock()  # guards _num_idle, _threads and _closing
        self._num_idle = 0
        self._num_spawned = 0
        self._threads: set[threading.Thread] = set()
        self._closing = False
        self._has_closed = False  # service threads no longer take tasks
        self.lacks_thread = False  # no thread may be left to read: the clock tries again to start one
        self.gil_meter: GilMeter | None = None  # set to measure; the clock takes the samples
        self.linger = threading.Lock()  # held by the one service thread that stays with its connection; see `Reader`
        self.clock = _Clock(self)

    def start(self) -> None:
        with self._lock:
            self._spawn()
            self._spawn()
        self.clock.thread.start()

    def add(self, descriptor: int, handler: Callable[[], None], *, armed: bool) -> None:
        """Call `handler` in a service thread, once for each arming, when the descriptor can be read.

        While it is not armed, it is only watched for its end.
        """
        with self._registering:
            self._handlers[descriptor] = handler
            try:
                self._epoll.register(descriptor, _ARMED if armed else _DISARMED)
            except ValueError as error:
                raise ConnectionClosed("this worker has shut down") from error

    def arm(self, descriptor: int) -> None:
        try:  # noqa: SIM105  (on the path of every call)
            self._epoll.modify(descriptor, _ARMED)
        except (OSError, ValueError):  # it was closed at the same moment
            pass

    def disarm(self, descriptor: int) -> None:
        """Watch only for the end of the connection; an event in flight may still arrive."""
        try:  # noqa: SIM105  (on the path of every call)
            self._epoll.modify(descriptor, _DISARMED)
        except (OSError, ValueError):
            pass

    def remove(self, descriptor: int, handler: Callable[[], None] | None = None) -> None:
        """Forget a descriptor; call it before closing.

        Give the handler that it was added with if it may be closed already: the number of another one then stays.
        """
        with self._registering:
            if handler is not None and self._handlers.get(descriptor, handler) != handler:
                return
            self._handlers.pop(descriptor, None)
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(descriptor)

    def run_soon(self, task: Callable[[], object]) -> None:
        """Run a task in a service thread; after `close`, in a new thread."""
        self._tasks.append(task)
        self._wake()
        # Looked at after the task was listed: `close` may have looked before. A finalizer at the program's end starts none.
        if self._has_closed and not sys.is_finalizing():
            # Not here: the caller may hold a lock that the task needs.
            last = threading.Thread(target=self._run_rest, name=f"gradwire-{self.name}-last", daemon=True)
            with contextlib.suppress(RuntimeError):  # a limit of the system
                last.start()

    def expect(self, when: float) -> None:
        if when < self.clock.next_sweep:
            self.clock.expect(when)

    def busy_readers(self) -> list[Reader]:
        return [reader for reader in list(busy) if reader.reactor is self]

    def is_service_thread(self) -> bool:
        return getattr(_local, "reactor", None) is self

    def is_clock_thread(self) -> bool:
        # In the clock no user code may run.
        return threading.current_thread() is self.clock.thread

    @property
    def num_threads(self) -> int:
        return len(self._threads)

    def _wake(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            os.eventfd_write(self._wake_fd, 1)

    def _spawn(self) -> None:
        """Add a thread that counts as idle from now on; the caller holds the lock."""
        thread = threading.Thread(
            target=self._serve, name=f"gradwire-{self.name}-service-{self._num_spawned + 1}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # a system limit: continue with the existing threads, and retry later
            if not self.lacks_thread:
                _log.warning("%s cannot start another thread: %s", self.name, error)
                self.lacks_thread = True
                self.clock.wake()
            return
        self.lacks_thread = False
        self._threads.add(thread)
        self._num_idle += 1
        self._num_spawned += 1

    def replace_missing_thread(self) -> None:
        """Retry starting a thread, unless another one has become free in the meantime."""
        with self._lock:
            if self._num_idle > 0 or self._closing:
                self.lacks_thread = False
            else:
                self._spawn()

    def _serve(self) -> None:
        _local.reactor, log.thread.worker = self, self.name
        epoll, handlers, lock = self._epoll, self._handlers, self._lock
        while True:
            try:
                events = epoll.poll(None, 1)
            except (OSError, ValueError):  # closed
                return
            with lock:
                if self._closing:
                    self._threads.discard(threading.current_thread())
                    self._wake()  # the next one ends, too
                    return
                self._num_idle -= 1
                if self._num_idle <= 0:
                    self._spawn()
            for descriptor, _mask in events:
                handler = handlers.get(descriptor)
                if handler is not None or descriptor == self._wake_fd:
                    self._guard(handler or self._run_task)
            if not self._may_wait_again():
                return

    def _may_wait_again(self) -> bool:
        """Return whether a thread that has finished its task is still needed."""
        with self._lock:
            if self._closing or self._num_idle >= self._max_idle:
                self._threads.discard(threading.current_thread())
                if self._closing:
                    self._wake()  # _run_task may have taken the wake-up call that was meant for all
                return False
            self._num_idle += 1
            return True

    def _run_task(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        try:
            task = self._tasks.popleft()
        except IndexError:
            return
        if self._tasks:
            self._wake()  # several were queued behind one event: another thread takes the next
        task()

    def _run_rest(self) -> None:
        """Run the remaining tasks after the end: some complete futures, and no thread must wait for one for ever."""
        with contextlib.suppress(IndexError):  # several threads may do this at once
            while True:
                task = self._tasks.popleft()
                self._guard(task)

    def _guard(self, handler: Callable[[], object]) -> None:
        try:
            handler()
        except BaseException:  # callbacks of users run here; a service thread outlives them
            _log.exception("a handler failed; please report this")

    def close(self) -> None:
        """Stop all threads, waiting briefly for those that run user code. Idempotent."""
        with self._lock:
            if self._wake_fd < 0:
                return
            self._closing = True
            threads = list(self._threads)
        self.clock.close()
        self._wake()
        deadline = time.monotonic() + _JOIN_S
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._has_closed = True
        self._run_rest()
        self._epoll.close()
        # A late run_soon must not write to the next owner of this number.
        descriptor, self._wake_fd = self._wake_fd, -1
        os.close(descriptor)


class _Clock:
    """One thread for deadlines and for readers that got stuck."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._alarm = threading.Lock()  # released to wake the clock before its time
        self._alarm.acquire()
        self._closing = False
        self.is_awake = False
        self.next_sweep = float("inf")
        self._is_sweep_due = False  # set by wake(), which next_sweep alone cannot tell from a sweep that just ended
        self._lock = threading.Lock()  # guards the next three
        self._is_sweeping = False
        self._wanted = float("inf")  # what was expected during a sweep, which may have looked already
        self._is_in_demand = False  # something was expected since the last sweep, though it may be over by now
        self.thread = threading.Thread(target=self._run, name=f"gradwire-{reactor.name}-clock", daemon=True)

    def wake(self) -> None:
        self.is_awake = True
        self._is_sweep_due = True
        self.next_sweep = 0.0  # so that no other thread wakes it a second time
        with contextlib.suppress(RuntimeError):  # it is about to wake already
            self._alarm.release()

    def expect(self, when: float) -> None:
        with self._lock:
            self._is_in_demand = True
            if self._is_sweeping:  # waking it would cause another sweep for every call made in the meantime
                self._wanted = min(self._wanted, when)
                return
        self.wake()

    def _run(self) -> None:
        log.thread.worker = self._reactor.name
        active_until, tick_s = 0.0, _TICK_S
        while not self._closing:
            now = time.monotonic()
            if self._is_sweep_due or self.next_sweep <= now:
                with self._lock:
                    self._is_sweeping, self._is_sweep_due = True, False
                    self.next_sweep = self._wanted = float("inf")
                wanted = self._sweep(now)
                with self._lock:
                    self._is_sweeping = False
                    # Calls may come and go faster than the clock wakes: each would wake it again.
                    soon = now + _SWEEP_S if self._is_in_demand else float("inf")
                    self.next_sweep, self._is_in_demand = min(wanted, self._wanted, soon), False
            readers = self._reactor.busy_readers() if busy else []
            if readers:
                active_until = now + _AWAKE_S
            tick_s = _TICK_S if self._pass_on_stuck(readers, now) else min(2 * tick_s, _MAX_TICK_S)
            if now < active_until:
                pause = tick_s
            else:
                tick_s = _TICK_S
                self.is_awake = False
                # A reader that began before it saw is_awake fall is in the busy set by now.
                is_busy = bool(busy and self._reactor.busy_readers())
                pause = _TICK_S if is_busy else min(60.0, self.next_sweep - now)
            if self._reactor.lacks_thread:
                self._reactor.replace_missing_thread()
                pause = min(pause, _AWAKE_S)
            if self._reactor.gil_meter is not None:
                self._reactor.gil_meter.sample()
                pause = min(pause, _SAMPLE_S)
            if self._alarm.acquire(timeout=max(0.0, pause)):
                active_until = time.monotonic() + _AWAKE_S

    def _pass_on_stuck(self, readers: list[Reader], now: float) -> bool:
        """Take connections over from threads that have been handling one frame for a tick; return whether there were any."""
        is_any_stuck = False
        try:
            for reader in readers:
                is_any_stuck = reader.take_over_if_stuck(now - _TICK_S) or is_any_stuck
        except Exception:
            _log.exception("handing over a connection failed; please report this")
        return is_any_stuck

    def _sweep(self, now: float) -> float:
        try:
            return self._reactor.sweep(now)
        except Exception:
            _log.exception("the deadline sweep failed; please report this")
            return now + 1.0

    def close(self) -> None:
        self._closing = True
        self.wake()
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(_JOIN_S)
