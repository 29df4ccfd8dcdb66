"""The status of open clusters, the link to their page, and traces of them, for commands in another terminal.

    driver     listens on <folder>/<cluster>.sock as long as its cluster is open
    command    connects, sends a `Request` as one line of JSON, and reads one JSON document until the end of the stream

The folder belongs to the user alone (mode 0700), and the driver reads from and answers processes of the same user only. A
socket whose driver was killed is removed by the next one that finds it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
import stat
import struct
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from gradwire.cluster.status import ClusterStatus, WorkerStatus
from gradwire.errors import GradwireError
from gradwire.observe.log import get_logger
from gradwire.versions import GRADWIRE_VERSION

SUFFIX = ".sock"

_MAX_SCRIPT_CHARS = 40
_MAX_SOCKET_PATH = 107  # bytes that the kernel takes
_MAX_NAMESAKES = 9
_MAX_REQUEST_BYTES = 4096
_MAX_REPORT_BYTES = 64 << 20
_READ_BYTES = 1 << 16
_BACKLOG = 16
_READ_TIMEOUT_S = 2.0
_SEND_TIMEOUT_S = 2.0
_STOP_TIMEOUT_S = 0.2
_PID = re.compile(rf"-(\d+)(?:-\d)?{re.escape(SUFFIX)}$")  # at the end of the name of a socket
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid

_Kind = TypeVar("_Kind")

_log = get_logger(__name__)


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a command asks of a driver: ``status``, or an operation of the cluster."""

    operation: Annotated[str, msgspec.Meta(max_length=64)]
    options: Annotated[dict[str, str | int | float | bool], msgspec.Meta(max_length=16)] = {}


class Answer(msgspec.Struct, frozen=True):
    """What an operation of the cluster returned, or why it, or a report, failed."""

    text: str = ""
    error: str = ""


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True):
    """Status report of a driver.

    Attributes:
        name: Name of the cluster in `gradwire status`.
        pid: Process id of the driver.
        gradwire: Its version of gradwire.
        command: The driver's program and its arguments.
        folder: The folder in which the driver was started.
        uptime_s: Seconds since the cluster was opened.
        workers: The result of `Cluster.status`.
        driver: The same about the driver.
    """

    name: str
    pid: int
    gradwire: str
    command: tuple[str, ...]
    folder: str
    uptime_s: float
    workers: tuple[WorkerStatus, ...]
    driver: WorkerStatus


# The driver's side


class StatusSocket:
    """Serves the status of one cluster, and operations that return a text: each client in a daemon thread of its own.

    As a context manager it closes itself at the end.
    """

    def __init__(
        self,
        status: Callable[[], ClusterStatus],
        driver_status: Callable[[], WorkerStatus],
        operations: Mapping[str, Callable[..., str]] = types.MappingProxyType({}),
    ) -> None:
        self._status = status
        self._driver_status = driver_status
        self._operations = operations
        self._opened_at = time.monotonic()
        self._owner_pid = os.getpid()
        self._is_closed = False
        self._folder = ""
        with contextlib.suppress(FileNotFoundError):  # it has been removed
            self._folder = os.getcwd()
        self._listener, self._path = _listen(_default_name())
        self._thread = threading.Thread(target=self._serve, name="gradwire-driver-status", daemon=True)
        self._thread.start()
        _open_sockets.add(self)

    @classmethod
    def open(
        cls,
        status: Callable[[], ClusterStatus],
        driver_status: Callable[[], WorkerStatus],
        operations: Mapping[str, Callable[..., str]] = types.MappingProxyType({}),
    ) -> StatusSocket | None:
        """Start serving; return None if that is not possible, which must not prevent a cluster from working."""
        try:
            return cls(status, driver_status, operations)
        except OSError as error:
            _log.warning("`gradwire status` will not show this cluster: %s", error)
            return None

    @property
    def name(self) -> str:
        return self._path.name.removesuffix(SUFFIX)

    def __enter__(self) -> StatusSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving and remove the socket. Idempotent."""
        if os.getpid() != self._owner_pid:
            return  # a process that the driver forked
        self._is_closed = True
        _open_sockets.discard(self)
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # unlike close, it ends the wait in accept
        self._thread.join(_STOP_TIMEOUT_S)
        self._listener.close()

    def leave_to_parent(self) -> None:
        """Close the copy of the socket in a process that the driver forked, so that it ends with the driver."""
        self._listener.close()

    def _serve(self) -> None:
        _remove_stale(self._path.parent)
        while True:
            try:
                connection, _ = self._listener.accept()  # no deadline: it waits as long as the cluster is open
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ECONNABORTED):
                    time.sleep(_STOP_TIMEOUT_S)  # the process is short of something now
                    continue
                return  # closed
            try:
                if _user_of(connection) != os.geteuid():
                    connection.close()
                    continue
                # A silent client, or an operation that takes long, must not delay others.
                thread = threading.Thread(
                    target=self._answer, args=(connection,), name="gradwire-driver-status-client", daemon=True
                )
                thread.start()
            except (OSError, RuntimeError):  # the client is gone, or no thread can be started now
                connection.close()

    def _answer(self, connection: socket.socket) -> None:
        # The client is gone or too slow, or its request is not valid.
        with connection, contextlib.suppress(OSError, msgspec.MsgspecError):
            request = msgspec.json.decode(_read_line(connection, _READ_TIMEOUT_S), type=Request)
            answer = msgspec.json.encode(self._perform(request, lambda: _is_gone(connection)))
            connection.settimeout(_SEND_TIMEOUT_S)
            connection.sendall(answer)

    def _perform(self, request: Request, is_gone: Callable[[], bool]) -> ClusterReport | Answer:
        try:
            if request.operation == "status":
                return self._report()
            operation = self._operations.get(request.operation)
            if operation is None:
                return Answer(error=f"the driver runs gradwire {GRADWIRE_VERSION}, which has no {request.operation!r}")
            return Answer(operation(is_gone, **request.options))
        except (GradwireError, OSError) as error:
            return Answer(error=str(error) or type(error).__name__)
        except Exception as error:
            if not self._is_closed:
                _log.exception("`gradwire %s` failed", request.operation)
            return Answer(error=f"the driver failed with {type(error).__name__}: {error}")

    def _report(self) -> ClusterReport:
        return ClusterReport(
            name=self.name,
            pid=os.getpid(),
            gradwire=GRADWIRE_VERSION,
            command=tuple(sys.argv),
            folder=self._folder,
            uptime_s=time.monotonic() - self._opened_at,
            workers=tuple(self._status()),
            driver=self._driver_status(),
        )


_open_sockets: weakref.WeakSet[StatusSocket] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for opened in tuple(_open_sockets):
        opened.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def _is_gone(connection: socket.socket) -> bool:
    """Return whether a client that has sent its line, and waits, has closed its end."""
    poller = select.poll()  # `select.select` takes no descriptors above 1,023
    poller.register(connection, select.POLLIN)
    return bool(poller.poll(0))


def _read_line(connection: socket.socket, timeout_s: float) -> bytes:
    """Read a line, in that time for all of it."""
    deadline = time.monotonic() + timeout_s
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < _MAX_REQUEST_BYTES:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        data = connection.recv(_MAX_REQUEST_BYTES)
        if not data:
            break
        line += data
    return bytes(line)


def _default_name() -> str:
    """Return ``<script>-<pid>``, of characters that need no quotes in a shell."""
    script = Path(sys.argv[0] if sys.argv else "").stem
    if script in ("", "-c", "-"):
        script = "python"  # typed, or from standard input
    elif script == "ipykernel_launcher":
        script = "notebook"
    elif script == "__main__":
        script = Path(sys.argv[0]).parent.name
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', script)[:_MAX_SCRIPT_CHARS]}-{os.getpid()}"


def _listen(name: str) -> tuple[socket.socket, Path]:
    """Listen under that name, or under a similar one if another driver has it: containers may share the folder."""
    folder = _make_folder(len(name) + len(SUFFIX) + 3)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.ExitStack() as undo:
        undo.callback(listener.close)
        for number in range(1, _MAX_NAMESAKES + 1):
            path = folder / f"{name}{'' if number == 1 else f'-{number}'}{SUFFIX}"
            if _is_stale(path):
                path.unlink(missing_ok=True)
            try:
                listener.bind(str(path))
            except OSError as error:
                if error.errno != errno.EADDRINUSE or number == _MAX_NAMESAKES:
                    raise
                continue
            listener.listen(_BACKLOG)
            break
        undo.pop_all()
    return listener, path


def _make_folder(num_name_bytes: int) -> Path:
    """Return the first of the user's folders that can be used.

    Raises:
        OSError: None can.
    """
    problem: OSError | None = None
    for folder in _folders():
        try:
            if len(os.fsencode(folder)) + 1 + num_name_bytes > _MAX_SOCKET_PATH:
                raise OSError(errno.ENAMETOOLONG, "the path is too long for a socket", str(folder))
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            _check_folder(folder)
            return folder
        except OSError as error:
            problem = error
    assert problem is not None
    raise problem


def _user_of(connection: socket.socket) -> int:
    """Return the user id of the peer process."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(raw)[1]
    return uid


# Both sides


def _folders() -> list[Path]:
    """Return the possible folders for this user's sockets, best first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return [*([Path(runtime, "gradwire")] if runtime else []), Path(f"/tmp/gradwire-{os.geteuid()}")]


def check_place() -> Path:
    """Return the folder for this user's sockets, creating it if necessary.

    Raises:
        OSError: No folder can be used.
    """
    return _make_folder(len(_default_name()) + len(SUFFIX))


def _check_folder(folder: Path) -> None:
    """Refuse a folder in which other users could place or remove sockets."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise OSError(errno.EPERM, "must be a folder owned by this user with mode 0700; remove it", str(folder))


def _is_stale(path: Path) -> bool:
    """Return whether nothing listens on that socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False  # there is none, or it is busy
        return False


def _remove_stale(folder: Path) -> None:
    """Remove the sockets of killed drivers, without connecting to live ones."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"*{SUFFIX}"):
            driver = _PID.search(path.name)
            if driver and not os.path.exists(f"/proc/{driver[1]}") and _is_stale(path):
                path.unlink(missing_ok=True)


# The side of the command line


class NoReport(Exception):
    """A cluster did not report its status; the message says why."""


class ClusterGone(NoReport):
    """The driver was killed; its socket has been removed."""


def list_sockets() -> list[Path]:
    """Return the sockets of the clusters of this user on this machine, sorted by name. Some may be left behind."""
    found: list[Path] = []
    for folder in _folders():
        try:
            _check_folder(folder)
        except OSError:
            continue
        found += folder.glob(f"*{SUFFIX}")
    return sorted(found, key=lambda path: path.name)


def read_report(path: Path, timeout_s: float) -> ClusterReport:
    """Ask a driver for the status of its cluster.

    Raises:
        NoReport: It did not respond in time, has just exited, or runs another version of gradwire.
    """
    return _ask(path, Request("status"), timeout_s, ClusterReport)


def run_operation(
    path: Path, operation: str, timeout_s: float, options: Mapping[str, str | int | float | bool] | None = None
) -> str:
    """Have a driver run an operation of its cluster, such as ``dashboard``, and return the text that it gives.

    Raises:
        NoReport: It did not respond in time, has just exited, or could not do it; the message says why.
    """
    return _ask(path, Request(operation, dict(options or {})), timeout_s, Answer).text


def _ask(path: Path, request: Request, timeout_s: float, kind: type[_Kind]) -> _Kind:
    deadline = time.monotonic() + timeout_s
    text = bytearray()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            with contextlib.suppress(BrokenPipeError):  # a driver that closes without reading may have answered
                connection.sendall(msgspec.json.encode(request) + b"\n")
            while len(text) < _MAX_REPORT_BYTES:
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                data = connection.recv(_READ_BYTES)
                if not data:
                    break
                text += data
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
        raise ClusterGone("the driver was killed") from None
    except FileNotFoundError:
        raise ClusterGone("the cluster was closed") from None
    except (TimeoutError, BlockingIOError):  # the latter: its queue of connections is full
        raise NoReport(f"no response within {timeout_s:g} s: the driver is stopped, or busy in native code") from None
    except ConnectionResetError:
        pass  # what it had sent before is here
    except OSError as error:
        raise NoReport(f"the driver has just exited ({error.strerror})") from None
    if not text:
        raise NoReport("the cluster is being closed")
    try:
        if problem := msgspec.json.decode(text, type=Answer).error:
            raise NoReport(problem)
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise NoReport(f"the driver runs another version of gradwire ({error})") from None


def read_reports(paths: Sequence[Path], timeout_s: float) -> list[ClusterReport | NoReport]:
    """Query several drivers in parallel."""

    def read(path: Path) -> ClusterReport | NoReport:
        try:
            return read_report(path, timeout_s)
        except NoReport as problem:
            return problem

    if not paths:
        return []
    with ThreadPoolExecutor(max_workers=16, thread_name_prefix="gradwire-status") as pool:
        return list(pool.map(read, paths))
