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

    def is_current(self, address: WorkerAddress) -> bool:
        """Whether no newer incarnation of that worker has been seen."""
        return address.incarnation >= self.newest(address.info.name)

    def newest(self, name: str) -> int:
        """The highest incarnation seen; 0 for none."""
        return self._newest.get(name, 0)

    def has_ended(self, name: str) -> bool:
        """Whether the end of a worker's newest incarnation was noticed."""
        return self._ended.get(name, -1) >= self.newest(name)

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

    def on_ended(self, address: WorkerAddress) -> bool:
        """A worker's end was noticed: True the first time."""
        name = address.info.name
        if self._ended.get(name, -1) >= address.incarnation:
            return False
        self._ended[name] = address.incarnation
        return True
