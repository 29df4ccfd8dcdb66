"""Who is in the cluster and where.

A name belongs to one rank, and a rank to one name, for the life of a cluster: a worker that is started again has both. Which
belong together is what the directory was made with, what rank 0 said when all met, or else what the first worker said that
came with the name or the rank. Whoever says otherwise is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

from gradwire.errors import AuthenticationFailed, IdentityTaken, UnknownWorker
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
        """Note a worker that has shown who it is; from now on its name and its rank belong together.

        Raises:
            IdentityTaken: The name belongs to another rank, or the rank to another name.
            AuthenticationFailed: All workers are known, and it is none of them.
        """

    def infos(self) -> list[WorkerInfo]:
        """All known workers, by rank."""


class StaticDirectory:
    """Addresses that were known when the cluster was made, or of workers that have shown who they are."""

    is_fixed = True

    def __init__(self, addresses: Iterable[WorkerAddress] = ()) -> None:
        self._is_complete = False
        self._binding = threading.Lock()  # guards changes of the two tables below
        self._by_name: dict[str, WorkerAddress] = {}
        self._names: dict[int, str] = {}  # by rank
        for address in addresses:
            self.update(address)

    def complete(self) -> None:
        """All workers are known: no other is let in from now on."""
        self._is_complete = True

    def find(self, worker: str | int) -> WorkerAddress:
        """The worker of that name or rank.

        Raises:
            UnknownWorker: There is none.
        """
        name = worker if isinstance(worker, str) else self._names.get(worker)
        found = self._by_name.get(name) if name is not None else None
        if found is None:
            known = ", ".join(info.name for info in self.infos())
            raise UnknownWorker(f"could not find destination: no worker {worker!r} in this cluster; it has: {known}")
        return found

    def refresh(self, name: str) -> WorkerAddress | None:
        """Nothing new can be known here."""
        return None

    def update(self, address: WorkerAddress) -> None:
        """Binds name and rank, and remembers the address unless a newer incarnation is known.

        Raises:
            IdentityTaken: Name or rank is bound otherwise.
            AuthenticationFailed: All workers are known, and it is none of them.
        """
        name, rank = address.info.name, address.info.id
        with self._binding:
            self.check(address.info)
            known = self._by_name.get(name)
            if known is None and self._is_complete:
                raise AuthenticationFailed(
                    f"{name} of rank {rank} does not belong to this cluster of {len(self._by_name)}"
                )
            if known is None or known.incarnation <= address.incarnation:
                self._by_name[name] = address
            self._names[rank] = name

    def check(self, info: WorkerInfo) -> None:
        """Compare a name and a rank with those that are bound.

        Raises:
            IdentityTaken: They do not belong together.
        """
        known, holder = self._by_name.get(info.name), self._names.get(info.id, info.name)
        if holder != info.name or (known is not None and known.info.id != info.id):
            other = self._by_name[holder].info if holder != info.name else known.info if known is not None else info
            raise IdentityTaken(
                f"worker name or rank is not unique: {other.name} of rank {other.id} and {info.name} of rank {info.id}; "
                f"every rank needs a name of its own and every name a rank of its own"
            )

    def infos(self) -> list[WorkerInfo]:
        """All workers, by rank."""
        return sorted((address.info for address in list(self._by_name.values())), key=lambda info: info.id)
