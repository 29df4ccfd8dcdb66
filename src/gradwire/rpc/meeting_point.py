"""Where workers that were started separately meet: one of torch's stores, opened from an init method.

env://            MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, as torchrun sets them
tcp://host:port   rank 0 serves the store there
file:///path      a file that all can reach
"""

from __future__ import annotations

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

from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

from gradwire.errors import ConfigurationError, RendezvousFailed
from gradwire.transports.tcp import is_loopback

_LOOK_S = 0.05


class MeetingPointLost(RendezvousFailed):
    """The store went away before everybody had met; it may be opened again."""


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
        """The store for a question after the meeting, or None if it is gone.

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

    def without_client(self) -> MeetingPoint:
        """The point as it is kept after the meeting: a store that is served elsewhere is let go of."""
        return self if self.port is None or self.is_served_here else dataclasses.replace(self, store=None)

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
            # It will hold the token: nobody else may read it.
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
    """A descriptor that listens on loopback alone; left to itself, the store would listen on all interfaces.

    None where something listens there already: another store of this process, which is then shared, or a real conflict,
    about which the store complains.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024).detach()
    except OSError:
        return None


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
