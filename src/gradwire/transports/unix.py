"""Workers on one machine: ``unix:///folder/name.sock``, with shared memory for large tensors.

Nobody else gets in: the folder is 0700, and both sides ask the kernel for the other's user id. Large tensors travel in
`arena` slots whose descriptors are passed with the frame that first uses them.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from gradwire.errors import AuthenticationFailed, ConfigurationError, ConnectFailed, ConnectionLost
from gradwire.transports import shared_memory as arena
from gradwire.transports.base import Buffer
from gradwire.transports.stream import PlainChannel, StreamConnection, StreamOptions, check_exhausted, end

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_ANCILLARY_BYTES = socket.CMSG_SPACE(64 * struct.calcsize("i"))
_MAX_BUFFERS = 512
_CANNOT_PASS = (errno.ETOOMANYREFS, errno.ENOMEM, errno.ENOBUFS, errno.EMFILE)  # descriptors; bytes may still go
_PATH_BYTES = 107  # what the kernel takes
_BUFFER_BYTES = 1 << 20  # a whole tensor below the shared-memory threshold fits, so that a send rarely waits


class UnixChannel(PlainChannel):
    """Bytes and descriptors over a connected Unix socket."""

    def __init__(self, sock: socket.socket, slots: arena.BorrowedSlots) -> None:
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

    def write(self, buffers: Sequence[Buffer], descriptors: Sequence[int]) -> int | None:
        try:
            if descriptors:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
                try:
                    return self._socket.sendmsg(buffers[:_MAX_BUFFERS], [rights])
                except OSError as error:
                    if error.errno not in _CANNOT_PASS:
                        raise
            if len(buffers) == 1:
                return self._socket.send(buffers[0])
            return self._socket.sendmsg(buffers[:_MAX_BUFFERS])
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionLost(f"the connection broke while writing: {error}") from error


class UnixListener:
    """Listens at a socket file in a private folder and lets only its own user in."""

    def __init__(self, path: Path, options: StreamOptions) -> None:
        check_private(path.parent)
        if len(os.fsencode(path)) > _PATH_BYTES:
            raise ConfigurationError(
                f"{path} is longer than the {_PATH_BYTES} bytes of a Unix socket; use a shorter folder"
            )
        self.uri = f"unix://{path}"
        self._path = path
        self._options = options
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        try:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()  # left by an earlier incarnation that was killed
            self._socket.bind(str(path))
            self._socket.listen(1024)
            self._inode = path.stat().st_ino
        except OSError as error:
            self._socket.close()
            raise ConfigurationError(f"cannot listen at {path}: {error}") from error

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept_nowait(self) -> StreamConnection | None:
        try:
            sock, _address = self._socket.accept()
        except OSError as error:
            check_exhausted(error)
            return None
        if peer_uid(sock) != os.geteuid():
            sock.close()
            return None
        return _make_connection(sock, self._options, self.uri)

    def close(self) -> None:
        end(self._socket)
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:  # a later incarnation may listen there by now
                self._path.unlink()


class UnixTransport:
    """Reaches workers on this machine.

    Args:
        folder: Private folder for this worker's own socket.
        options: Settings for its connections.
    """

    scheme = "unix"

    def __init__(self, folder: Path, options: StreamOptions) -> None:
        self._folder = folder
        self._options = options

    def listen(self, worker: str) -> UnixListener:
        """Starts to listen at ``<folder>/<worker>.sock``.

        Raises:
            ConfigurationError: The folder is open to others, or the path is too long.
        """
        # A name may hold any character; a file may not.
        safe = "".join(char if char.isalnum() or char in "-_." else f"%{ord(char):x}" for char in worker)
        return UnixListener(self._folder / f"{safe}.sock", self._options)

    def connect(self, uri: str, deadline: float) -> StreamConnection:
        """Opens a connection to a worker of the same user.

        Raises:
            ConnectFailed: Nobody listens there.
            AuthenticationFailed: Another user does.
        """
        path = uri.removeprefix("unix://")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(path)
            if peer_uid(sock) != os.geteuid():
                raise AuthenticationFailed(f"{uri} belongs to user {peer_uid(sock)}, not to user {os.geteuid()}")
            return _make_connection(sock, self._options, uri)
        except OSError as error:
            sock.close()
            raise ConnectFailed(f"nobody answers at {uri}: {error}") from error
        except BaseException:
            sock.close()
            raise


def _make_connection(sock: socket.socket, options: StreamOptions, label: str) -> StreamConnection:
    slots = arena.BorrowedSlots(options.limits.arena_bytes)
    return StreamConnection(
        UnixChannel(sock, slots), options, slots=slots if arena.is_available() else None, label=label
    )


def peer_uid(sock: socket.socket) -> int:
    """The user id of the process at the other end, as the kernel knows it."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])


def check_private(folder: Path) -> None:
    """Refuses a folder that others could enter.

    Raises:
        ConfigurationError: It is missing, not ours, or open to others.
    """
    try:
        status = folder.stat()
    except OSError as error:
        raise ConfigurationError(f"the socket folder {folder} cannot be used: {error}") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077 or not stat.S_ISDIR(status.st_mode):
        raise ConfigurationError(f"the socket folder {folder} must belong to this user with mode 0700")


_PREFIX = "gradwire-"
_LOCK = "lock"


class SocketFolder:
    """Made with mode 0700 in the system's temporary folder.

    Attributes:
        path: Where it is.
    """

    def __init__(self) -> None:
        _remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Locked before it has its name, so that nobody finds it unlocked.
        unnamed = self.path / f"{_LOCK}.new"
        self._descriptor = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(self.path / _LOCK)

    def close(self) -> None:
        """Removes the folder. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.geteuid() and folder.is_dir() and not folder.is_symlink():
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    # No O_CREAT: a folder without the file is just being made, or is somebody else's.
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
