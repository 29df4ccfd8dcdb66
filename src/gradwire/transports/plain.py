"""A channel over an ordinary stream socket."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Sequence

from gradwire.errors import ConnectionLost, ResourceExhausted
from gradwire.transports.base import Buffer

_MAX_BUFFERS = 512  # the kernel takes 1,024 pieces in one call


class PlainChannel:
    """Bytes over a connected socket; serves `inproc` and unencrypted loopback `tcp`."""

    can_vanish = False  # on one machine the kernel reports the end of a process at once

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock

    def fileno(self) -> int:
        return self._socket.fileno()

    def read_into(self, buffer: Buffer) -> int | None:
        try:
            return self._socket.recv_into(buffer)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionLost(f"the connection broke while reading: {error}") from error

    def write(self, buffers: Sequence[Buffer], descriptors: Sequence[int]) -> int | None:
        try:
            if len(buffers) == 1:
                return self._socket.send(buffers[0])
            return self._socket.sendmsg(buffers[:_MAX_BUFFERS])
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionLost(f"the connection broke while writing: {error}") from error

    def write_waits_for_reading(self) -> bool:
        return False

    def holds_unsent(self) -> bool:
        return False

    def has_hidden_bytes(self) -> bool:
        return False

    def certified_names(self) -> frozenset[str] | None:
        return None

    def is_vanished(self) -> bool:
        return False

    def close(self) -> None:
        end(self._socket)


def check_exhausted(error: OSError) -> None:
    """Tells a process that is out of descriptors from another side that is not there.

    Raises:
        ResourceExhausted: The process is out of descriptors or memory; try again later.
    """
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
        raise ResourceExhausted(f"no connection can be opened: {error}; raise the limit (ulimit -n)") from error


def end(sock: socket.socket) -> None:
    """Ends a connection so that a thread waiting for it wakes up, then closes its descriptor."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        sock.close()
