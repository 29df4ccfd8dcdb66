"""Rendezvous: how separately started workers find each other.

    every rank   open the store, agree on a token, listen, publish its address
    every rank   --join--> rank 0, which answers with all addresses once all ranks have joined

The store only carries addresses. Rank 0 is authoritative, so entries that an earlier run left in a file are harmless. A rank
that restarts publishes its new incarnation and joins again; the others find it when the old one stops responding. If rank 0
itself restarts, it asks the ranks that have already met. Once all ranks have agreed to shut down, none of them admits
another worker or reports the others' addresses: a process that meets again at once must find the next rank 0. A rank that
cannot join (another trust level, a name or rank that is taken) leaves a note in the store, if the store admits it, and all
waiting ranks fail at once. Without `world_size` there is no meeting: workers may join and leave, and are looked up by name.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from typing import Any, Literal

import msgspec

from gradwire import _interrupts
from gradwire.errors import (
    AuthenticationFailed,
    ConfigurationError,
    ConnectFailed,
    DecodeError,
    DuplicateWorker,
    GradwireError,
    IdentityTaken,
    RendezvousFailed,
    TransportError,
    UnknownWorker,
)
from gradwire.observe.log import get_logger
from gradwire.rpc.agent import Agent
from gradwire.rpc.device_maps import DeviceReport, check_device_maps, report_devices
from gradwire.rpc.functions import EncodedAddress, WorldSize
from gradwire.rpc.futures import InterruptibleFuture
from gradwire.rpc.meeting_point import MeetingPoint
from gradwire.rpc.meeting_store import MeetingPointLost
from gradwire.rpc.peers import StaticDirectory, not_unique_text
from gradwire.rpc.pending_calls import PendingCall
from gradwire.transports import registry
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.wire.messages import decode_address, encode_address

_log = get_logger(__name__)
_LOOK_S = 0.05
_OBSTACLE_S = 2.0  # workers of one world start within such a time; a note that is older is an earlier run's
_STAY_S = 0.6  # how long rank 0 keeps its store for the others, who look for an obstacle three times in this period
_LONGEST_STAY_S = _OBSTACLE_S + 1.0  # the same while some of them have not withdrawn
_read_notes: set[str] = set()  # notes about obstacles that this process knows: it may try again with another name

Obstacle = Literal["duplicate", "refused"]
"""Why a world cannot become complete: two workers have the same name or rank, or one is not admitted."""

_ERRORS: dict[str, type[DuplicateWorker | RendezvousFailed]] = {
    "duplicate": DuplicateWorker,
    "refused": RendezvousFailed,
}


class StoreDirectory(StaticDirectory):
    """Directory of the workers published in a store.

    A store entry is only a hint where to find a worker. Its name and rank are bound when it has authenticated, or when
    rank 0 announces who has joined: a file may hold entries of an earlier run.
    """

    def __init__(self, point: MeetingPoint) -> None:
        super().__init__()
        self.is_fixed = point.world_size is not None
        self._store = point.store
        self._where = point.where
        self._world_size = point.world_size
        self._rank = point.rank
        self.is_hopeless = False  # whether the others learn that this world cannot become complete, or this worker has
        self._hints: dict[str, WorkerAddress] = {}  # of workers that have not shown who they are, by name

    def publish(self, agent: Agent) -> None:
        info = agent.info
        for other in (self._store.find(info.name), self._store.find(info.id)):
            if other is not None and other.info != info and _is_there(agent, other):
                raise self.duplicate(not_unique_text(other.info, info))
        try:
            self._store.publish(agent.address)
        except IdentityTaken as error:
            raise self.duplicate(str(error)) from error
        except TransportError as error:  # such as a name that the certificate is not valid for
            text = f"rank {info.id} ({info.name}) cannot join at {self._where}: {error}"
            _read_notes.add(self.announce("refused", text))
            raise RendezvousFailed(text) from error
        if not self.is_fixed:
            self.settle()

    def duplicate(self, text: str) -> DuplicateWorker:
        """Tell all waiting ranks that two workers have the same name or rank; return the error."""
        _read_notes.add(self.announce("duplicate", text))
        return DuplicateWorker(text)

    def announce(self, kind: Obstacle, text: str) -> str:
        """Leave a note for all who wait for this world: it cannot become complete. Return the note."""
        note = f"{secrets.token_hex(8)}:{kind}:{text}"
        with contextlib.suppress(MeetingPointLost):
            self._store.announce(note)
            self.is_hopeless = True
        return note

    def check_obstacle(self, since: float) -> None:
        """Look for such a note, ignoring notes that are older than this worker or that this process has already read."""
        try:
            note, age_s = self._store.note()
        except MeetingPointLost:
            return
        kind, _, text = note.partition(":")[2].partition(":")
        is_new = note not in _read_notes and age_s < time.monotonic() - since + _OBSTACLE_S
        if is_new and kind in _ERRORS:
            _read_notes.add(note)
            self.is_hopeless = True
            raise _ERRORS[kind](text)

    def give_up(self, text: str) -> None:
        """Tell all waiting ranks that this worker will not join."""
        if self.is_fixed:
            self.announce("refused", text)

    def withdraw(self) -> None:
        """Say that this worker will not join, if it is because this world cannot become complete.

        If the store ends with this process, give the others time to say the same: a rank that finds no store would wait for
        rank 0 until its own deadline.
        """
        if self._world_size is None or not self.is_hopeless:
            return
        began = time.monotonic()
        with contextlib.suppress(GradwireError):  # the reason for all this must not be replaced by another
            self._store.withdraw(self._rank)
            for rank in range(self._world_size) if self._store.is_served_here else ():
                while not self._store.has_withdrawn(rank) and time.monotonic() < began + _LONGEST_STAY_S:
                    _interrupts.sleep(_LOOK_S)
            if self._store.is_served_here:
                _interrupts.sleep(max(0.0, began + _STAY_S - time.monotonic()))

    def check_store(self) -> None:
        """Raise `MeetingPointLost` if the store does not answer."""
        self._store.note()

    def last_incarnation(self, name: str) -> int:
        """Return the worker's last incarnation according to the store, or 0."""
        known = self._look_up(name)
        return known.incarnation if known is not None else 0

    def at_rank(self, rank: int) -> WorkerAddress | None:
        return self._look_up(rank)

    def hint(self, address: WorkerAddress) -> None:
        """Remember the possible address of a worker that has not authenticated."""
        self._hints[address.info.name] = address

    def settle(self) -> None:
        """Record that this worker has joined: with a world size all are known, and the store is only used for restarts."""
        self._store.rest()
        self._hints = {}
        if self.is_fixed:
            self.complete()

    def refusals(self) -> str:
        """Return the connections that the meeting point has refused, as text."""
        return self._store.refusals()

    def find(self, worker: str | int) -> WorkerAddress:
        try:
            return super().find(worker)
        except UnknownWorker:
            if self.is_complete:
                raise
            found = self._hints.get(worker) if isinstance(worker, str) else None
            found = found or self._look_up(worker)
            if found is None or not self._take_hint(found):
                raise
            return found

    def refresh(self, name: str) -> WorkerAddress | None:
        found = self._look_up(name)
        return found if found is not None and self._take_hint(found) else None

    def update(self, address: WorkerAddress) -> None:
        """Update like `StaticDirectory.update`; if workers may join and leave, look up new ones in the store first."""
        world_size = self._world_size
        if world_size is not None and address.info.id >= world_size:
            raise AuthenticationFailed(
                f"{address.info.name} has rank {address.info.id}, which is out of range for world_size={world_size}"
            )
        is_new_elsewhere = (
            self._by_name and address.info.name not in self._by_name
        )  # the first one is this worker itself
        if not self.is_fixed and is_new_elsewhere:
            published = self._look_up(address.info.id)
            if published is not None and published.info != address.info:
                raise IdentityTaken(f"rank {address.info.id} already belongs to worker {published.info.name}")
        super().update(address)
        self._hints.pop(address.info.name, None)

    def infos(self) -> list[WorkerInfo]:
        """Return all workers, by rank; without a world size, those that have published themselves."""
        if self.is_fixed:
            return super().infos()
        found = {info.name: info for info in super().infos()}
        with contextlib.suppress(MeetingPointLost):
            for name in self._store.names():
                address = self._look_up(name)
                if address is not None and self._take_hint(address):
                    found[address.info.name] = address.info
        return sorted(found.values(), key=lambda info: info.id)

    def _take_hint(self, address: WorkerAddress) -> bool:
        """Record the address of a worker; return False if the store contradicts the known names and ranks."""
        try:
            self.check(address.info)
        except IdentityTaken as error:
            _log.info("the store at %s contradicts this worker's list of workers: %s", self._where, error)
            return False
        if address.info.name in self._by_name:
            super().update(address)
        else:
            self.hint(address)
        return True

    def _look_up(self, worker: str | int) -> WorkerAddress | None:
        """Return the entry in the store; None if there is none or the store does not respond."""
        try:
            return self._store.find(worker)
        except MeetingPointLost:
            return None
        except (ConfigurationError, TransportError) as error:
            _log.warning("%s", error)
            return None


def _is_there(agent: Agent, address: WorkerAddress) -> bool:
    """Return whether anything listens at an address; a run that was killed leaves its addresses behind."""
    try:
        uri = registry.choose_uri(address, agent.address.host, agent.transports)
        agent.transports[uri.partition(":")[0]].connect(uri, time.monotonic() + 1.0).close()
    except TransportError:
        return False
    return True


_ASK_S = 2.0
_OBSTACLE_LOOK_S = 0.2
_REFUSED_S = 1.0  # a refusal that lasts so long is from rank 0 itself, not from an earlier run
_REFUSED_LOOK_S = 0.5  # rank 0 logs each attempt

_Addresses = list[EncodedAddress]


class Host:
    """Rank 0: answers every worker with all addresses once all ranks are there."""

    def __init__(self, agent: Agent, world_size: int, directory: StoreDirectory) -> None:
        self._agent = agent
        self._world_size = world_size
        self._directory = directory
        self._lock = threading.Lock()  # guards the fields below
        self._joined: dict[int, WorkerAddress] = {}
        self._devices: dict[int, DeviceReport] = {}  # not of workers that were adopted
        self._answers: dict[int, InterruptibleFuture[Any]] = {}  # owed, by rank
        agent.server.register_control("join", self._on_join, EncodedAddress, WorldSize, DeviceReport)

    def join(self) -> InterruptibleFuture[Any]:
        devices = report_devices(self._agent.config)
        return self._on_join(self._agent.info, encode_address(self._agent.address), self._world_size, devices)

    def adopt(self, addresses: list[WorkerAddress]) -> None:
        """Recover the list of workers after a restart of rank 0 from one that has already met them.

        One worker may not speak for the others, so its list must match what they have published.
        """
        published = {rank: self._directory.at_rank(rank) for rank in {address.info.id for address in addresses}}
        with self._lock:
            for address in addresses:
                known = published[address.info.id]
                if address.info.id != self._agent.info.id and known is not None and known.info == address.info:
                    self._joined.setdefault(address.info.id, address)
        self._answer_if_complete()

    def _on_join(
        self, source: WorkerInfo, raw: bytes, world_size: int, devices: DeviceReport
    ) -> InterruptibleFuture[Any]:
        if self._agent.is_leaving:  # the worker will find the next rank 0, if there is one
            raise RendezvousFailed(f"rank 0 ({self._agent.info.name}) is shutting down")
        address = decode_address(raw, self._agent.config.limits)
        if address.info != source:
            raise DecodeError(f"{source.name} with rank {source.id} cannot join as {address.info!r}")
        if world_size != self._world_size or source.id >= world_size:
            text = (
                f"{source.name} has world_size={world_size}, but rank 0 has {self._world_size}; pass the same world_size to "
                "every rank"
            )
            self._directory.announce("refused", f"rank {source.id} ({source.name}) cannot join: {text}")
            raise ConfigurationError(text)
        answer: InterruptibleFuture[Any] = InterruptibleFuture()
        with self._lock:
            clash = self._clash_with(address)
            if clash is None:
                self._joined[source.id] = address
                self._devices[source.id] = devices
                replaced, self._answers[source.id] = self._answers.get(source.id), answer
        if clash is not None:
            self._directory.announce("duplicate", clash)
            raise DuplicateWorker(clash)
        if replaced is not None:
            replaced.set_exception(RendezvousFailed(f"{source.name} has joined again"))
        self._answer_if_complete()
        return answer

    def _clash_with(self, address: WorkerAddress) -> str | None:
        name, rank = address.info.name, address.info.id
        for other in self._joined.values():
            if (other.info.name == name) != (other.info.id == rank):
                return not_unique_text(other.info, address.info)
        return None

    def _answer_if_complete(self) -> None:
        with self._lock:
            if len(self._joined) < self._world_size:
                return
            ready, self._answers = list(self._answers.values()), {}
            addresses = [encode_address(item) for item in self._joined.values()]
            problem = self._find_problem()
        with self._agent.server.answering():  # one of them is rank 0's own, and it may leave at once
            for answer in ready:
                if problem is None:
                    answer.set_result(addresses)
                else:
                    answer.set_exception(problem)

    def _find_problem(self) -> ConfigurationError | None:
        """Return what is wrong with the device maps of the workers; None if they are fine."""
        reports = {self._joined[rank].info.name: self._devices[rank] for rank in sorted(self._devices)}
        try:
            check_device_maps(reports, knows_all=len(reports) == self._world_size)
        except ConfigurationError as error:
            return error
        return None


class Meeting:
    """How a worker that listens and is published gets into a fixed world."""

    def __init__(self, agent: Agent, directory: StoreDirectory, point: MeetingPoint) -> None:
        assert point.world_size is not None
        self._agent = agent
        self._directory = directory
        self._where, self._rank, self._world_size = point.where, point.rank, point.world_size
        self._began = time.monotonic()
        self._met: list[bytes] = []
        self._problem: Exception | None = None
        self._arrived: set[int] = set()
        self._next_check = 0.0  # when to look for an obstacle again
        self._refused_by = 0  # incarnation of the rank 0 that does not let this worker in
        self._refused_at = 0.0
        agent.server.register_control("met", lambda source: [] if agent.is_leaving else self._met)

    def join(self, deadline: float) -> None:
        """Return when every rank is there."""
        own = self._host() if self._rank == 0 else None
        # Ranks that time out withdraw, so check who has arrived shortly before that.
        look = deadline - 0.1 * max(0.0, deadline - time.monotonic())
        while time.monotonic() < deadline:
            answer = own or self._ask_to_join()
            self._wait_for(answer, deadline if self._arrived else look)
            if answer is not None and answer.done() and self._take(answer):
                self._directory.settle()
                return
            if time.monotonic() >= look and not self._arrived:
                self._arrived = self._published()
            try:
                self._check_obstacle()
                self._directory.check_store()
            except MeetingPointLost as error:
                if self._arrived:  # rank 0 timed out a moment before this one and reports who is missing
                    raise self._failure() from error
                raise
            _interrupts.sleep(_REFUSED_LOOK_S if self._refused_by else _LOOK_S)
        raise self._failure() from self._problem

    def _host(self) -> InterruptibleFuture[Any]:
        host = Host(self._agent, self._world_size, self._directory)
        answer = host.join()
        for rank in range(1, self._world_size):
            address = self._directory.at_rank(rank)
            if address is not None:
                self._directory.hint(address)
                self._ask_whether_met(host, address.info.name)
        return answer

    def _ask_whether_met(self, host: Host, name: str) -> None:
        limits = self._agent.config.limits

        def on_done(call: PendingCall) -> None:
            if call.error is None and call.value:
                with contextlib.suppress(DecodeError):
                    host.adopt([decode_address(raw, limits) for raw in call.value])

        try:
            self._agent.control(name, "met", (), _ASK_S, on_done, _Addresses)
        except GradwireError:
            return  # left from an earlier run

    def _ask_to_join(self) -> InterruptibleFuture[Any] | None:
        """Send this worker's address to rank 0; None if rank 0 is not there or cannot be reached yet."""
        leader = self._directory.at_rank(0)
        if leader is None:
            return None
        if leader.info.name == self._agent.info.name:
            # Left from an earlier run, unless it answers: both may have looked for the name before either published it.
            if _is_there(self._agent, leader):
                raise self._directory.duplicate(not_unique_text(leader.info, self._agent.info))
            return None
        self._directory.hint(leader)
        args = (
            encode_address(self._agent.address),
            self._world_size,
            msgspec.to_builtins(report_devices(self._agent.config)),
        )
        try:
            answer = self._agent.ask(leader.info.name, "join", args, 0.0, _Addresses)
        except GradwireError as error:
            self._problem = error
            self._on_failure(leader, error)
            return None
        self._refused_by = 0
        return answer

    def _on_failure(self, leader: WorkerAddress, error: GradwireError) -> None:
        """Keep trying to reach rank 0, unless it responds and refuses this worker."""
        if not isinstance(error, AuthenticationFailed) and self._has_way_to(leader):
            self._refused_by = 0
            return
        now = time.monotonic()
        if self._refused_by != leader.incarnation:
            self._refused_by, self._refused_at = leader.incarnation, now
        elif now >= self._refused_at + _REFUSED_S:
            text = f"rank {self._rank} ({self._agent.info.name}) cannot join rank 0 ({leader.info.name}): {error}"
            is_taken = isinstance(error, IdentityTaken)
            self._directory.announce("duplicate" if is_taken else "refused", text)
            raise DuplicateWorker(text) if is_taken else RendezvousFailed(text)

    def _has_way_to(self, leader: WorkerAddress) -> bool:
        # Beyond one machine a transport in common takes keys.
        try:
            registry.choose_uri(leader, self._agent.address.host, self._agent.transports)
        except ConnectFailed:
            return False
        return True

    def _wait_for(self, answer: InterruptibleFuture[Any] | None, deadline: float) -> None:
        while answer is not None and not answer.done() and time.monotonic() < deadline:
            _interrupts.sleep(0.002 if time.monotonic() < deadline - 5 else _LOOK_S)
            if not answer.done():
                self._check_obstacle()

    def _check_obstacle(self) -> None:
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + _OBSTACLE_LOOK_S
            self._directory.check_obstacle(self._began)

    def _take(self, answer: InterruptibleFuture[Any]) -> bool:
        try:
            met: list[bytes] = answer.wait()
            addresses = [decode_address(raw, self._agent.config.limits) for raw in met]
        except ConfigurationError:
            self._directory.is_hopeless = self._rank != 0  # rank 0 has told all
            raise
        except GradwireError as error:  # the worker that answered is not rank 0 of this meeting
            self._problem = error
            return False
        try:
            for address in addresses:
                self._directory.update(address)
        except IdentityTaken as error:
            raise DuplicateWorker(str(error)) from error
        self._met = met
        return True

    def _published(self) -> set[int]:
        return {rank for rank in range(self._world_size) if self._directory.at_rank(rank) is not None}

    def _failure(self) -> RendezvousFailed:
        arrived = self._arrived | self._published()
        missing = [str(rank) for rank in range(self._world_size) if rank not in arrived]
        last = f" (the last attempt to join rank 0 failed: {self._problem})" if self._problem is not None else ""
        if refusals := self._directory.refusals():
            last += f". The meeting point refused these connections: {refusals}"
        if not missing:
            return RendezvousFailed(
                f"rank {self._rank} ({self._agent.info.name}) did not complete the rendezvous in time, although "
                f"{self._where} has an address for each of the {self._world_size} ranks. Check that every rank is running "
                f"(an address may be left from an earlier run) and can connect to rank 0, or raise init_timeout{last}"
            )
        return RendezvousFailed(
            f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)} never arrived at {self._where}: rank {self._rank} "
            f"({self._agent.info.name}) waited for world_size={self._world_size}. Start the missing ranks with the same "
            f"init_method and world_size, or raise init_timeout{last}"
        )
