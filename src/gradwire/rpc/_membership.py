"""Which incarnation of each worker counts, and which have ended. No locks, no connections: facts in, answers out.

A worker that is started again under its name has a higher incarnation. From the moment one is seen, older ones have no
say; and the end of each is told once, however many connections report it.
"""

from __future__ import annotations

import msgspec

from gradwire.types import WorkerAddress


class Membership:
    """What this worker knows about the lives of the others."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._ended: dict[str, int] = {}  # the newest incarnation whose end was told, by name
        self._num_ends: dict[str, int] = {}  # how many ends of each worker were told

    def is_current(self, address: WorkerAddress) -> bool:
        """Whether no newer incarnation of that worker has been seen."""
        return address.incarnation >= self.newest(address.info.name)

    def newest(self, name: str) -> int:
        """The highest incarnation seen; 0 for none."""
        return self._newest.get(name, 0)

    def has_ended(self, name: str) -> bool:
        """Whether the end of a worker's newest incarnation was noticed."""
        return self._ended.get(name, -1) >= self.newest(name)

    def num_ends(self, name: str) -> int:
        """How many ends of a worker were told. A connection that was made before the last of them is part of it."""
        return self._num_ends.get(name, 0)

    def on_seen(self, address: WorkerAddress) -> WorkerAddress | None:
        """A worker is connected: whatever was known of its end no longer counts.

        Returns:
            Its earlier incarnation, if that must have ended meanwhile and this was not told: it is to be told now.
        """
        name, known = address.info.name, self.newest(address.info.name)
        if self._ended.get(name, -1) >= address.incarnation:  # it is back
            self._ended[name] = address.incarnation - 1
        self._newest[name] = max(known, address.incarnation)
        earlier = known and known < address.incarnation
        if earlier and self.on_ended(msgspec.structs.replace(address, incarnation=known)):
            return msgspec.structs.replace(address, incarnation=known)
        return None

    def on_ended(self, address: WorkerAddress, num_ends: int | None = None) -> bool:
        """A worker's end was noticed: True the first time.

        Args:
            address: The worker.
            num_ends: What `num_ends` was when the connection was made whose end tells; None if no connection does. The
                worker may have been taken for dead and be back by the time that the last of its old connections ends.
        """
        name = address.info.name
        if self._ended.get(name, -1) >= address.incarnation or num_ends not in (None, self.num_ends(name)):
            return False
        self._ended[name] = address.incarnation
        self._num_ends[name] = self.num_ends(name) + 1
        return True
