"""Workers as published in a store: addresses by name and by rank, and why a world cannot become complete."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from typing import Any, Literal

from gradwire.config import Limits
from gradwire.errors import (
    AuthenticationFailed,
    ConfigurationError,
    DecodeError,
    DuplicateWorker,
    IdentityTaken,
    RendezvousFailed,
    TransportError,
    UnknownWorker,
)
from gradwire.rpc.agent import Agent
from gradwire.rpc.directory import StaticDirectory
from gradwire.rpc.meeting_point import MeetingPoint, MeetingPointLost
from gradwire.transports import registry
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.wire.addresses import decode_address, encode_address

_log = logging.getLogger("gradwire")
_ANSWER_S = 2.0  # for a store that is asked while a call waits
_LIMITS = Limits(name_bytes=1024)  # of what a store may hold
_OBSTACLE_NS = 2 * 10**9  # workers of one world start within such a time; a note that is older is an earlier run's
_LINGER_S = 0.6  # others look for an obstacle three times meanwhile
_read_notes: set[str] = set()  # notes about obstacles that this process knows: it may try again with another name

Obstacle = Literal["duplicate", "refused"]
"""Why a world cannot become complete: two workers have one name or rank, or one is not let in."""

_ERRORS: dict[str, type[DuplicateWorker | RendezvousFailed]] = {
    "duplicate": DuplicateWorker,
    "refused": RendezvousFailed,
}


class StoreDirectory(StaticDirectory):
    """Workers as published in a store.

    What the store says of a worker tells where to look for it. Its name and rank are bound when it has shown who it is, or
    when rank 0 says who has come: a file may hold what an earlier run has left there.

    Args:
        point: Where.
        prefix: Of all keys.
    """

    def __init__(self, point: MeetingPoint, prefix: str) -> None:
        super().__init__()
        self.is_fixed = point.world_size is not None
        self._point = point
        self._prefix = prefix
        self._looking = threading.Lock()  # held while a thread asks the store
        self._hints: dict[str, WorkerAddress] = {}  # of workers that have not shown who they are, by name

    # -- before all have met -----------------------------------------------------------------------------------------

    def publish(self, agent: Agent) -> None:
        """Makes this worker known.

        Raises:
            DuplicateWorker: Another worker that answers has the same name or rank.
        """
        store, info = self._point.store, agent.info
        known = self._read(f"name/{info.name}")
        for other in (known, self._read(f"rank/{info.id}")):
            if other is not None and other.info != info and _is_there(agent, other):
                text = (
                    f"worker name or rank is not unique: {other.info.name} of rank {other.info.id} and {info.name} of rank "
                    f"{info.id}; every rank needs a name of its own and every name a rank of its own"
                )
                _read_notes.add(self.announce("duplicate", text))
                raise DuplicateWorker(text)
        try:
            store.set(f"{self._prefix}/name/{info.name}", encode_address(agent.address))
            store.set(f"{self._prefix}/rank/{info.id}", encode_address(agent.address))
            if known is None:
                index = store.add(f"{self._prefix}/members", 1)
                store.set(f"{self._prefix}/member/{index}", info.name)
        except RuntimeError as error:
            raise MeetingPointLost(f"the meeting point {self._point.where} went away: {error}") from error
        if not self.is_fixed:
            self.settle()

    def announce(self, kind: Obstacle, text: str) -> str:
        """Leaves a note for all who wait for this world: it cannot become complete. Returns the note."""
        note = f"{time.time_ns()}:{kind}:{text}"
        with contextlib.suppress(RuntimeError, AttributeError):  # the store is gone
            self._point.store.set(f"{self._prefix}/obstacle", note)
        return note

    def check_obstacle(self, since_ns: int) -> None:
        """Looks for such a note. One that is older than this worker, or that this process has read before, does not count.

        Raises:
            DuplicateWorker, RendezvousFailed: There is one.
        """
        store, key = self._point.store, f"{self._prefix}/obstacle"
        try:
            note = store.get(key).decode() if store.check([key]) else ""
            stamp, _, rest = note.partition(":")
            kind, _, text = rest.partition(":")
            is_new = bool(note) and note not in _read_notes and int(stamp) > since_ns - _OBSTACLE_NS
        except (RuntimeError, AttributeError, ValueError):  # the store is gone, or holds something else
            return
        if is_new and kind in _ERRORS:
            _read_notes.add(note)
            self._linger()
            raise _ERRORS[kind](text)

    def give_up(self, text: str) -> None:
        """Tell all who wait for this world that this worker will not come, and give them time to read it."""
        if self.is_fixed:
            self.announce("refused", text)
            self._linger()

    def _linger(self) -> None:
        """Where the store ends with this process: lets the others read what it holds."""
        if self._point.is_served_here:
            threading.Event().wait(_LINGER_S)

    def check_store(self) -> None:
        """Asks the store for anything.

        Raises:
            MeetingPointLost: It does not answer.
        """
        try:
            self._point.store.check([f"{self._prefix}/token"])
        except RuntimeError as error:
            raise MeetingPointLost(f"the meeting point {self._point.where} went away: {error}") from error

    def last_incarnation(self, name: str) -> int:
        """What the store knows of an earlier life of that worker; 0 for nothing."""
        known = self._read(f"name/{name}")
        return known.incarnation if known is not None else 0

    def at_rank(self, rank: int) -> WorkerAddress | None:
        """What the store says about a rank."""
        return self._read(f"rank/{rank}")

    def hint(self, address: WorkerAddress) -> None:
        """Remember where a worker may be that has not shown who it is."""
        self._hints[address.info.name] = address

    # -- afterwards --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """This worker is in: with a world size all are known now, and the store is only asked for who restarts."""
        self._point = self._point.without_client()
        self._hints = {}
        if self.is_fixed:
            self.complete()

    def withdraw(self, info: WorkerInfo) -> None:
        """Lets go of the store and its port, and forgets this worker in a file.

        A store that is served is not told: it may end at the same moment, of which torch would print C++ stack traces. Who
        looks for this worker finds that nothing listens at its address.
        """
        point, self._point = self._point, dataclasses.replace(self._point, store=None)
        if point.port is None:
            with contextlib.suppress(RuntimeError, AttributeError):
                for key in (f"name/{info.name}", f"rank/{info.id}"):
                    point.store.set(f"{self._prefix}/{key}", b"")

    def find(self, worker: str | int) -> WorkerAddress:
        """The worker of that name or rank, from memory or from the store.

        Raises:
            UnknownWorker: There is none.
        """
        try:
            return super().find(worker)
        except UnknownWorker:
            if self._is_complete:
                raise
            found = self._hints.get(worker) if isinstance(worker, str) else None
            found = found or self._look_up(f"name/{worker}" if isinstance(worker, str) else f"rank/{worker}")
            if found is None or not self._take_hint(found):
                raise
            return found

    def refresh(self, name: str) -> WorkerAddress | None:
        """Reads the store again."""
        found = self._look_up(f"name/{name}")
        return found if found is not None and self._take_hint(found) else None

    def update(self, address: WorkerAddress) -> None:
        """As `StaticDirectory.update`; where workers come and go, the store has the first word about one that is new.

        Raises:
            IdentityTaken: Name or rank is bound otherwise.
            AuthenticationFailed: It does not belong to this world.
        """
        world_size = self._point.world_size
        if world_size is not None and address.info.id >= world_size:
            raise AuthenticationFailed(
                f"{address.info.name} of rank {address.info.id} does not fit a world of {world_size}"
            )
        is_new_elsewhere = (
            self._by_name and address.info.name not in self._by_name
        )  # the first one is this worker itself
        if not self.is_fixed and is_new_elsewhere:
            published = self._look_up(f"rank/{address.info.id}", _ANSWER_S)
            if published is not None and published.info != address.info:
                raise IdentityTaken(f"rank {address.info.id} belongs to worker {published.info.name}")
        super().update(address)
        self._hints.pop(address.info.name, None)

    def infos(self) -> list[WorkerInfo]:
        """All workers, by rank; without a world size, those that have published themselves."""
        if self.is_fixed:
            return super().infos()
        found = {info.name: info for info in super().infos()}
        store = self._point.reopen()
        with contextlib.suppress(RuntimeError, AttributeError):  # the store is gone
            for index in range(1, store.add(f"{self._prefix}/members", 0) + 1):
                address = self._read(f"name/{store.get(f'{self._prefix}/member/{index}').decode()}", store)
                if address is not None and self._take_hint(address):
                    found[address.info.name] = address.info
        return sorted(found.values(), key=lambda info: info.id)

    def _take_hint(self, address: WorkerAddress) -> bool:
        """Note where a worker is; False if the store contradicts what is known of names and ranks."""
        try:
            self.check(address.info)
        except IdentityTaken as error:
            _log.info("the store at %s contradicts what is known: %s", self._point.where, error)
            return False
        if address.info.name in self._by_name:
            super().update(address)
        else:
            self.hint(address)
        return True

    def _look_up(self, key: str, patience_s: float = 0.0) -> WorkerAddress | None:
        """As `_read`, for calls under way: a store that does not answer must not hold them up, nor keep Ctrl-C out."""
        found: list[WorkerAddress | None] = []

        def read() -> None:
            try:
                found.append(self._read(key))
            except ConfigurationError as error:
                _log.warning("%s", error)
            finally:
                self._looking.release()

        if not self._looking.acquire(timeout=patience_s):
            return None  # another thread has been waiting for an answer
        thread = threading.Thread(target=read, name="gradwire-store-lookup", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # a limit of the system
            self._looking.release()
            _log.warning("the store is not asked: %s", error)
            return None
        thread.join(_ANSWER_S)
        return found[0] if found else None

    def _read(self, key: str, store: Any = None) -> WorkerAddress | None:
        store, full = store or self._point.reopen(), f"{self._prefix}/{key}"
        try:
            raw = store.get(full) if store.check([full]) else b""
        except (RuntimeError, AttributeError):  # the store went away with its host, or is closed
            return None
        try:
            return decode_address(raw, _LIMITS) if raw else None
        except DecodeError as error:
            raise ConfigurationError(
                f"the store at {self._point.where} holds no address under {full}: {error}"
            ) from error


def _is_there(agent: Agent, address: WorkerAddress) -> bool:
    """Whether anything listens at an address; a run that was killed leaves its addresses behind."""
    try:
        uri = registry.choose_uri(address, agent.address.host, agent.transports)
        agent.transports[uri.partition(":")[0]].connect(uri, time.monotonic() + 1.0).close()
    except TransportError:
        return False
    return True
