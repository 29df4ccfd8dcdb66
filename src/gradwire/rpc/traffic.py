"""Bytes that a worker has exchanged with each of the others, over all of its connections so far."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwire.rpc.connection import Connection


class Traffic:
    """Counts the bytes of connections, and keeps the counts of those that have ended.

    Nothing is counted here while messages travel: the streams do that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards everything below
        self._open: set[Connection] = set()
        self._ended: dict[str, tuple[int, int]] = {}

    def on_opened(self, connection: Connection) -> None:
        with self._lock:
            self._open.add(connection)

    def on_ended(self, connection: Connection) -> None:
        """Keep the counts of a connection that has ended; one that was never opened is ignored."""
        with self._lock:
            if connection in self._open:
                self._open.remove(connection)
                self._ended[connection.info.name] = _add(self._ended.get(connection.info.name), connection)

    def by_worker(self) -> dict[str, tuple[int, int]]:
        """Return the bytes sent and received, by the name of the worker at the other end. They never decrease."""
        with self._lock:
            found = dict(self._ended)
            for connection in self._open:
                found[connection.info.name] = _add(found.get(connection.info.name), connection)
            return found


def _add(before: tuple[int, int] | None, connection: Connection) -> tuple[int, int]:
    sent, received = before or (0, 0)
    more_sent, more_received = connection.stream.traffic()
    return sent + more_sent, received + more_received
