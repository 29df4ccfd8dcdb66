"""Transport on one machine: ``unix:///folder/name.sock``, with shared memory for large tensors.

Other users cannot connect: the folder has mode 0700, and both sides get the other's user id from the kernel. Large tensors
are sent in slots (`gradwire.transports.shared_memory`) whose descriptors are passed with a frame.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import shutil
import socket
import stat
import struct
import tempfile
import time
from pathlib import Path

from gradwire import _interrupts
from gradwire.errors import AuthenticationFailed, ConfigurationError, ConnectFailed, ConnectionLost
from gradwire.transports.shared_memory import BorrowedSlots, is_available
from gradwire.transports.stream import Buffer, Channel, SocketListener, StreamConnection, StreamOptions, check_exhausted

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_ANCILLARY_BYTES = socket.CMSG_SPACE(64 * struct.calcsize("i"))
_PATH_BYTES = 107  # what the kernel takes
_BUFFER_BYTES = 1 << 20  # a whole tensor below the shared-memory threshold fits, so that a send rarely waits


class UnixChannel(Channel):
    """Bytes and descriptors over a connected Unix socket."""

    def __init__(self, sock: socket.socket, slots: BorrowedSlots) -> None:
        super().__init__(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._slots = slots

    def read_into(self, buffer: Buffer) -> int | None:
        try:
            num_bytes, ancillary, _flags, _address = self._socket.recvmsg_into(
                (buffer,), _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionLost(f"the connection broke while reading: {error}") from error
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                self._slots.add_fds(descriptors)
        return num_bytes


class UnixListener(SocketListener):
    """Listens at a socket file in a private folder, and accepts connections of the same user only."""

    def __init__(self, path: Path, options: StreamOptions) -> None:
        check_private(path.parent)
        if len(os.fsencode(path)) > _PATH_BYTES:
            raise ConfigurationError(
                f"{path} is longer than the {_PATH_BYTES} bytes allowed for a Unix socket; use a shorter folder"
            )
        self._path = path
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()  # left by an earlier incarnation that was killed
            sock.bind(str(path))
            sock.listen(1024)
            self._inode = path.stat().st_ino
        except OSError as error:
            sock.close()
            raise ConfigurationError(f"cannot listen at {path}: {error}") from error
        super().__init__(sock, f"unix://{path}", options)

    def accept_nowait(self) -> StreamConnection | None:
        sock = self.accept_socket()
        if sock is not None and peer_uid(sock) != os.geteuid():
            sock.close()
            return None
        return None if sock is None else _make_connection(sock, self._options, self.uri)

    def close(self) -> None:
        super().close()
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:  # a later incarnation may listen there by now
                self._path.unlink()


class UnixTransport:
    """Reaches workers on this machine; this one's own socket lies in a private folder."""

    scheme = "unix"

    def __init__(self, folder: Path, options: StreamOptions) -> None:
        self._folder = folder
        self._options = options

    def listen(self, worker: str) -> UnixListener:
        # A name may hold any character; a file may not.
        safe = "".join(char if char.isalnum() or char in "-_." else f"%{ord(char):x}" for char in worker)
        return UnixListener(self._folder / f"{safe}.sock", self._options)

    def connect(self, uri: str, deadline: float) -> StreamConnection:
        with contextlib.ExitStack() as undo:
            try:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                undo.callback(sock.close)
                _connect(sock, uri.removeprefix("unix://"), deadline)
                uid = peer_uid(sock)
            except OSError as error:
                check_exhausted(error)
                raise ConnectFailed(f"no answer at {uri}: {error}") from error
            if uid != os.geteuid():
                raise AuthenticationFailed(f"{uri} belongs to user {uid}, not user {os.geteuid()}")
            undo.pop_all()
        return _make_connection(sock, self._options, uri)


@_interrupts.interruptible
def _connect(sock: socket.socket, path: str, deadline: float) -> None:
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    sock.connect(path)


def _make_connection(sock: socket.socket, options: StreamOptions, label: str) -> StreamConnection:
    slots = BorrowedSlots(options.limits.arena_bytes)
    return StreamConnection(UnixChannel(sock, slots), options, slots=slots if is_available() else None, label=label)


def peer_uid(sock: socket.socket) -> int:
    """Return the user id of the peer process, from the kernel."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])


def check_private(folder: Path) -> None:
    """Refuse a folder that other users could enter."""
    try:
        status = folder.stat()
    except OSError as error:
        raise ConfigurationError(f"the socket folder {folder} cannot be used: {error}") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077 or not stat.S_ISDIR(status.st_mode):
        raise ConfigurationError(f"the socket folder {folder} must belong to this user with mode 0700")


_PREFIX = "gradwire-"
_LOCK = "lock"


class SocketFolder:
    """A folder of mode 0700 in the system's temporary folder; stale ones of killed processes are removed first.

    Attributes:
        path: Its path.
    """

    def __init__(self) -> None:
        _remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Locked before it has its name, so that another process never finds it unlocked.
        unnamed = self.path / f"{_LOCK}.new"
        self._descriptor = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(self.path / _LOCK)

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            if folder.lstat().st_uid != os.geteuid() or not folder.is_dir() or folder.is_symlink():
                continue
            # No O_CREAT: a folder without the file is just being made, or belongs to another program.
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
            shutil.rmtree(folder, ignore_errors=True)
