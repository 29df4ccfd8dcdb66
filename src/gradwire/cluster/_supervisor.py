"""The thread that watches the workers of this machine: what they print, whether they are ready, and how they end.

    fork server -- WorkerForked, WorkerExited -->  |            |
    worker      -- Listening -->                   | supervisor |  --> state of a WorkerHandle, on_lost
    worker      -- stdout, stderr -->              |            |  --> the driver's stdout, stderr

Other threads wait on its condition. It ends no process itself; `gradwire.cluster.local_launcher` does.
"""

from __future__ import annotations

import contextlib
import itertools
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
from functools import partial
from typing import Literal

from gradwire import _interrupts
from gradwire.cluster._control import (
    Leave,
    Listening,
    ToWorker,
    WorkerExited,
    WorkerForked,
    make_pair,
    receive_message,
    send_message,
)
from gradwire.cluster._forkserver import ForkServerProcess
from gradwire.cluster.launcher import OnLost, WorkerHandle, WorkerState
from gradwire.cluster.status import describe_exit
from gradwire.types import WorkerInfo

Stream = Literal["stdout", "stderr"]

_MAX_LINE_BYTES = 1 << 16
_KEPT_LINES = 200
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)  # cyan first; red is left to errors
_CURSOR_UP = b"\x1b[A"
_CURSOR_MOVES = re.compile(r"\x1b\[[0-9;?]*[@-ln-~]")  # all control sequences but those for colours, which end in "m"
_FIRST_REFRESH_S = 1.0
_LONGEST_REFRESH_S = 10.0
_READ_BYTES = 1 << 16
# A pipe holds 64 KiB unless it was enlarged; what a detached process goes on writing is not waited for.
_LAST_READS = 16

_log = logging.getLogger("gradwire")
_tickets = itertools.count(1)  # unique in this process: a fork server outlives a launcher


class Supervisor:
    """Watches workers until it is closed, and then closes their channels."""

    def __init__(self, fork_server: ForkServerProcess) -> None:
        self._fork_server = fork_server
        self._changed = threading.Condition()  # guards _workers and the state of every one in it
        self._workers: dict[int, LocalWorker] = {}  # by ticket
        self._arrivals: queue.SimpleQueue[LocalWorker] = queue.SimpleQueue()  # workers that the thread is to watch
        self._wakeup, self._alarm = socket.socketpair()  # a byte makes the thread look at _arrivals and _is_closing
        self._is_closing = False
        self._unshown: set[LocalWorker] = set()  # those with a progress bar to show later; used by the thread alone
        self._selector = selectors.DefaultSelector()  # used by the thread alone
        self._selector.register(fork_server, selectors.EVENT_READ, self._on_fork_server_message)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._on_wakeup)
        self._thread = threading.Thread(target=self._run, name="gradwire-driver-supervisor", daemon=True)
        self._thread.start()

    def watch(self, worker: LocalWorker) -> None:
        with self._changed:
            self._workers[worker.ticket] = worker
        self._arrivals.put(worker)
        self._alarm.send(b"!")

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until the condition on workers holds; return False if it does not within `timeout_s`."""
        with self._changed:
            return _interrupts.wait_for(self._changed, condition, timeout_s)

    def expect_end_of(self, workers: Iterable[LocalWorker], *, ask: bool) -> None:
        """Do not count these workers as lost when they end; if `ask`, ask them to end in good order."""
        for worker in workers:
            with self._changed:
                worker.handle.on_end_expected()
            if ask:
                worker.send(Leave())

    def give_up(self, workers: Iterable[LocalWorker]) -> None:
        """Let go of processes that cannot be ended: each ends itself when it finds its lifeline closed."""
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.lifeline.shutdown(socket.SHUT_RDWR)

    def close(self, timeout_s: float) -> bool:
        """End the thread; return False if it is stuck, e.g. because the driver's output is blocked. May be called again."""
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
            for worker in self._all_workers():
                worker.close()
            for ours in (self._selector, self._wakeup, self._alarm):
                ours.close()

    def _refresh(self) -> float | None:
        """Show the progress bars for which it is time; return the seconds until the next, or None for no limit."""
        now, soonest = time.monotonic(), float("inf")
        for worker in tuple(self._unshown):
            worker.output.refresh(now)
            if worker.output.refresh_at is None:
                self._unshown.discard(worker)
            else:
                soonest = min(soonest, worker.output.refresh_at)
        return soonest - now if self._unshown else None  # without a limit, the alarm ends the wait

    def _all_workers(self) -> tuple[LocalWorker, ...]:
        with self._changed:
            return tuple(self._workers.values())

    def _on_wakeup(self) -> None:
        self._wakeup.recv(4096)
        while not self._arrivals.empty():
            worker = self._arrivals.get()
            if worker.handle.state.is_over:
                continue
            for stream, fd in worker.pipes.items():
                self._selector.register(fd, selectors.EVENT_READ, partial(self._on_output, worker, stream))
            self._selector.register(worker.lifeline, selectors.EVENT_READ, partial(self._on_lifeline, worker))

    def _on_fork_server_message(self) -> None:
        try:
            message = self._fork_server.receive()
        except OSError:
            message = None  # the launcher has given the fork server up
        if message is None:
            self._on_fork_server_ended()
        elif isinstance(message, WorkerForked):
            with self._changed:
                self._workers[message.ticket].handle.on_process_made(message.pid)
                self._changed.notify_all()
        elif isinstance(message, WorkerExited):
            with self._changed:
                worker = self._workers.pop(message.ticket)
            self._on_exited(worker, message.error or describe_exit(message.status))

    def _on_fork_server_ended(self) -> None:
        """Count all workers as ended: the kernel kills them with their parent."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._fork_server)
        with self._changed:
            workers, self._workers = self._workers, {}
        for worker in workers.values():
            self._on_exited(worker, "killed because the fork server ended")

    def _on_exited(self, worker: LocalWorker, reason: str) -> None:
        for stream in tuple(worker.pipes):
            for _ in range(_LAST_READS):
                if not self._on_output(worker, stream):
                    break
            self._close_pipe(worker, stream)
        self._close_lifeline(worker)
        with self._changed:
            was_running = worker.handle.state is WorkerState.RUNNING
            worker.handle.on_exited(reason)
            self._changed.notify_all()
        if was_running:
            self._announce_loss(worker)

    def _announce_loss(self, lost: LocalWorker) -> None:
        try:
            lost.on_lost(lost.handle)
        except Exception:
            _log.exception("the loss of %s could not be handled", lost.handle.info.name)

    def _on_lifeline(self, worker: LocalWorker) -> None:
        if worker.lifeline.fileno() < 0:
            return  # closed by an event before this one
        message, _ = receive_message(worker.lifeline)
        if message is None:
            self._close_lifeline(worker)
        elif isinstance(message, Listening):
            worker.output.release()
            with self._changed:
                worker.handle.on_listening(message.address)
                self._changed.notify_all()

    def _close_lifeline(self, worker: LocalWorker) -> None:
        with contextlib.suppress(KeyError, ValueError):  # not watched yet, or closed already
            self._selector.unregister(worker.lifeline)
        worker.lifeline.close()

    def _on_output(self, worker: LocalWorker, stream: Stream) -> bool:
        """Pass on what a worker has printed; return False if there is no more for now."""
        fd = worker.pipes.get(stream)
        if fd is None:
            return False  # closed by an event before this one
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            worker.output.feed(stream, data, time.monotonic())
            if worker.output.refresh_at is not None:
                self._unshown.add(worker)
        else:
            self._close_pipe(worker, stream)
        return bool(data)

    def _close_pipe(self, worker: LocalWorker, stream: Stream) -> None:
        fd = worker.pipes.pop(stream, None)
        if fd is not None:
            with contextlib.suppress(KeyError):  # not watched yet
                self._selector.unregister(fd)
            os.close(fd)
            worker.output.feed(stream, b"", time.monotonic())


class LocalWorker:
    """A worker process of this machine: its state, what it prints, and the driver's ends of its channels."""

    def __init__(self, info: WorkerInfo, on_lost: OnLost) -> None:
        self.ticket = next(_tickets)
        self.handle = WorkerHandle(info)  # guarded by the supervisor's condition
        self.handle.host = socket.gethostname()
        self.on_lost = on_lost
        self.output = WorkerOutput(info.name, info.id)
        self.pipes: dict[Stream, int] = {}  # like the lifeline, closed by the supervisor's thread
        self.lifeline, self._their_lifeline = make_pair()
        self.lifeline.setblocking(False)  # the supervisor serves many workers and must not wait for one

    def make_pipes(self) -> tuple[int, int, int]:
        """Return the worker's ends (stdout, stderr, lifeline), which the caller closes once they are sent."""
        writers = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            undo.callback(self._their_lifeline.close)
            for stream in ("stdout", "stderr"):
                self.pipes[stream], writer = os.pipe2(os.O_CLOEXEC)
                undo.callback(os.close, writer)
                os.set_blocking(self.pipes[stream], False)
                writers.append(writer)
            undo.pop_all()
        return writers[0], writers[1], self._their_lifeline.detach()

    def send(self, message: ToWorker) -> None:
        """Send a message, unless the worker is gone or too busy to read."""
        with contextlib.suppress(OSError):  # the caller has other means
            send_message(self.lifeline, message)

    def close(self) -> None:
        self.lifeline.close()
        while self.pipes:
            os.close(self.pipes.popitem()[1])


class LineBuffer:
    """Bytes in, whole lines out."""

    def __init__(self) -> None:
        self._rest = b""
        self.progress = ""  # the state of a line that rewrites itself and has not ended; empty if there is none

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that this data completes, without their ends.

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
        """Return what has no line end and never will."""
        rest, self._rest, self.progress = self._rest, b"", ""
        shown = _as_shown(rest)
        return [shown] if (shown.strip() if b"\r" in rest else shown) else []  # a bar may have been wiped out


def _as_shown(line: bytes) -> str:
    """Return a line as a terminal would leave it: of a progress bar that rewrites itself, the last state."""
    return _CURSOR_MOVES.sub("", line.decode(errors="replace").rstrip("\r").rpartition("\r")[2])


class _Progress:
    """Decides when the state of a stream's progress bar is shown."""

    def __init__(self) -> None:
        self.shown = ""
        self.due_at: float | None = None
        self._interval_s = _FIRST_REFRESH_S

    def on_state(self, state: str, now: float) -> None:
        """Note the state of the bar, which is empty if there is none."""
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
        """Take what arrived from the worker; empty data means that its stream has ended."""
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
        """Write the states of progress bars for which it is time."""
        for stream, progress in self._progress.items():
            if progress.due_at is not None and progress.due_at <= now:
                progress.on_shown(self._buffers[stream].progress)
                self._write(stream, [progress.shown])

    def release(self) -> None:
        """Write what was kept back, and from now on every line as it comes."""
        kept, self._kept = self._kept or (), None
        for stream, line in kept:
            self._write(stream, [line])

    def kept(self) -> str:
        """Return what was printed so far by a worker that did not get ready."""
        return "\n".join(line for _, line in self._kept or ())

    def _write(self, stream: Stream, lines: Iterable[str]) -> None:
        target = sys.stdout if stream == "stdout" else sys.stderr  # looked up each time: programs redirect them
        if target is None:
            return
        # The program may have closed its output, or its reader may be gone; the supervisor goes on.
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
