"""Relay the output of workers on other machines to the driver.

    worker   file descriptors 1, 2 --> pipe --> OutputCapture  -- cluster.output -->  OutputPrinter   driver's stdout, stderr

Each piece is acknowledged once it is printed, and the next one waits for that: a driver whose output is blocked blocks the
workers' output, as with a pipe, and memory is bounded on both sides.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import select
import sys
import threading
import time
from typing import Annotated

from msgspec import Meta

from gradwire.cluster._output import Stream, WorkerOutput
from gradwire.errors import AuthenticationFailed
from gradwire.observe.log import get_logger
from gradwire.rpc.agent import Agent
from gradwire.rpc.futures import InterruptibleFuture
from gradwire.types import WorkerInfo

OUTPUT = "cluster.output"

_PIECE_BYTES = 1 << 16
_KEPT_BYTES = 1 << 14
_RETRY_S = 0.1
_STOP, _SEND_EARLY = b"!", b"+"
_STREAMS: dict[Stream, int] = {"stdout": 1, "stderr": 2}
_Piece = Annotated[bytes, Meta(max_length=_PIECE_BYTES)]

_log = get_logger(__name__)


class OutputCapture:
    """Capture the output of this process until it is closed, then restore it.

    While there is no driver to send it to, the output goes to the original destination. The last part of what was printed
    before the driver connected is sent to it as well.

    Args:
        repeats_early: Whether to send that part; False if the driver's output goes to the same place.
    """

    def __init__(self, *, repeats_early: bool = True) -> None:
        self._repeats_early = repeats_early
        self._agent: Agent | None = None
        self._driver = ""
        self._early: list[tuple[Stream, bytes]] = []  # printed without a driver; used by the thread, but for `kept`
        self._lock = threading.Lock()  # guards _is_closed, and the change of _agent to one
        self._is_closed = False
        self._reading = threading.Lock()  # held while output is neither in its pipe nor in _early
        self._before = {stream: os.dup(fd) for stream, fd in _STREAMS.items()}
        self._pipes: dict[int, Stream] = {}
        self._wakeup, self._waker = os.pipe2(os.O_CLOEXEC)
        _flush()
        for text in (sys.stdout, sys.stderr):
            if isinstance(
                text, io.TextIOWrapper
            ):  # before: it asks for its place in a file, which a pipe does not have
                text.reconfigure(line_buffering=True, errors="backslashreplace")
        for stream, fd in _STREAMS.items():
            reader, writer = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(reader, False)
            self._pipes[reader] = stream
            os.dup2(writer, fd)  # inheritable: what processes of this one print is the worker's, too
            os.close(writer)
        self._thread = threading.Thread(target=self._run, name="gradwire-output", daemon=True)
        self._thread.start()

    @property
    def stderr_before(self) -> int:
        """The descriptor that leads to where stderr went before."""
        return self._before["stderr"]

    def forward_to(self, agent: Agent, driver: str) -> None:
        """Send output to the driver from now on. Idempotent."""
        with self._lock:
            if self._is_closed or self._agent is agent:
                return
            self._driver, self._agent = driver, agent
            os.write(self._waker, _SEND_EARLY)

    def kept(self) -> str:
        """Return the last part of the output from before the driver connected."""
        _flush()
        deadline = time.monotonic() + 1.0
        while any(_has_bytes(fd) for fd in self._pipes) and time.monotonic() < deadline:
            time.sleep(0.005)
        with self._reading:
            return b"".join(data for _, data in list(self._early)).decode(errors="replace")

    def close(self, timeout_s: float) -> None:
        """Restore the output and send the rest; what cannot be sent in time goes to the original destination."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        _flush()
        for stream, fd in _STREAMS.items():
            os.dup2(self._before[stream], fd)
        os.write(self._waker, _STOP)
        self._thread.join(timeout_s)
        self._agent = None
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return  # stuck in a write of its own: its descriptors are needed until the process ends
        for fd in (*self._before.values(), *self._pipes, self._wakeup, self._waker):
            os.close(fd)

    def _run(self) -> None:
        open_pipes = dict(self._pipes)
        poll = select.poll()
        for fd in (*open_pipes, self._wakeup):
            poll.register(fd, select.POLLIN)
        is_stopping = False
        while open_pipes:
            ready = [fd for fd, _ in poll.poll(0 if is_stopping else None)]
            if is_stopping and not ready:
                return  # a process that was started here may hold the other end open
            if self._wakeup in ready:
                is_stopping = _STOP in os.read(self._wakeup, 16)
                self._send_early()
            for fd in [fd for fd in ready if fd in open_pipes]:
                with self._reading:
                    data, is_early = _read(fd), self._agent is None
                    if data and is_early:
                        self._keep(open_pipes[fd], data)
                if data and is_early:
                    self._write(open_pipes[fd], data)
                elif data:
                    self._send_early()
                    self._send(open_pipes[fd], data)
                elif data is not None:
                    poll.unregister(fd)
                    del open_pipes[fd]

    def _keep(self, stream: Stream, data: bytes) -> None:
        self._early.append((stream, data))
        too_many = sum(len(kept) for _, kept in self._early) - _KEPT_BYTES
        while too_many > 0:
            first_stream, first = self._early[0]
            self._early[:1] = [(first_stream, first[too_many:])] if len(first) > too_many else []
            too_many -= len(first)

    def _send_early(self) -> None:
        if self._agent is None:
            return
        early, self._early = self._early, []
        for stream, data in early if self._repeats_early else ():
            self._send(stream, data)

    def _send(self, stream: Stream, data: bytes) -> None:
        while (agent := self._agent) is not None and not agent.is_closed:
            try:
                agent.ask(self._driver, OUTPUT, (stream, data), 0.0, None).wait()
                return
            except Exception:  # the driver is cut off, and may come back; if it does not, this is closed soon
                time.sleep(_RETRY_S)
        self._write(stream, data)

    def _write(self, stream: Stream, data: bytes) -> None:
        """Write to the original destination of the output."""
        with contextlib.suppress(OSError):
            view = memoryview(data)
            while view:
                view = view[os.write(self._before[stream], view) :]


def _read(fd: int) -> bytes | None:
    try:
        return os.read(fd, _PIECE_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _has_bytes(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return any(event & select.POLLIN for _, event in poll.poll(0))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed by the user's code, or None
            stream.flush()


_Item = tuple[str, Stream | None, bytes, InterruptibleFuture[None] | None]


class OutputPrinter:
    """Print the output of workers on other machines in the driver, prefixed with their names."""

    def __init__(self, agent: Agent) -> None:
        self._outputs: dict[str, WorkerOutput] = {}  # single operations only
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gradwire-driver-output", daemon=True)
        self._thread.start()
        agent.server.register_control(OUTPUT, self._on_output, Stream, _Piece)

    def add(self, info: WorkerInfo) -> None:
        """Print the output that this worker sends."""
        output = WorkerOutput(info.name, info.id)
        output.release()
        self._outputs[info.name] = output

    def finish(self, name: str) -> None:
        """Print the incomplete last line of a worker that has exited."""
        if name in self._outputs:
            for stream in _STREAMS:
                self._queue.put((name, stream, b"", None))

    def close(self, timeout_s: float) -> None:
        """Print what has arrived, and stop. Idempotent."""
        self._queue.put(None)
        self._thread.join(timeout_s)  # it is stuck for as long as the driver's own output is

    def _on_output(self, source: WorkerInfo, stream: Stream, data: bytes) -> InterruptibleFuture[None]:
        if source.name not in self._outputs:
            raise AuthenticationFailed(f"this process does not print the output of {source.name}")
        printed: InterruptibleFuture[None] = InterruptibleFuture()
        self._queue.put((source.name, stream, data, printed))
        return printed

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=self._refresh())
            except queue.Empty:
                continue
            if item is None:
                return
            name, stream, data, printed = item
            try:
                if stream is not None and (output := self._outputs.get(name)) is not None:
                    output.feed(stream, data, time.monotonic())
            except Exception:
                _log.exception("the output of %s could not be printed", name)
            if printed is not None:
                printed.set_result(None)

    def _refresh(self) -> float | None:
        """Show the progress bars for which it is time; return the seconds until the next, or None for no limit."""
        now, soonest = time.monotonic(), float("inf")
        for output in list(self._outputs.values()):
            output.refresh(now)
            soonest = min(soonest, float("inf") if output.refresh_at is None else output.refresh_at)
        return None if soonest == float("inf") else max(0.0, soonest - now)
