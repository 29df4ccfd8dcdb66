"""The thread that watches the workers of this machine: what they print, whether they are ready, and how they end.

    template  -- WorkerForked, WorkerExited -->  |            |
    worker    -- Listening -->                   | supervisor |  --> state of a LocalHandle, on_lost
    worker    -- stdout, stderr -->              |            |  --> the driver's stdout, stderr

Everyone else waits on its condition. It ends no process itself; `gradwire.cluster.local` does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from gradwire.cluster._control import (
    Leave,
    Listening,
    PeerLost,
    ToWorker,
    WorkerExited,
    WorkerForked,
    receive_message,
    send_message,
)
from gradwire.cluster._handle import LocalHandle
from gradwire.cluster._output import Stream
from gradwire.cluster._status import describe_exit
from gradwire.cluster._template_process import TemplateProcess
from gradwire.cluster.launcher import WorkerState

_log = logging.getLogger("gradwire")

_READ_BYTES = 1 << 16
_LAST_READS = (
    16  # a pipe holds 64 KiB unless someone enlarged it; what a detached process goes on writing is not waited for
)


class Supervisor:
    """Watches workers until it is closed. Owns their channels."""

    def __init__(self, template: TemplateProcess) -> None:
        self._template = template
        self._changed = threading.Condition()  # guards _handles and the state of every handle in it
        self._handles: dict[int, LocalHandle] = {}  # by ticket
        self._arrivals: queue.SimpleQueue[LocalHandle] = queue.SimpleQueue()  # handles that the thread is to watch
        self._wakeup, self._alarm = socket.socketpair()  # a byte makes the thread look at _arrivals and _is_closing
        self._is_closing = False
        self._unshown: set[LocalHandle] = set()  # those with a progress bar to show later; used by the thread alone
        self._selector = selectors.DefaultSelector()  # used by the thread alone
        self._selector.register(template, selectors.EVENT_READ, self._on_template_message)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._on_wakeup)
        self._thread = threading.Thread(target=self._run, name="gradwire-driver-supervisor", daemon=True)
        self._thread.start()

    def watch(self, handle: LocalHandle) -> None:
        """Takes charge of a worker that is about to be forked."""
        with self._changed:
            self._handles[handle.ticket] = handle
        self._arrivals.put(handle)
        self._alarm.send(b"!")

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until the condition on handles holds; False if it does not within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    def expect_end_of(self, handles: Iterable[LocalHandle], *, tell: bool) -> None:
        """From now on the end of these workers is no loss; if `tell`, they are asked to end in good order."""
        for handle in handles:
            with self._changed:
                handle.on_end_expected()
            if tell:
                _tell(handle, Leave())

    def close(self, timeout_s: float) -> bool:
        """Ends the thread; False if it is stuck, e.g. because the driver's output is blocked. May be called again."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._alarm.send(b"!")
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                for key, _ in self._selector.select(self._refresh()):
                    key.data()
        finally:
            for handle in self._all_handles():
                handle.channels.close()
            for ours in (self._selector, self._wakeup, self._alarm):
                ours.close()

    def _refresh(self) -> float | None:
        """Shows the progress bars for which it is time; returns the seconds until the next, or None for no limit."""
        now, soonest = time.monotonic(), float("inf")
        for handle in tuple(self._unshown):
            handle.output.refresh(now)
            if handle.output.refresh_at is None:
                self._unshown.discard(handle)
            else:
                soonest = min(soonest, handle.output.refresh_at)
        return soonest - now if self._unshown else None  # without a limit, the alarm ends the wait

    def _all_handles(self) -> tuple[LocalHandle, ...]:
        with self._changed:
            return tuple(self._handles.values())

    def _on_wakeup(self) -> None:
        self._wakeup.recv(4096)
        while not self._arrivals.empty():
            handle = self._arrivals.get()
            if handle.state.is_over:
                continue
            for stream, fd in handle.channels.pipes.items():
                self._selector.register(fd, selectors.EVENT_READ, partial(self._on_output, handle, stream))
            self._selector.register(handle.channels.lifeline, selectors.EVENT_READ, partial(self._on_lifeline, handle))

    def _on_template_message(self) -> None:
        try:
            message = self._template.receive()
        except OSError:
            message = None  # the launcher has given the template up
        if message is None:
            self._on_template_ended()
        elif isinstance(message, WorkerForked):
            with self._changed:
                self._handles[message.ticket].on_forked(message.pid)
                self._changed.notify_all()
        elif isinstance(message, WorkerExited):
            self._on_exited(self._handles[message.ticket], message.error or describe_exit(message.status))

    def _on_template_ended(self) -> None:
        """Without their parent the workers are gone, too: the kernel sees to it."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._template)
        for handle in self._all_handles():
            if not handle.state.is_over:
                self._on_exited(handle, "killed because the template process ended")

    def _on_exited(self, handle: LocalHandle, reason: str) -> None:
        for stream in tuple(handle.channels.pipes):
            for _ in range(_LAST_READS):
                if not self._on_output(handle, stream):
                    break
            self._close_pipe(handle, stream)
        self._close_lifeline(handle)
        with self._changed:
            was_running = handle.state is WorkerState.RUNNING
            handle.on_exited(reason)
            self._changed.notify_all()
        if was_running:
            self._announce_loss(handle, reason)

    def _announce_loss(self, lost: LocalHandle, reason: str) -> None:
        try:
            lost.on_lost(lost)
        except Exception:
            _log.exception("the loss of %s could not be handled", lost.info.name)
        for handle in self._all_handles():
            if not handle.state.is_over:
                _tell(handle, PeerLost(lost.info.name, reason))

    def _on_lifeline(self, handle: LocalHandle) -> None:
        if handle.channels.lifeline.fileno() < 0:
            return  # closed by an event before this one
        message, _ = receive_message(handle.channels.lifeline)
        if message is None:
            self._close_lifeline(handle)
        elif isinstance(message, Listening):
            handle.output.release()
            with self._changed:
                handle.on_listening()
                self._changed.notify_all()

    def _close_lifeline(self, handle: LocalHandle) -> None:
        with contextlib.suppress(KeyError, ValueError):  # not watched yet, or closed already
            self._selector.unregister(handle.channels.lifeline)
        handle.channels.lifeline.close()

    def _on_output(self, handle: LocalHandle, stream: Stream) -> bool:
        """Passes on what a worker has printed; False if there is no more for now."""
        fd = handle.channels.pipes.get(stream)
        if fd is None:
            return False  # closed by an event before this one
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            handle.output.feed(stream, data, time.monotonic())
            if handle.output.refresh_at is not None:
                self._unshown.add(handle)
        else:
            self._close_pipe(handle, stream)
        return bool(data)

    def _close_pipe(self, handle: LocalHandle, stream: Stream) -> None:
        fd = handle.channels.pipes.pop(stream, None)
        if fd is not None:
            with contextlib.suppress(KeyError):  # not watched yet
                self._selector.unregister(fd)
            os.close(fd)
            handle.output.feed(stream, b"", time.monotonic())


def _tell(handle: LocalHandle, message: ToWorker) -> None:
    with contextlib.suppress(OSError):  # it is gone, or too busy to read: the caller has other means
        send_message(handle.channels.lifeline, message)
