"""Who is in the cluster and where."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from gradwire.errors import UnknownWorker
from gradwire.types import WorkerAddress, WorkerInfo


class Directory(Protocol):
    """Finds workers by name or rank.

    Attributes:
        is_fixed: Whether the workers are all known; otherwise they come and go.
    """

    @property
    def is_fixed(self) -> bool: ...

    def find(self, worker: str | int) -> WorkerAddress:
        """The worker's address as known now.

        Raises:
            UnknownWorker: No such worker.
        """

    def refresh(self, name: str) -> WorkerAddress | None:
        """Looks again, because the worker did not answer; None if nothing new is known."""

    def update(self, address: WorkerAddress) -> None:
        """A worker introduced itself."""

    def infos(self) -> list[WorkerInfo]:
        """All known workers, by rank."""


class StaticDirectory:
    """Addresses that were known when the cluster was made."""

    is_fixed = True

    def __init__(self, addresses: Iterable[WorkerAddress] = ()) -> None:
        self._by_name: dict[str, WorkerAddress] = {}
        self._by_rank: dict[int, WorkerAddress] = {}
        for address in addresses:
            self.update(address)

    def find(self, worker: str | int) -> WorkerAddress:
        """The worker of that name or rank.

        Raises:
            UnknownWorker: There is none.
        """
        found = self._by_name.get(worker) if isinstance(worker, str) else self._by_rank.get(worker)
        if found is None:
            known = ", ".join(info.name for info in self.infos())
            raise UnknownWorker(f"could not find destination: no worker {worker!r} in this cluster; it has: {known}")
        return found

    def refresh(self, name: str) -> WorkerAddress | None:
        """Nothing new can be known here."""
        return None

    def update(self, address: WorkerAddress) -> None:
        """Remembers an address, unless a newer incarnation is known."""
        known = self._by_name.get(address.info.name)
        if known is None or known.incarnation <= address.incarnation:
            self._by_name[address.info.name] = address
            self._by_rank[address.info.id] = address

    def infos(self) -> list[WorkerInfo]:
        """All workers, by rank."""
        return sorted((address.info for address in self._by_name.values()), key=lambda info: info.id)
