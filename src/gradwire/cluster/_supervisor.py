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
import re
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from gradwire.cluster._control import (
    Leave,
    Listening,
    PeerLost,
    ToWorker,
    WorkerExited,
    WorkerForked,
    make_pair,
    receive_message,
    send_message,
)
from gradwire.cluster._forkserver import TemplateProcess
from gradwire.cluster.launcher import OnLost, WorkerState
from gradwire.cluster.status import describe_exit, rss_of
from gradwire.types import WorkerInfo

Stream = Literal["stdout", "stderr"]

_MAX_LINE_BYTES = 1 << 16
_KEPT_LINES = 200
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)  # cyan first; red is left to errors
_CURSOR_UP = b"\x1b[A"
_CURSOR_MOVES = re.compile(r"\x1b\[[0-9;?]*[@-ln-~]")  # all control sequences but those for colours, which end in "m"
_FIRST_REFRESH_S = 1.0
_LONGEST_REFRESH_S = 10.0


class LineBuffer:
    """Bytes in, whole lines out.

    Attributes:
        progress: The state of a line that rewrites itself and has not ended; empty if there is none.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.progress = ""

    def feed(self, data: bytes) -> list[str]:
        """Returns the lines that this data completes, without their ends.

        A line longer than 64 KiB comes in pieces, so that a worker which never ends a line costs no memory.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        whole = []
        for line in lines:
            if line.rstrip(b"\r").endswith(_CURSOR_UP):  # one of several bars below each other: it will be rewritten
                self.progress = _as_shown(line)
            else:
                self.progress = ""
                whole.append(line)
        if b"\r" in self._rest:
            _, begin, state = self._rest.rstrip(b"\r").rpartition(b"\r")  # what was there before is gone for good
            self._rest = begin + state + (b"\r" if self._rest.endswith(b"\r") else b"")
            self.progress = _as_shown(state).rstrip()
        while len(self._rest) > _MAX_LINE_BYTES:
            whole.append(self._rest[:_MAX_LINE_BYTES])
            self._rest = self._rest[_MAX_LINE_BYTES:]
        return [_as_shown(line) for line in whole]

    def finish(self) -> list[str]:
        """Returns what has no line end and never will."""
        rest, self._rest, self.progress = self._rest, b"", ""
        shown = _as_shown(rest)
        return [shown] if (shown.strip() if b"\r" in rest else shown) else []  # a bar may have been wiped out


def _as_shown(line: bytes) -> str:
    """A line as a terminal would leave it: a progress bar that rewrites itself is its last state."""
    return _CURSOR_MOVES.sub("", line.decode(errors="replace").rstrip("\r").rpartition("\r")[2])


class _Progress:
    """When the state of a stream's progress bar is shown."""

    def __init__(self) -> None:
        self.shown = ""
        self.due_at: float | None = None
        self._interval_s = _FIRST_REFRESH_S

    def on_state(self, state: str, now: float) -> None:
        """The bar has this state, which is empty if there is no bar."""
        if state in ("", self.shown):
            self.due_at = None
        elif self.due_at is None:
            self.due_at = now + self._interval_s

    def on_shown(self, state: str) -> None:
        self.shown, self.due_at = state, None
        self._interval_s = min(2 * self._interval_s, _LONGEST_REFRESH_S)


class WorkerOutput:
    """The two streams of one worker. Used by the supervisor's thread alone, but for `kept`."""

    def __init__(self, name: str, rank: int) -> None:
        self._name = name
        self._colour = _COLOURS[rank % len(_COLOURS)]
        self._buffers: dict[Stream, LineBuffer] = {"stdout": LineBuffer(), "stderr": LineBuffer()}
        self._progress: dict[Stream, _Progress] = {"stdout": _Progress(), "stderr": _Progress()}
        self._kept: deque[tuple[Stream, str]] | None = deque(maxlen=_KEPT_LINES)

    def feed(self, stream: Stream, data: bytes, now: float) -> None:
        """Takes what arrived from the worker; empty data means that its stream has ended."""
        buffer, progress = self._buffers[stream], self._progress[stream]
        lines = buffer.feed(data) if data else buffer.finish()
        if self._kept is not None:
            self._kept.extend((stream, line) for line in lines)
            return
        if lines:
            self._write(stream, lines[1:] if lines[0].rstrip() == progress.shown != "" else lines)
            self._progress[stream] = progress = _Progress()
        progress.on_state(buffer.progress, now)

    @property
    def refresh_at(self) -> float | None:
        """When to call `refresh`; None if there is nothing to show."""
        return min((item.due_at for item in self._progress.values() if item.due_at is not None), default=None)

    def refresh(self, now: float) -> None:
        """Writes the states of progress bars for which it is time."""
        for stream, progress in self._progress.items():
            if progress.due_at is not None and progress.due_at <= now:
                progress.on_shown(self._buffers[stream].progress)
                self._write(stream, [progress.shown])

    def release(self) -> None:
        """Writes what was kept back, and from now on every line as it comes."""
        kept, self._kept = self._kept or (), None
        for stream, line in kept:
            self._write(stream, [line])

    def kept(self) -> str:
        """What was printed so far by a worker that did not get ready."""
        return "\n".join(line for _, line in self._kept or ())

    def _write(self, stream: Stream, lines: Iterable[str]) -> None:
        target = sys.stdout if stream == "stdout" else sys.stderr  # looked up each time: people redirect them
        if target is None:
            return
        # The program may have closed its output, or its reader may be gone: no reason to stop supervising.
        with contextlib.suppress(OSError, ValueError):
            prefix = self._prefix(target.isatty())
            text = "".join(f"{prefix}{line}\n" for line in lines)
            if text:
                target.write(text)
                target.flush()

    def _prefix(self, is_terminal: bool) -> str:
        if is_terminal and not os.environ.get("NO_COLOR"):
            return f"\x1b[{self._colour}m[{self._name}]\x1b[0m "
        return f"[{self._name}] "


@dataclass(slots=True)
class WorkerChannels:
    """The driver's ends: two pipes to read and the lifeline."""

    lifeline: socket.socket
    pipes: dict[Stream, int] = field(default_factory=dict)

    def close(self) -> None:
        """Closes all of them. May be called again."""
        self.lifeline.close()
        while self.pipes:
            os.close(self.pipes.popitem()[1])


def make_channels() -> tuple[WorkerChannels, tuple[int, int, int]]:
    """Makes the channels for one worker.

    Returns:
        The driver's ends, and the worker's (stdout, stderr, lifeline), which the caller closes once they are sent.
    """
    with contextlib.ExitStack() as undo:
        ours, theirs = make_pair()
        ours.setblocking(False)  # the supervisor serves many workers and must not wait for one
        channels = WorkerChannels(ours)
        undo.callback(channels.close)
        undo.callback(theirs.close)
        writers: list[int] = []
        for stream in ("stdout", "stderr"):
            channels.pipes[stream], writer = os.pipe2(os.O_CLOEXEC)
            undo.callback(os.close, writer)
            os.set_blocking(channels.pipes[stream], False)
            writers.append(writer)
        undo.pop_all()
    return channels, (writers[0], writers[1], theirs.detach())


class LocalHandle:
    """A worker process, as a `WorkerHandle`. One method for each event; the supervisor's condition guards it."""

    def __init__(self, info: WorkerInfo, ticket: int, channels: WorkerChannels, on_lost: OnLost) -> None:
        self._info = info
        self._pid: int | None = None
        self._state = WorkerState.STARTING
        self._exit_reason: str | None = None
        self._started_at = time.monotonic()
        self._ended_at: float | None = None
        self.ticket = ticket
        self.channels = channels
        self.on_lost = on_lost
        self.output = WorkerOutput(info.name, info.id)

    def __repr__(self) -> str:
        return f"<LocalHandle {self._info.name} pid={self._pid} {self._state.value}>"

    @property
    def info(self) -> WorkerInfo:
        """Name and rank."""
        return self._info

    @property
    def pid(self) -> int | None:
        """Process id, or None while there is none yet."""
        return self._pid

    @property
    def state(self) -> WorkerState:
        """Where it is in its life."""
        return self._state

    @property
    def exit_reason(self) -> str | None:
        """How the process ended; None while it runs."""
        return self._exit_reason

    @property
    def uptime_s(self) -> float:
        """Seconds since it was started, until it ended."""
        return (self._ended_at or time.monotonic()) - self._started_at

    def rss_bytes(self) -> int | None:
        """Memory the process has resident now, or None when it is gone."""
        return None if self._pid is None or self._state.is_over else rss_of(self._pid)

    def on_forked(self, pid: int) -> None:
        """The template has made the process."""
        self._pid = pid

    def on_listening(self) -> None:
        """The worker can be called."""
        if self._state is WorkerState.STARTING:
            self._state = WorkerState.RUNNING

    def on_end_expected(self) -> None:
        """The driver wants it to end; its end is no loss from now on."""
        if not self._state.is_over:
            self._state = WorkerState.LEAVING

    def on_exited(self, reason: str) -> None:
        """The process is gone."""
        if not self._state.is_over:
            self._state = WorkerState.ENDED if self._state is WorkerState.LEAVING else WorkerState.LOST
            self._exit_reason = reason
            self._ended_at = time.monotonic()


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
