"""Bytes that a worker has exchanged with each of the others, over all of its connections so far."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gradwire.rpc.connection import Connection

OTHER: Final = "other"
"""What is counted together once there are too many names to keep apart."""

MOST_PEERS: Final = 1_000


class Traffic:
    """Counts the bytes of connections, and keeps the counts of those that have ended.

    The first names of workers are kept apart; all others are counted together as ``other``. Nothing is counted here while
    messages travel: the streams do that.
    """

    def __init__(self, most_peers: int = MOST_PEERS) -> None:
        self._most_peers = most_peers
        self._lock = threading.Lock()  # guards everything below
        self._open: dict[Connection, str] = {}  # and the name under which each is counted
        self._ended: dict[str, tuple[int, int]] = {}  # by that name; all names that were ever used

    def on_opened(self, connection: Connection) -> None:
        name = connection.info.name
        with self._lock:
            if name not in self._ended:
                name = name if len(self._ended) < self._most_peers else OTHER
                self._ended.setdefault(name, (0, 0))
            self._open[connection] = name
        if connection.stream.is_closed:  # another thread may have ended it before it was counted
            self.on_ended(connection)

    def on_ended(self, connection: Connection) -> None:
        """Keep the counts of a connection that has ended; one that was never opened is ignored."""
        with self._lock:
            name = self._open.pop(connection, None)
            if name is not None:
                self._ended[name] = _add(self._ended[name], connection)

    def by_worker(self) -> dict[str, tuple[int, int]]:
        """Return the bytes sent and received, by the name of the worker at the other end. They never decrease."""
        with self._lock:
            found = dict(self._ended)
            for connection, name in self._open.items():
                found[name] = _add(found[name], connection)
            return found


def _add(before: tuple[int, int], connection: Connection) -> tuple[int, int]:
    sent, received = connection.stream.traffic()
    return before[0] + sent, before[1] + received
