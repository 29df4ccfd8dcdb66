"""How workers that were started separately find each other.

    every rank   open the store, agree on a token, listen, publish its address
    every rank   --join--> rank 0, which answers with all addresses once all ranks have joined

The store only carries addresses. Rank 0's word counts, so what an earlier run left in a file is harmless. A rank that
restarts publishes its new incarnation and joins again; the others find it when the old one stops answering. If rank 0
itself restarts, it asks those who have met already. A rank that cannot join (wrong keys, another trust level, a name or rank
that is taken) says so in the store, and all who wait give up at once. Without `world_size` there is no meeting: workers come
and go, and are looked up by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import parse_qs, urlparse

from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

from gradwire import _interrupts
from gradwire.config import Limits
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
from gradwire.rpc.agent import Agent
from gradwire.rpc.functions import EncodedAddress, WorldSize
from gradwire.rpc.futures import InterruptibleFuture
from gradwire.rpc.peers import StaticDirectory, not_unique_text
from gradwire.rpc.pending_calls import PendingCall
from gradwire.transports import registry
from gradwire.transports.tcp import is_loopback
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.wire.messages import decode_address, encode_address

_LOOK_S = 0.05


class MeetingPointLost(RendezvousFailed):
    """The store went away before all workers had met; it may be opened again."""


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Where the workers meet, and as which rank.

    Attributes:
        store: What all can read and write; None when this worker needs it no longer.
        where: For messages to people.
        host: Whose address a worker on another machine should face; None for files.
        rank: Of this worker.
        world_size: None where workers come and go.
        port: Where the store is served; None for files.
        is_served_here: Whether it is this process that serves it, and so takes it along when it ends.
    """

    store: Any
    where: str
    host: str | None
    rank: int
    world_size: int | None
    port: int | None = None
    is_served_here: bool = False

    def reopen(self) -> Any:
        """Return the store for a question after the meeting, or None if it is gone.

        The process that serves it may end before others. A client of torch's that is used then prints C++ stack traces, so
        none is kept: one is made for the question, where something listens.
        """
        if self.port is None or self.is_served_here or self.store is not None:
            return self.store
        assert self.host is not None
        try:
            socket.create_connection((self.host, self.port), timeout=1.0).close()
            return TCPStore(self.host, self.port, None, False, timedelta(seconds=2.0), wait_for_workers=False)
        except (OSError, RuntimeError, ValueError):
            return None

    @property
    def facing_host(self) -> str:
        """This machine's address as seen from the meeting point."""
        if self.host is None or is_loopback(self.host):
            return "127.0.0.1"
        family = socket.getaddrinfo(self.host, 9)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing; asks the kernel for the route
            probe.connect((self.host, 9))
            return str(probe.getsockname()[0])


def open_meeting_point(init_method: str, rank: int, world_size: int | None, timeout_s: float) -> MeetingPoint:
    url = urlparse(init_method)
    query = {key: values[0] for key, values in parse_qs(url.query).items()}
    if url.scheme == "env":
        return _open_env(rank, world_size, timeout_s)
    rank = int(query.get("rank", rank))
    if "world_size" in query:
        world_size = int(query["world_size"])
    _check(rank, world_size)
    if url.scheme == "file":
        path = os.path.abspath(url.netloc + url.path)
        if not os.path.isdir(os.path.dirname(path)):  # the store would try to open it until the deadline
            raise RendezvousFailed(f"cannot meet at {init_method}: there is no folder {os.path.dirname(path)}")
        try:
            # It will hold the token, which no other user may read.
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            store = FileStore(path, -1)
        except (RuntimeError, OSError) as error:
            raise RendezvousFailed(f"cannot meet at {init_method}: {error}") from error
        return MeetingPoint(store, init_method, None, rank, world_size)
    if url.scheme == "tcp" and url.hostname and url.port:
        store = _open_tcp(url.hostname, url.port, rank == 0, rank, timeout_s)
        return MeetingPoint(store, init_method, url.hostname, rank, world_size, url.port, rank == 0)
    raise ConfigurationError(f'init_method must be "env://", "tcp://host:port" or "file:///path", not {init_method!r}')


def _open_env(rank: int, world_size: int | None, timeout_s: float) -> MeetingPoint:
    def need(name: str) -> str:
        if name not in os.environ:
            raise ConfigurationError(
                f'environment variable {name} expected by init_method "env://", but not set; set it, or pass '
                f'rpc_backend_options with init_method="tcp://host:port" and rank='
            )
        return os.environ[name]

    rank = rank if rank >= 0 else int(need("RANK"))
    if world_size is None and "WORLD_SIZE" in os.environ:
        world_size = int(os.environ["WORLD_SIZE"])
    _check(rank, world_size)
    host, port = need("MASTER_ADDR"), int(need("MASTER_PORT"))
    is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun serves the store itself
    is_served_here = rank == 0 and not is_hosted
    store = _open_tcp(host, port, is_served_here, rank, timeout_s)
    return MeetingPoint(store, f"tcp://{host}:{port}", host, rank, world_size, port, is_served_here)


def _check(rank: int, world_size: int | None) -> None:
    if rank == -1:
        raise ConfigurationError("rank parameter missing: pass rank= to init_rpc, or ?rank= in init_method")
    if not 0 <= rank < 1 << 16:
        raise ConfigurationError(f"rank must be between 0 and 65,535, not {rank}")
    if world_size is not None and not rank < world_size:
        raise ConfigurationError(f"rank {rank} does not fit a world of {world_size}")


def _open_tcp(host: str, port: int, is_server: bool, rank: int, timeout_s: float) -> Any:
    if not is_server:
        _wait_for_server(host, port, timeout_s)
    try:
        return TCPStore(
            host,
            port,
            None,
            is_server,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=_listen(host, port) if is_server and is_loopback(host) else None,
        )
    except (RuntimeError, ValueError) as error:
        if is_server:
            text = f"rank 0 cannot open the meeting point at tcp://{host}:{port}: {error}"
        else:
            text = f"rank 0 never arrived: rank {rank} expected it at tcp://{host}:{port} for {timeout_s:g} s"
        raise RendezvousFailed(text) from error


def _listen(host: str, port: int) -> int | None:
    """Return a descriptor that listens on loopback alone; left to itself, the store would listen on all interfaces.

    None where something listens there already: another store of this process, which is then shared, or a real conflict,
    about which the store complains.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024).detach()
    except OSError:
        return None


def agree_on_token(point: MeetingPoint, prefix: str) -> bytes:
    """Return one secret for all workers that meet there: the first one chooses it."""
    try:
        return bytes(point.store.compare_set(f"{prefix}/token", "", secrets.token_hex(32)))
    except RuntimeError as error:
        raise MeetingPointLost(f"the meeting point {point.where} went away: {error}") from error


def _wait_for_server(host: str, port: int, timeout_s: float) -> None:
    """Return when a server listens there or time is over; unlike the store's own wait, Ctrl-C interrupts it."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except OSError:
            _interrupts.sleep(_LOOK_S)


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

    What the store holds about a worker tells where to look for it. Its name and rank are bound when it has shown who it
    is, or when rank 0 says who has come: a file may hold what an earlier run has left there.
    """

    def __init__(self, point: MeetingPoint, prefix: str) -> None:
        super().__init__()
        self.is_fixed = point.world_size is not None
        self._point = point
        self._prefix = prefix
        self._looking = threading.Lock()  # held while a thread asks the store
        self._hints: dict[str, WorkerAddress] = {}  # of workers that have not shown who they are, by name

    def publish(self, agent: Agent) -> None:
        store, info = self._point.store, agent.info
        known = self._read(f"name/{info.name}")
        for other in (known, self._read(f"rank/{info.id}")):
            if other is not None and other.info != info and _is_there(agent, other):
                text = not_unique_text(other.info, info)
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
        """Leave a note for all who wait for this world: it cannot become complete. Return the note."""
        note = f"{time.time_ns()}:{kind}:{text}"
        with contextlib.suppress(RuntimeError, AttributeError):  # the store is gone
            self._point.store.set(f"{self._prefix}/obstacle", note)
        return note

    def check_obstacle(self, since_ns: int) -> None:
        """Look for such a note. One that is older than this worker, or that this process has read before, does not count."""
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
        """Let the others read what the store holds, where it ends with this process."""
        if self._point.is_served_here:
            _interrupts.sleep(_LINGER_S)

    def check_store(self) -> None:
        """Raise `MeetingPointLost` if the store does not answer."""
        try:
            self._point.store.check([f"{self._prefix}/token"])
        except RuntimeError as error:
            raise MeetingPointLost(f"the meeting point {self._point.where} went away: {error}") from error

    def last_incarnation(self, name: str) -> int:
        """Return what the store knows of an earlier life of that worker; 0 for nothing."""
        known = self._read(f"name/{name}")
        return known.incarnation if known is not None else 0

    def at_rank(self, rank: int) -> WorkerAddress | None:
        return self._read(f"rank/{rank}")

    def hint(self, address: WorkerAddress) -> None:
        """Remember where a worker may be that has not shown who it is."""
        self._hints[address.info.name] = address

    def settle(self) -> None:
        """Note that this worker is in: with a world size all are known, and the store is only asked about restarts."""
        if self._point.port is not None and not self._point.is_served_here:
            self._point = dataclasses.replace(self._point, store=None)  # see `MeetingPoint.reopen`
        self._hints = {}
        if self.is_fixed:
            self.complete()

    def withdraw(self, info: WorkerInfo) -> None:
        """Let go of the store and its port, and forgets this worker in a file.

        A store that is served is not told: it may end at the same moment, of which torch would print C++ stack traces. Who
        looks for this worker finds that nothing listens at its address.
        """
        point, self._point = self._point, dataclasses.replace(self._point, store=None)
        if point.port is None:
            with contextlib.suppress(RuntimeError, AttributeError):
                for key in (f"name/{info.name}", f"rank/{info.id}"):
                    point.store.set(f"{self._prefix}/{key}", b"")

    def find(self, worker: str | int) -> WorkerAddress:
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
        found = self._look_up(f"name/{name}")
        return found if found is not None and self._take_hint(found) else None

    def update(self, address: WorkerAddress) -> None:
        """Do as `StaticDirectory.update`; where workers come and go, the store is asked first about one that is new."""
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
        """Return all workers, by rank; without a world size, those that have published themselves."""
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
        """Do as `_read`, for calls under way: a store that does not answer must not hold them up, nor keep Ctrl-C out."""
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
    """Return whether anything listens at an address; a run that was killed leaves its addresses behind."""
    try:
        uri = registry.choose_uri(address, agent.address.host, agent.transports)
        agent.transports[uri.partition(":")[0]].connect(uri, time.monotonic() + 1.0).close()
    except TransportError:
        return False
    return True


_ASK_S = 2.0
_OBSTACLE_LOOK_S = 0.2
_REFUSED_S = 1.0  # what refuses for so long is rank 0 itself, not what an earlier run has left
_REFUSED_LOOK_S = 0.5  # rank 0 logs each attempt

_Addresses = list[EncodedAddress]


class Host:
    """Rank 0: answers every worker with all addresses once all ranks are there."""

    def __init__(self, agent: Agent, world_size: int, directory: StoreDirectory) -> None:
        self._agent = agent
        self._world_size = world_size
        self._directory = directory
        self._lock = threading.Lock()  # guards the two fields below
        self._joined: dict[int, WorkerAddress] = {}
        self._answers: dict[int, InterruptibleFuture[Any]] = {}  # owed, by rank
        agent.server.register_control("join", self._on_join, EncodedAddress, WorldSize)

    def join(self) -> InterruptibleFuture[Any]:
        return self._on_join(self._agent.info, encode_address(self._agent.address), self._world_size)

    def adopt(self, addresses: list[WorkerAddress]) -> None:
        """Take over from a worker that has met the others before this rank 0 was restarted: they need not join again.

        One worker may not speak for the others, so what it says must be what they have published.
        """
        published = {rank: self._directory.at_rank(rank) for rank in {address.info.id for address in addresses}}
        with self._lock:
            for address in addresses:
                known = published[address.info.id]
                if address.info.id != self._agent.info.id and known is not None and known.info == address.info:
                    self._joined.setdefault(address.info.id, address)
        self._answer_if_complete()

    def _on_join(self, source: WorkerInfo, raw: bytes, world_size: int) -> InterruptibleFuture[Any]:
        address = decode_address(raw, self._agent.config.limits)
        if address.info != source:
            raise DecodeError(f"{source.name} of rank {source.id} cannot join as {address.info!r}")
        if world_size != self._world_size or source.id >= world_size:
            text = f"{source.name} has world_size={world_size}, rank 0 has {self._world_size}"
            self._directory.announce("refused", f"rank {source.id} ({source.name}) cannot join: {text}")
            raise ConfigurationError(text)
        answer: InterruptibleFuture[Any] = InterruptibleFuture()
        with self._lock:
            clash = self._clash_with(address)
            if clash is None:
                self._joined[source.id] = address
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
        with self._agent.server.answering():  # one of them is rank 0's own, and it may leave at once
            for answer in ready:
                answer.set_result(addresses)


class Meeting:
    """How a worker that listens and is published gets into a fixed world."""

    def __init__(self, agent: Agent, directory: StoreDirectory, point: MeetingPoint) -> None:
        assert point.world_size is not None
        self._agent = agent
        self._directory = directory
        # Not the point itself: it would keep the store, and its port, as long as the agent.
        self._where, self._rank, self._world_size = point.where, point.rank, point.world_size
        self._met: list[bytes] = []
        self._problem: Exception | None = None
        self._arrived: set[int] = set()
        self._next_check = 0.0  # when to look for an obstacle again
        self._refused_by = 0  # incarnation of the rank 0 that does not let this worker in
        self._refused_at = 0.0
        agent.server.register_control("met", lambda source: self._met)

    def join(self, deadline: float) -> None:
        """Return when every rank is there."""
        own = self._host() if self._rank == 0 else None
        # Those who give up withdraw, so look who is there shortly before.
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
                if self._arrived:  # rank 0 gave up a moment before this one: it says who did not come
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
        if leader is None or leader.info.name == self._agent.info.name:  # the latter is left from an earlier run
            return None
        self._directory.hint(leader)
        args = (encode_address(self._agent.address), self._world_size)
        try:
            answer = self._agent.ask(leader.info.name, "join", args, 0.0, _Addresses)
        except GradwireError as error:
            self._problem = error
            self._on_failure(leader, error)
            return None
        self._refused_by = 0
        return answer

    def _on_failure(self, leader: WorkerAddress, error: GradwireError) -> None:
        """Go on trying to reach rank 0, unless it is there and does not let this worker in."""
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
            self._directory.check_obstacle(self._agent.address.incarnation)

    def _take(self, answer: InterruptibleFuture[Any]) -> bool:
        try:
            met: list[bytes] = answer.wait()
            addresses = [decode_address(raw, self._agent.config.limits) for raw in met]
        except ConfigurationError:
            raise
        except GradwireError as error:  # what answered was not the rank 0 of this meeting
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
        who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}" if missing else "a rank"
        last = f" (the last attempt to join rank 0 ended with: {self._problem})" if self._problem is not None else ""
        return RendezvousFailed(
            f"{who} never arrived at {self._where}: rank {self._rank} ({self._agent.info.name}) waited for a "
            f"world of {self._world_size}. Start the missing ranks with the same init_method and world_size{last}"
        )
