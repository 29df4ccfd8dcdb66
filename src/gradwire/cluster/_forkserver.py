"""The fork server: it imports torch once and forks a worker whenever the driver asks for one.

Importing torch takes about two seconds of CPU; a fork of a process that has done so takes five milliseconds and
shares the memory. A fork copies only the thread that calls it, so the fork server never has a second one: it sets the
thread counts of the numerical libraries to one before it imports them, and never runs an operation.

It also makes sure that workers end. As their parent, it knows how they exited, and the process ids it signals cannot have
been reused. It exits when the driver closes the channel or dies, after killing the workers and the processes they started
and removing the folder of their sockets. If the fork server itself is killed, the kernel kills the workers
(`die_with_parent`).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from gradwire import _interrupts
from gradwire._progress_bar import REFRESH_S
from gradwire.cluster._control import (
    AdoptFolder,
    FolderMade,
    ForgetFolder,
    ForkServerReady,
    ForkWorker,
    FromForkServer,
    MakeFolder,
    SendSignal,
    ToForkServer,
    WorkerExited,
    WorkerForked,
    make_pair,
    receive_message,
    send_message,
    text_path,
)
from gradwire.cluster._process import die_with_parent, name_process
from gradwire.cluster._worker_main import WorkerFds, flush_output, run_worker
from gradwire.errors import ConfigurationError, WorkerStartFailed
from gradwire.runtime import import_all

_REAP_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 10.0


class ForkServer:
    """Serves one driver, in the only thread of its process."""

    def __init__(self, channel: socket.socket, driver_pid: int) -> None:
        channel.settimeout(_SEND_TIMEOUT_S)
        self._channel = channel
        self._driver_pid = driver_pid
        self._tickets: dict[int, int] = {}  # pid of a living worker -> its ticket
        self._folders: list[str] = []
        self._child_ended, self._wakeup = socket.socketpair()  # a byte arrives with every SIGCHLD

    def serve(self) -> None:
        """Serve the driver until it exits, then kill all workers."""
        self._listen_to_signals()
        _prepare_to_be_copied()
        try:
            self._send(ForkServerReady(num_threads=len(os.listdir("/proc/self/task"))))
            self._serve_until_driver_ends()
        finally:
            self._end_all()

    def _send(self, message: FromForkServer) -> None:
        with contextlib.suppress(OSError):  # the driver is gone; the loop is about to notice
            send_message(self._channel, message)

    def _listen_to_signals(self) -> None:
        for end in (self._child_ended, self._wakeup):
            end.setblocking(False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
        signal.signal(signal.SIGCHLD, _note_signal)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)

    def _serve_until_driver_ends(self) -> None:
        # The channel alone is not enough: a process that the driver forked may hold the other end open after its death.
        driver = os.pidfd_open(self._driver_pid)  # readable when the driver has ended
        if os.getppid() != self._driver_pid:
            return
        poll = select.poll()
        for fd in (self._channel.fileno(), self._child_ended.fileno(), driver):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}  # no deadline: this wait is the purpose of the process
            if driver in ready:
                return
            if self._child_ended.fileno() in ready:
                self._reap()
            if self._channel.fileno() in ready and not self._handle_request():
                return

    def _handle_request(self) -> bool:
        message, fds = receive_message(self._channel)
        if isinstance(message, ForkWorker):
            self._fork(message.ticket, WorkerFds(*fds))
        elif isinstance(message, SendSignal):
            self._signal(message)
        elif isinstance(message, MakeFolder):
            self._make_folder(message.base)
        elif isinstance(message, AdoptFolder):
            self._folders.append(message.path)
        elif isinstance(message, ForgetFolder):
            self._folders.remove(message.path)
        return message is not None

    def _fork(self, ticket: int, fds: WorkerFds) -> None:
        server_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._send(WorkerExited(ticket, -1, error=f"fork failed: {error.strerror}"))
        else:
            if pid == 0:
                self._become_worker(server_pid, fds)
            self._tickets[pid] = ticket
            self._send(WorkerForked(ticket, pid))
        finally:
            fds.close()

    def _become_worker(self, server_pid: int, fds: WorkerFds) -> NoReturn:
        """Run the worker in the forked process; never return into the fork server's loop."""
        status = 1
        try:
            fds.redirect_output()
            die_with_parent(server_pid)
            os.setsid()  # Ctrl-C reaches the driver alone, and SIGKILL can reach what the worker started
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for ours in (self._channel, self._child_ended, self._wakeup):
                ours.close()
            run_worker(fds)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            flush_output()
            os._exit(status)

    def _signal(self, request: SendSignal) -> None:
        for pid, ticket in self._tickets.items():
            if ticket == request.ticket:
                _kill(pid, request.signum)

    def _make_folder(self, base: str) -> None:
        try:
            folder = tempfile.mkdtemp(prefix="gradwire-", dir=base)
        except OSError as error:
            self._send(FolderMade("", error=str(error)))
        else:
            self._folders.append(folder)
            self._send(FolderMade(folder))

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._child_ended.recv(4096):
                pass
        while self._tickets:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            # While the zombie is there its number cannot mean another group: now is the time to end what it started.
            _kill(ended.si_pid, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            ticket = self._tickets.pop(ended.si_pid, None)
            if ticket is not None:
                self._send(WorkerExited(ticket, status))

    def _end_all(self) -> None:
        for pid in self._tickets:
            _kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _REAP_TIMEOUT_S
        poll = select.poll()
        poll.register(self._child_ended.fileno(), select.POLLIN)
        self._reap()
        while self._tickets and (left_s := deadline - time.monotonic()) > 0:
            poll.poll(left_s * 1000)
            self._reap()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


def _prepare_to_be_copied() -> None:
    """Make forking, and exiting the forked process, as cheap as possible."""
    gc.collect()
    gc.freeze()  # a collection in a worker then leaves the pages that it shares with us alone
    gc.enable()  # see _PROGRAM
    # The functions that torch registers for the end of the interpreter take 30 ms, and workers do not need them.
    for finalizer in tuple(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False


def _kill(pid: int, signum: int) -> None:
    """Signal a process that has not been reaped; SIGKILL goes to its process group as well."""
    for kill in (os.kill, os.killpg) if signum == signal.SIGKILL else (os.kill,):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signum)


def _note_signal(signum: int, frame: FrameType | None) -> None:
    """SIGCHLD needs a handler for the wake-up byte to be written; the loop does the rest."""


def main(channel_fd: int, driver_pid: int, modules: Sequence[str] = ()) -> None:
    """Run the fork server at the end of the channel with that descriptor, with these modules for its workers."""
    name_process("forkserver")
    for module in modules:
        importlib.import_module(module)
    import_all()
    ForkServer(socket.socket(fileno=channel_fd), driver_pid).serve()
    os._exit(0)  # taking torch apart would take half a second, and the driver waits for us


# The path comes first: gradwire and torch must be the driver's own, wherever it found them. What they make while they are
# imported stays, and to look for garbage in it again and again takes a quarter of the time of the import.
_PROGRAM = (
    "import gc, sys; gc.disable(); sys.path[:] = sys.argv[4:]; "
    "from gradwire.cluster._forkserver import main; main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split())"
)
# OpenBLAS starts its threads when it is loaded; OpenMP and MKL count them then.
_SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_EXIT_TIMEOUT_S = 8.0
OnWait = Callable[[], object]


class ForkServerProcess:
    """A fork server as its driver sees it."""

    def __init__(self, timeout_s: float, modules: Sequence[str] = (), on_wait: OnWait = lambda: None) -> None:
        """Start it and wait until it can fork. It imports `modules` besides torch; none of them may start a thread."""
        self.modules = frozenset(modules)
        self._channel, theirs = make_pair()
        self._channel.settimeout(_SEND_TIMEOUT_S)
        with theirs:
            self._process = _spawn(theirs, modules)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close, force=True)
            self._wait_ready(timeout_s, on_wait)
            undo.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fileno(self) -> int:
        """Return the channel's descriptor, for a selector."""
        return self._channel.fileno()

    def send(self, message: ToForkServer, fds: tuple[int, ...] = ()) -> None:
        """Send a request. May be called from any thread: a packet is never torn."""
        send_message(self._channel, message, fds)

    def receive(self) -> FromForkServer | None:
        """Read one message; None is the end of the fork server."""
        message, _ = receive_message(self._channel)
        assert message is None or isinstance(message, FromForkServer), message
        return message

    def close(self, *, force: bool = False) -> None:
        """Stop the process and all of its workers. Idempotent."""
        with contextlib.suppress(OSError):
            # Unlike close, it reaches the fork server past copies of the descriptor.
            self._channel.shutdown(socket.SHUT_RDWR)
        if force:
            self._process.kill()
        try:
            if not self._wait_exit():
                self._process.kill()
                self._wait_exit()
        finally:
            self._channel.close()
            if self._process.stdout is not None:
                self._process.stdout.close()

    def _wait_ready(self, timeout_s: float, on_wait: OnWait) -> None:
        deadline = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        while not _interrupts.poll(poller, max(0.0, min(deadline - time.monotonic(), REFRESH_S)) * 1000):
            if time.monotonic() >= deadline:
                raise WorkerStartFailed(
                    "the fork server did not import torch in time; raise start_timeout_s (or timeout, for add_workers)"
                )
            on_wait()
        message = self.receive()
        if not isinstance(message, ForkServerReady):
            raise WorkerStartFailed(f"the fork server exited before it was ready. It printed:\n{self._read_output()}")
        if message.num_threads != 1:
            raise WorkerStartFailed(
                f"the fork server has {message.num_threads} threads after importing torch and cannot fork safely; "
                "something in this environment starts threads at Python startup (a .pth file or sitecustomize?)"
            )

    @_interrupts.interruptible
    def _wait_exit(self) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_EXIT_TIMEOUT_S)
        return not self.is_alive

    def _read_output(self) -> str:
        self._wait_exit()
        self._process.kill()  # or the read below might wait
        assert self._process.stdout is not None
        return self._process.stdout.read().decode(errors="replace")


def _check_platform() -> None:
    if not sys.platform.startswith("linux") or not hasattr(os, "fork"):
        raise ConfigurationError("Cluster.local needs Linux: its workers are forked from another process")
    if not sys.executable:
        raise ConfigurationError("Cluster.local cannot find the Python that runs this program: sys.executable is empty")


def _spawn(channel: socket.socket, modules: Sequence[str]) -> subprocess.Popen[bytes]:
    options = [f"-W{option}" for option in sys.warnoptions]
    arguments = [str(channel.fileno()), str(os.getpid()), " ".join(modules), *text_path()]
    return subprocess.Popen(
        [sys.executable, *options, "-c", _PROGRAM, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[channel.fileno()],
        env={**os.environ, **_SINGLE_THREADED},
        start_new_session=True,  # Ctrl-C in the terminal is for the driver alone
    )


_lock = threading.Lock()  # guards _idle
_idle: ForkServerProcess | None = None
# The parent's, in a forked process: kept so that nothing finalises it there.
_inherited: ForkServerProcess | None = None


def borrow_fork_server(
    timeout_s: float, modules: Sequence[str] = (), on_wait: OnWait = lambda: None
) -> ForkServerProcess:
    """Return the idle fork server, or a new one. Give it back with `return_fork_server`, or close it.

    It has imported `modules` besides torch; their cost is then paid once, not in every worker. Meanwhile `on_wait` is
    called now and then.
    """
    _check_platform()
    server = _take_idle()
    if server is not None and not (server.is_alive and server.modules.issuperset(modules)):
        server.close()
        server = None
    return server or ForkServerProcess(timeout_s, modules, on_wait)


def return_fork_server(server: ForkServerProcess) -> None:
    """Keep a fork server without workers for the next cluster."""
    global _idle
    with _lock:
        is_surplus = _idle is not None
        if not is_surplus:
            _idle = server
    if is_surplus:
        server.close()


def close_idle_fork_server() -> None:
    """Stop the fork server that is kept for the next cluster, if there is one."""
    server = _take_idle()
    if server is not None:
        server.close()


def _take_idle() -> ForkServerProcess | None:
    global _idle
    with _lock:
        server, _idle = _idle, None
    return server


def _forget_after_fork() -> None:
    """Leave the driver's fork server to the driver, in a process that it forked."""
    global _idle, _inherited, _lock
    _lock = threading.Lock()
    _inherited, _idle = _idle, None


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(close_idle_fork_server)
