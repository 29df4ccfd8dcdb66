"""A channel over an ordinary stream socket."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence

from gradwire.errors import ConnectionLost
from gradwire.transports.base import Buffer

_MAX_BUFFERS = 512  # the kernel takes 1,024 pieces in one call
_NOWAIT = socket.MSG_DONTWAIT
WAIT_S = 0.2  # how long `wait_and_read_into` waits at the most
_WAIT = struct.pack("ll", 0, int(WAIT_S * 1e6))


class PlainChannel:
    """Bytes over a connected socket; serves `inproc` and unencrypted loopback `tcp`.

    The socket itself blocks, with a time limit, so that a caller that waits for its answer needs one system call to wait
    and read. Everything else says that it does not want to wait.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _WAIT)
        self._socket = sock

    def fileno(self) -> int:
        return self._socket.fileno()

    def read_into(self, buffer: Buffer) -> int | None:
        return self._receive(buffer, _NOWAIT)

    def wait_and_read_into(self, buffer: Buffer) -> int | None:
        return self._receive(buffer, 0)

    def _receive(self, buffer: Buffer, flags: int) -> int | None:
        try:
            return self._socket.recv_into(buffer, 0, flags)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionLost(f"the connection broke while reading: {error}") from error

    def write(self, buffers: Sequence[Buffer], descriptors: Sequence[int]) -> int | None:
        try:
            if len(buffers) == 1:
                return self._socket.send(buffers[0], _NOWAIT)
            return self._socket.sendmsg(buffers[:_MAX_BUFFERS], (), _NOWAIT)
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
        return False  # on one machine the kernel reports the end of a process at once

    def close(self) -> None:
        end(self._socket)


def end(sock: socket.socket) -> None:
    """Ends a connection so that a thread waiting for it wakes up, then closes its descriptor."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        sock.close()
