"""How workers that were started separately find each other, through one of torch's stores.

    every rank   open the store, agree on a token, listen, publish its address
    every rank   --join--> rank 0, which answers with all addresses once all ranks have joined

The store only carries addresses. Rank 0's word counts, so what an earlier run left in a file is harmless. A rank that
restarts publishes its new incarnation and joins again; the others find it when the old one stops answering. Without
`world_size` there is no meeting: workers come and go, and are looked up by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import msgspec
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

from gradwire.errors import ConfigurationError, GradwireError, RendezvousFailed, TransportError, UnknownWorker
from gradwire.rpc._calls import PendingCall
from gradwire.rpc.agent import Agent
from gradwire.rpc.directory import StaticDirectory
from gradwire.rpc.futures import InterruptibleFuture
from gradwire.transports import registry
from gradwire.transports.tcp import is_loopback
from gradwire.types import WorkerAddress, WorkerInfo

_encode = msgspec.msgpack.Encoder().encode
_decode_address = msgspec.msgpack.Decoder(WorkerAddress).decode
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Where the workers meet, and as which rank.

    Attributes:
        where: For messages to people.
        host: Whose address a worker on another machine should face; None for files.
        world_size: None where workers come and go.
    """

    store: Any
    where: str
    host: str | None
    rank: int
    world_size: int | None

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
    """Opens the store that an init method names.

    Raises:
        ConfigurationError: The method, rank or world size makes no sense.
        RendezvousFailed: The store cannot be reached in time.
    """
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
            store = FileStore(path, -1)
        except RuntimeError as error:
            raise RendezvousFailed(f"cannot meet at {init_method}: {error}") from error
        return MeetingPoint(store, init_method, None, rank, world_size)
    if url.scheme == "tcp" and url.hostname and url.port:
        store = _open_tcp(url.hostname, url.port, rank == 0, rank, timeout_s)
        return MeetingPoint(store, init_method, url.hostname, rank, world_size)
    raise ConfigurationError(f'init_method must be "env://", "tcp://host:port" or "file:///path", not {init_method!r}')


def _open_env(rank: int, world_size: int | None, timeout_s: float) -> MeetingPoint:
    def need(name: str) -> str:
        if name not in os.environ:
            raise ConfigurationError(
                f'init_method "env://" needs the environment variable {name}; set it, or pass '
                f'rpc_backend_options with init_method="tcp://host:port" and rank='
            )
        return os.environ[name]

    rank = rank if rank >= 0 else int(need("RANK"))
    if world_size is None and "WORLD_SIZE" in os.environ:
        world_size = int(os.environ["WORLD_SIZE"])
    _check(rank, world_size)
    host, port = need("MASTER_ADDR"), int(need("MASTER_PORT"))
    is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun serves the store itself
    store = _open_tcp(host, port, rank == 0 and not is_hosted, rank, timeout_s)
    return MeetingPoint(store, f"tcp://{host}:{port}", host, rank, world_size)


def _check(rank: int, world_size: int | None) -> None:
    if not 0 <= rank < 1 << 16:
        raise ConfigurationError(f"rank must be between 0 and 65,535, not {rank}")
    if world_size is not None and not rank < world_size:
        raise ConfigurationError(f"rank {rank} does not fit a world of {world_size}")


def _open_tcp(host: str, port: int, is_server: bool, rank: int, timeout_s: float) -> Any:
    if not is_server:
        _wait_for_server(host, port, timeout_s)
    try:
        return TCPStore(
            host, port, None, is_server, timedelta(seconds=timeout_s), wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, ValueError) as error:
        if is_server:
            text = f"rank 0 cannot open the meeting point at tcp://{host}:{port}: {error}"
        else:
            text = f"rank 0 never arrived: rank {rank} expected it at tcp://{host}:{port} for {timeout_s:g} s"
        raise RendezvousFailed(text) from error


def agree_on_token(point: MeetingPoint, prefix: str) -> bytes:
    """One secret for all workers that meet there: whoever comes first chooses it.

    Raises:
        MeetingPointLost: The store went away.
    """
    try:
        return bytes(point.store.compare_set(f"{prefix}/token", "", secrets.token_hex(32)))
    except RuntimeError as error:
        raise MeetingPointLost(f"the meeting point {point.where} went away: {error}") from error


def _wait_for_server(host: str, port: int, timeout_s: float) -> None:
    """Returns when somebody listens there or time is over; unlike the store's own wait, Ctrl-C interrupts it."""
    pause, deadline = threading.Event(), time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except OSError:
            pause.wait(_LOOK_S)


class MeetingPointLost(RendezvousFailed):
    """The store went away before everybody had met; it may be opened again."""


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

    def publish(self, agent: Agent) -> None:
        """Makes this worker known.

        Raises:
            ConfigurationError: Another rank that answers has the same name.
        """
        store, info = self._point.store, agent.info
        known = self._read(f"name/{info.name}")
        if known is not None and known.info.id != info.id and self.is_fixed and _is_there(agent, known):
            raise ConfigurationError(f"rank {known.info.id} is called {info.name}, too; names must be unique")
        try:
            store.set(f"{self._prefix}/name/{info.name}", _encode(agent.address))
            store.set(f"{self._prefix}/rank/{info.id}", _encode(agent.address))
            if known is None:
                index = store.add(f"{self._prefix}/members", 1)
                store.set(f"{self._prefix}/member/{index}", info.name)
        except RuntimeError as error:
            raise MeetingPointLost(f"the meeting point {self._point.where} went away: {error}") from error

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
            found = self._read(f"name/{worker}" if isinstance(worker, str) else f"rank/{worker}")
            if found is None:
                raise
            self.update(found)
            return found

    def refresh(self, name: str) -> WorkerAddress | None:
        """Reads the store again."""
        found = self._read(f"name/{name}")
        if found is not None:
            self.update(found)
        return found

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

    def _read(self, key: str) -> WorkerAddress | None:
        store, full = self._point.store, f"{self._prefix}/{key}"
        try:
            raw = store.get(full) if store.check([full]) else b""
        except (RuntimeError, AttributeError):  # the store went away with its host, or is closed
            return None
        return _decode_address(raw) if raw else None

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


class Joining:
    """Rank 0 answers everybody with all addresses once all ranks are there."""

    def __init__(self, agent: Agent, world_size: int) -> None:
        self._agent = agent
        self._world_size = world_size
        self._lock = threading.Lock()  # guards the two fields below
        self._joined: dict[int, WorkerAddress] = {}
        self._answers: list[InterruptibleFuture[Any]] = []
        agent.server.register_control("join", self._on_join)

    def _on_join(self, source: WorkerInfo, raw: bytes, world_size: int) -> InterruptibleFuture[Any]:
        if world_size != self._world_size:
            raise ConfigurationError(f"{source.name} has world_size={world_size}, rank 0 has {self._world_size}")
        answer: InterruptibleFuture[Any] = InterruptibleFuture()
        address = _decode_address(raw)
        with self._lock:
            other = self._joined.get(address.info.id)
            twin = next((item for item in self._joined.values() if item.info.name == address.info.name), None)
            if twin is not None and twin.info.id != address.info.id:
                raise ConfigurationError(f"ranks {twin.info.id} and {address.info.id} are both called {source.name}")
            if other is not None and other.info.name != address.info.name:
                raise ConfigurationError(f"{other.info.name} and {source.name} both have rank {address.info.id}")
            self._joined[address.info.id] = address
            self._answers.append(answer)
            ready = self._answers if len(self._joined) == self._world_size else []
            if ready:
                self._answers = []
            addresses = [_encode(item) for item in self._joined.values()]
        for waiting in ready:
            waiting.set_result(addresses)
        return answer

    def join(self) -> InterruptibleFuture[Any]:
        """Rank 0 joins itself."""
        return self._on_join(self._agent.info, _encode(self._agent.address), self._world_size)


def join(agent: Agent, directory: StoreDirectory, point: MeetingPoint, deadline: float) -> None:
    """Returns when every rank is there.

    Raises:
        RendezvousFailed: A rank did not arrive in time; says which, and where it was expected.
    """
    assert point.world_size is not None
    own = Joining(agent, point.world_size).join() if point.rank == 0 else None
    problem: Exception | None = None
    pause = threading.Event()  # never set: a wait that Ctrl-C interrupts
    arrived: set[int] = set()
    # Those who give up withdraw, so look who is there shortly before.
    look = deadline - 0.1 * max(0.0, deadline - time.monotonic())
    while time.monotonic() < deadline:
        try:
            answer = own or _ask_to_join(agent, directory, point)
        except GradwireError as error:  # rank 0 is known but cannot be reached (yet)
            answer, problem = None, error
        while answer is not None and not answer.done() and time.monotonic() < (deadline if arrived else look):
            pause.wait(0.002 if time.monotonic() < deadline - 5 else _LOOK_S)
        if time.monotonic() >= look and not arrived:
            arrived = _ranks_at(directory, point.world_size)
        directory.check_store()
        if answer is not None and answer.done():
            try:
                for raw in answer.wait():
                    directory.update(_decode_address(raw))
                return
            except ConfigurationError:
                raise
            except GradwireError as error:  # what answered was not the rank 0 of this meeting
                problem = error
        pause.wait(_LOOK_S)
    arrived |= _ranks_at(directory, point.world_size)
    missing = [str(rank) for rank in range(point.world_size) if rank not in arrived]
    ranks = (
        f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}" if missing else "nobody is missing, but a rank"
    )
    raise RendezvousFailed(
        f"{ranks} never arrived at {point.where}: rank {point.rank} ({agent.info.name}) waited for a world of "
        f"{point.world_size}. Start the missing ranks with the same init_method and world_size"
        + (f" (the last attempt to join rank 0 ended with: {problem})" if problem is not None else "")
    ) from problem


def _ranks_at(directory: StoreDirectory, world_size: int) -> set[int]:
    return {rank for rank in range(world_size) if directory.at_rank(rank) is not None}


def _ask_to_join(agent: Agent, directory: StoreDirectory, point: MeetingPoint) -> InterruptibleFuture[Any] | None:
    """Sends this worker's address to rank 0; None if rank 0 is not there yet.

    Raises:
        GradwireError: It cannot be reached.
    """
    leader = directory.at_rank(0)
    if leader is None or leader.info.name == agent.info.name:  # the latter is left from an earlier run
        return None
    directory.update(leader)
    answer: InterruptibleFuture[Any] = InterruptibleFuture()

    def on_done(call: PendingCall) -> None:
        if call.error is not None:
            answer.set_exception(call.error)
        else:
            answer.set_result(call.value)

    agent.control(leader.info.name, "join", (_encode(agent.address), point.world_size), 0.0, on_done)
    return answer
