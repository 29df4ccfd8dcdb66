"""The meeting point of `init_rpc`: reads `init_method` and the environment, and opens the store.

    file:///path                      a file
    tcp://host:port, env://           without keys: torch's TCP store, which rank 0 or torchrun serves
                                      with keys: gradwire's own store over TLS, which rank 0 serves

With keys, rank 0 listens at the given port itself. Under torchrun that port is in use, so rank 0 publishes the address of
its store in torchrun's store. That address is only a hint: the server there must present a certificate of the cluster.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from urllib.parse import ParseResult, parse_qs, urlparse

from gradwire.config import TlsKeys
from gradwire.errors import ConfigurationError, RendezvousFailed
from gradwire.rpc import secure_store
from gradwire.rpc.meeting_store import MeetingStore, TorchStore, open_file_store, open_tcp_store, serve_tcp_store
from gradwire.transports.tcp import is_loopback

_HINT = "secure"  # the key in torchrun's store


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """The store where the workers meet, and the rank of this one.

    Attributes:
        store: The store shared by all workers.
        where: Its address, for error messages.
        facing_host: This machine's address as seen from the meeting point.
        rank: Rank of this worker.
        world_size: Number of workers; None if workers may join and leave.
    """

    store: MeetingStore
    where: str
    facing_host: str
    rank: int
    world_size: int | None


def open_meeting_point(
    init_method: str,
    rank: int,
    world_size: int | None,
    timeout_s: float,
    tls: TlsKeys | None = None,
    bind_host: str | None = None,
) -> MeetingPoint:
    """Open the store where the workers meet, and serve it on rank 0 unless it is a file.

    Args:
        init_method: ``env://``, ``tcp://host:port`` or ``file:///path``.
        rank: Rank of this worker; -1 to read it from the query or the environment.
        world_size: Number of workers; None to read it from there as well.
        timeout_s: How long to wait for rank 0.
        tls: Keys; with these, a store that is not a file is reached only over TLS.
        bind_host: Address at which to serve it, if not the one that faces the meeting point.

    Raises:
        ConfigurationError: An argument is wrong.
        RendezvousFailed: The store cannot be served or reached.
    """
    url = urlparse(init_method)
    query = {key: values[0] for key, values in parse_qs(url.query).items()}
    is_hosted = False
    if url.scheme == "env":
        rank = rank if rank >= 0 else _number("RANK", _need("RANK"))
        if world_size is None and "WORLD_SIZE" in os.environ:
            world_size = _number("WORLD_SIZE", os.environ["WORLD_SIZE"])
    else:
        rank = _number("rank", query.get("rank", rank))
        if "world_size" in query:
            world_size = _number("world_size", query["world_size"])
    _check(rank, world_size)
    if url.scheme == "file":
        path = os.path.abspath(url.netloc + url.path)
        return MeetingPoint(_open_file(path, init_method, timeout_s), init_method, "127.0.0.1", rank, world_size)
    if url.scheme == "env":
        host, port = _need("MASTER_ADDR"), _number("MASTER_PORT", _need("MASTER_PORT"))
        is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun serves a store there itself
    elif url.scheme == "tcp" and url.hostname and (url_port := _port_of(url)):
        host, port = url.hostname, url_port
    else:
        raise ConfigurationError(
            f'init_method must be "env://", "tcp://host:port" or "file:///path", not {init_method!r}'
        )
    where, facing_host = f"tcp://{host}:{port}", _facing(host)
    store: MeetingStore
    if tls is None:
        is_server = rank == 0 and not is_hosted
        store = (
            serve_tcp_store(host, port, timeout_s)
            if is_server
            else open_tcp_store(host, port, rank, timeout_s, is_hosted=is_hosted)
        )
    elif is_hosted:
        hints = open_tcp_store(host, port, rank, timeout_s, is_hosted=True)
        store = _open_hinted(hints, where, rank, timeout_s, tls, bind_host or facing_host, facing_host)
    elif rank == 0:
        store = secure_store.serve(host, port, tls, where)
    else:
        uri = secure_store.uri_of(host, port)
        store = secure_store.open_client(lambda: uri, tls, where, rank, timeout_s)
    return MeetingPoint(store, init_method if url.scheme == "tcp" else where, facing_host, rank, world_size)


def _need(name: str) -> str:
    if name not in os.environ:
        raise ConfigurationError(
            f'environment variable {name} expected by init_method "env://", but not set; set it, or pass '
            f'rpc_backend_options with init_method="tcp://host:port" and rank='
        )
    return os.environ[name]


def _number(name: str, text: str | int) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConfigurationError(f"{name} must be a whole number, not {text!r}") from error


def _port_of(url: ParseResult) -> int | None:
    with contextlib.suppress(ValueError):  # it is not a number, or out of range
        return url.port
    return None


def _check(rank: int, world_size: int | None) -> None:
    if rank == -1:
        raise ConfigurationError("rank parameter missing: pass rank= to init_rpc, or ?rank= in init_method")
    if not 0 <= rank < 1 << 16:
        raise ConfigurationError(f"rank must be between 0 and 65,535, not {rank}")
    if world_size is not None and not rank < world_size:
        raise ConfigurationError(f"rank {rank} is out of range for world_size={world_size}")


def _open_file(path: str, init_method: str, timeout_s: float) -> TorchStore:
    if not os.path.isdir(os.path.dirname(path)):  # the store would try to open it until the deadline
        raise RendezvousFailed(f"cannot use {init_method}: the folder {os.path.dirname(path)} does not exist")
    try:
        # It will hold the token, which no other user may read.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        return open_file_store(path, init_method, timeout_s)
    except (RuntimeError, OSError) as error:
        raise RendezvousFailed(f"cannot use {init_method}: {error}") from error


def _open_hinted(
    hints: TorchStore, where: str, rank: int, timeout_s: float, tls: TlsKeys, bind_host: str, facing_host: str
) -> MeetingStore:
    if rank == 0:
        is_wildcard = bind_host in ("0.0.0.0", "::")
        store = secure_store.serve(bind_host, 0, tls, where, facing_host if is_wildcard else None)
        is_known = False
        try:
            hints.write(_HINT, store.uri.encode())
            is_known = True
        finally:
            if not is_known:
                store.close()
        hints.rest()
        return store

    def find_uri() -> str | None:
        return hints.read(_HINT).decode(errors="replace") or None

    return secure_store.open_client(find_uri, tls, where, rank, timeout_s, on_rest=hints.rest)


def _facing(host: str) -> str:
    if is_loopback(host):
        return "127.0.0.1"
    try:
        family = socket.getaddrinfo(host, 9)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing; only queries the kernel's route
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RendezvousFailed(f"the meeting point {host} cannot be reached from this machine: {error}") from error
