"""Workers as published in a store: addresses by name and by rank, and nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from datetime import timedelta

import msgspec

from gradwire.errors import ConfigurationError, DuplicateWorker, TransportError, UnknownWorker
from gradwire.rpc.agent import Agent
from gradwire.rpc.directory import StaticDirectory
from gradwire.rpc.meeting_point import MeetingPoint, MeetingPointLost
from gradwire.transports import registry
from gradwire.types import WorkerAddress, WorkerInfo

_log = logging.getLogger("gradwire")
_ANSWER_S = 2.0  # for a store that is asked while a call waits
_CLASH_NS = 2 * 10**9  # workers of one world start within such a time; a note that is older is an earlier run's
_read_notes: set[str] = set()  # notes about clashes that this process knows: it may try again with another name

encode_address = msgspec.msgpack.Encoder().encode
decode_address = msgspec.msgpack.Decoder(WorkerAddress).decode


class StoreDirectory(StaticDirectory):
    """Workers as published in a store.

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

    def publish(self, agent: Agent) -> None:
        """Makes this worker known.

        Raises:
            DuplicateWorker: Another rank that answers has the same name.
        """
        store, info = self._point.store, agent.info
        known = self._read(f"name/{info.name}")
        if known is not None and known.info.id != info.id and self.is_fixed and _is_there(agent, known):
            text = f"the name {info.name} is not unique: ranks {known.info.id} and {info.id} are called so"
            _read_notes.add(self.announce_clash(text))
            raise DuplicateWorker(text)
        try:
            store.set(f"{self._prefix}/name/{info.name}", encode_address(agent.address))
            store.set(f"{self._prefix}/rank/{info.id}", encode_address(agent.address))
            if known is None:
                index = store.add(f"{self._prefix}/members", 1)
                store.set(f"{self._prefix}/member/{index}", info.name)
        except RuntimeError as error:
            raise MeetingPointLost(f"the meeting point {self._point.where} went away: {error}") from error

    def announce_clash(self, text: str) -> str:
        """Leaves a note for all who wait for this world: it cannot become complete. Returns the note."""
        note = f"{time.time_ns()}:{text}"
        with contextlib.suppress(RuntimeError, AttributeError):  # the store is gone
            self._point.store.set(f"{self._prefix}/clash", note)
        return note

    def check_clash(self, since_ns: int) -> None:
        """Looks for such a note. One that is older than this worker, or that this process has read before, does not count.

        Raises:
            DuplicateWorker: There is one.
        """
        store, key = self._point.store, f"{self._prefix}/clash"
        try:
            note = store.get(key).decode() if store.check([key]) else ""
            stamp, _, text = note.partition(":")
            is_new = bool(note) and note not in _read_notes and int(stamp) > since_ns - _CLASH_NS
        except (RuntimeError, AttributeError, ValueError):  # the store is gone, or holds something else
            return
        if is_new:
            _read_notes.add(note)
            raise DuplicateWorker(text)

    def withdraw(self, info: WorkerInfo) -> None:
        """Forgets this worker, as far as the store can still be reached, and lets go of the store and its port."""
        store = self._point.store
        with contextlib.suppress(RuntimeError):
            store.set_timeout(timedelta(seconds=1))
            for key in (f"name/{info.name}", f"rank/{info.id}"):
                store.set(f"{self._prefix}/{key}", b"")
        self._point = dataclasses.replace(self._point, store=None)

    def find(self, worker: str | int) -> WorkerAddress:
        """The worker of that name or rank, from memory or from the store.

        Raises:
            UnknownWorker: There is none.
        """
        try:
            return super().find(worker)
        except UnknownWorker:
            found = self._look_up(f"name/{worker}" if isinstance(worker, str) else f"rank/{worker}")
            if found is None:
                raise
            self.update(found)
            return found

    def refresh(self, name: str) -> WorkerAddress | None:
        """Reads the store again."""
        found = self._look_up(f"name/{name}")
        if found is not None:
            self.update(found)
        return found

    def last_incarnation(self, name: str) -> int:
        """What the store knows of an earlier life of that worker; 0 for nothing."""
        known = self._read(f"name/{name}")
        return known.incarnation if known is not None else 0

    def at_rank(self, rank: int) -> WorkerAddress | None:
        """What the store says about a rank."""
        return self._read(f"rank/{rank}")

    def infos(self) -> list[WorkerInfo]:
        """All workers, by rank; without a world size, those that have published themselves."""
        if self._point.world_size is None:
            with contextlib.suppress(RuntimeError, AttributeError):  # the store is gone
                for index in range(1, self._point.store.add(f"{self._prefix}/members", 0) + 1):
                    name = self._point.store.get(f"{self._prefix}/member/{index}").decode()
                    self.refresh(name)
        return super().infos()

    def _look_up(self, key: str) -> WorkerAddress | None:
        """As `_read`, for calls under way: a store that does not answer must not hold them up, nor keep Ctrl-C out."""
        found: list[WorkerAddress | None] = []

        def read() -> None:
            try:
                found.append(self._read(key))
            except ConfigurationError as error:
                _log.warning("%s", error)
            finally:
                self._looking.release()

        if not self._looking.acquire(False):
            return None  # somebody has been waiting for an answer
        thread = threading.Thread(target=read, name="gradwire-store-lookup", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # a limit of the system
            self._looking.release()
            _log.warning("the store is not asked: %s", error)
            return None
        thread.join(_ANSWER_S)
        return found[0] if found else None

    def _read(self, key: str) -> WorkerAddress | None:
        store, full = self._point.store, f"{self._prefix}/{key}"
        try:
            raw = store.get(full) if store.check([full]) else b""
        except (RuntimeError, AttributeError):  # the store went away with its host, or is closed
            return None
        try:
            return decode_address(raw) if raw else None
        except msgspec.DecodeError as error:
            raise ConfigurationError(
                f"the store at {self._point.where} holds no address under {full}: {error}"
            ) from error

    def check_store(self) -> None:
        """Asks the store for anything.

        Raises:
            MeetingPointLost: It does not answer.
        """
        try:
            self._point.store.check([f"{self._prefix}/token"])
        except RuntimeError as error:
            raise MeetingPointLost(f"the meeting point {self._point.where} went away: {error}") from error


def _is_there(agent: Agent, address: WorkerAddress) -> bool:
    """Whether anybody listens at an address; a run that was killed leaves its addresses behind."""
    try:
        uri = registry.choose_uri(address, agent.address.host, agent.transports)
        agent.transports[uri.partition(":")[0]].connect(uri, time.monotonic() + 1.0).close()
    except TransportError:
        return False
    return True
