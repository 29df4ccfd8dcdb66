"""Workers inside one process: ``inproc://name``. For tests, and for programs that want one worker and no more.

Each connection is a socket pair, so everything above behaves as between processes. Names are known to this process only.
"""

from __future__ import annotations

import collections
import os
import socket
import threading

from gradwire.errors import ConfigurationError, ConnectFailed
from gradwire.transports.stream import Channel, StreamConnection, StreamOptions

_listeners: dict[str, InprocListener] = {}
_lock = threading.Lock()  # guards _listeners


class InprocListener:
    """Accepts the other ends of socket pairs from a queue; an eventfd is readable while there are any."""

    def __init__(self, worker: str, options: StreamOptions) -> None:
        self.uri = f"inproc://{worker}"
        self._options = options
        self._waiting: collections.deque[socket.socket] = collections.deque()
        self._closed = False
        with _lock:
            if self.uri in _listeners:
                raise ConfigurationError(f"{self.uri} is already in use in this process; choose another worker name")
            self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            _listeners[self.uri] = self

    def fileno(self) -> int:
        return self._event

    def offer(self, sock: socket.socket) -> None:
        """Queue a connection; called by the side that connects, under the registry's lock."""
        self._waiting.append(sock)
        os.eventfd_write(self._event, 1)

    def accept_nowait(self) -> StreamConnection | None:
        if not self._waiting:
            try:
                os.eventfd_read(self._event)
            except BlockingIOError:
                return None
        try:
            sock = self._waiting.popleft()
        except IndexError:
            return None
        return StreamConnection(Channel(sock), self._options, slots=None, label=self.uri)

    def close(self) -> None:
        with _lock:
            if self._closed:
                return
            self._closed = True
            _listeners.pop(self.uri, None)
            for sock in self._waiting:
                sock.close()
            os.close(self._event)


class InprocTransport:
    """Reaches workers of this process by name."""

    scheme = "inproc"

    def __init__(self, options: StreamOptions) -> None:
        self._options = options

    def listen(self, worker: str) -> InprocListener:
        return InprocListener(worker, self._options)

    def connect(self, uri: str, deadline: float) -> StreamConnection:
        near, far = socket.socketpair()
        with _lock:
            listener = _listeners.get(uri)
            if listener is not None:
                listener.offer(far)
        if listener is None:
            near.close()
            far.close()
            raise ConnectFailed(f"no worker is listening at {uri} in this process")
        return StreamConnection(Channel(near), self._options, slots=None, label=uri)
