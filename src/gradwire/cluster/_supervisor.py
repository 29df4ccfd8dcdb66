"""The thread that watches the workers of this machine: their output, readiness and exit.

    fork server -- WorkerForked, WorkerExited -->  |            |
    worker      -- Listening -->                   | supervisor |  --> state of a WorkerHandle, on_lost
    worker      -- stdout, stderr -->              |            |  --> the driver's stdout, stderr

Other threads wait on its condition. It does not stop processes itself; `gradwire.cluster.local_launcher` does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

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
from gradwire.cluster._output import Stream, WorkerOutput
from gradwire.cluster.launcher import OnLost, WorkerHandle, WorkerState
from gradwire.cluster.status import describe_exit
from gradwire.observe.log import get_logger
from gradwire.types import WorkerInfo

_READ_BYTES = 1 << 16
# A pipe holds 64 KiB unless it was enlarged; further output of a detached process is not waited for.
_LAST_READS = 16
_FORK_SERVER_ENDED = "killed because the fork server exited"

_log = get_logger(__name__)
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
        self._is_ending = False  # whether the fork server has ended
        self._has_ended = False  # whether all that it forked count as ended, too
        self._unshown: set[LocalWorker] = set()  # those with a progress bar to show later; used by the thread alone
        self._selector = selectors.DefaultSelector()  # used by the thread alone
        self._selector.register(fork_server, selectors.EVENT_READ, self._on_fork_server_message)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._on_wakeup)
        self._thread = threading.Thread(target=self._run, name="gradwire-driver-supervisor", daemon=True)
        self._thread.start()

    @property
    def can_fork(self) -> bool:
        """Whether the fork server is there."""
        return self._fork_server.is_alive and not self._is_ending

    @property
    def has_ended(self) -> bool:
        """Whether the fork server has exited and all of its workers count as ended."""
        return self._has_ended

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
        """Do not count these workers as lost when they exit; if `ask`, ask them to shut down cleanly."""
        for worker in workers:
            with self._changed:
                worker.handle.on_end_expected()
            if ask:
                worker.send(Leave())

    def give_up(self, workers: Iterable[LocalWorker]) -> None:
        """Abandon processes that cannot be stopped: each exits when it finds its lifeline closed."""
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.lifeline.shutdown(socket.SHUT_RDWR)

    def close(self, timeout_s: float) -> bool:
        """Stop the thread; return False if it is stuck, e.g. because the driver's output is blocked. Idempotent."""
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
                with self._changed:  # what waits for it must not wait for ever
                    worker.handle.on_exited("abandoned when the cluster was closed")
                    self._changed.notify_all()
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
            if self._has_ended:
                self._on_exited(worker, _FORK_SERVER_ENDED)
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
        self._is_ending = True
        with self._changed:
            workers, self._workers = self._workers, {}
        for worker in workers.values():
            self._on_exited(worker, _FORK_SERVER_ENDED)
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

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
        """Forward the output of a worker; return False if there is no more for now."""
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
