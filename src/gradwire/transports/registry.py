"""The ways to reach other workers, and the best of them for an address.

    Transport --listen()--> Listener --accept_nowait()--> StreamConnection
              --connect()-------------------------------> StreamConnection

A transport is chosen by the scheme of a URI.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from gradwire.config import WorkerConfig
from gradwire.errors import ConfigurationError, ConnectFailed
from gradwire.transports.inproc import InprocTransport
from gradwire.transports.stream import StreamConnection, StreamOptions
from gradwire.transports.tcp import TcpTransport
from gradwire.transports.unix import UnixTransport
from gradwire.types import Trust, WorkerAddress
from gradwire.wire.tensors import SHAREABLE_DTYPES

LOCAL = "local"
"""Host value for workers known to be on this machine when the directory is created."""

_PREFERENCE = ("inproc", "unix", "tcp")  # cheapest first


class Listener(Protocol):
    """Accepts connections at one address."""

    uri: str

    def fileno(self) -> int:
        """Return the descriptor to wait on."""

    def accept_nowait(self) -> StreamConnection | None:
        """Return the next connection, or None when there is none now or the caller was not acceptable.

        Raises:
            ResourceExhausted: This process has no descriptor left for it.
        """

    def close(self) -> None:
        """Stop listening and remove the files of the address. Idempotent."""


class Transport(Protocol):
    """One way to reach other workers."""

    scheme: str

    def listen(self, worker: str) -> Listener:
        """Start to listen for the worker of that name.

        Raises:
            ConfigurationError: The address must not or cannot be used.
        """

    def connect(self, uri: str, deadline: float) -> StreamConnection:
        """Open a connection; `deadline` is in `time.monotonic` seconds.

        Raises:
            ConnectFailed: No worker responds at that address.
            ResourceExhausted: This process is out of descriptors.
            AuthenticationFailed: The listener belongs to another user or cluster, or only one side has keys.
        """


def make_transports(config: WorkerConfig, trust: Trust, folder: Path | None) -> dict[str, Transport]:
    """Make the transports that a worker listens on and connects with.

    Raises:
        ConfigurationError: A setting that a transport needs is missing.
    """
    options = StreamOptions(
        limits=config.limits,
        shared_memory_from=config.shared_memory_from,
        shared_dtypes=SHAREABLE_DTYPES[trust],
    )
    transports: dict[str, Transport] = {}
    for scheme in config.transports or (("unix", "tcp") if config.tls is not None else ("unix",)):
        if scheme == "inproc":
            transports[scheme] = InprocTransport(options)
        elif scheme == "unix":
            if folder is None:
                raise ConfigurationError("the unix transport needs a private folder for its socket")
            transports[scheme] = UnixTransport(folder, options)
        else:
            transports[scheme] = TcpTransport(
                config.bind_host, config.bind_port, config.tls, options, config.advertised_host
            )
    return transports


def choose_uri(address: WorkerAddress, host: str, schemes: Iterable[str]) -> str:
    """Return the best of a worker's addresses for this worker: shared memory on one machine, TCP otherwise.

    Raises:
        ConnectFailed: None of them can be used from here.
    """
    known = set(schemes)
    is_here = address.host in (host, LOCAL)
    for scheme in _PREFERENCE:
        if scheme in known and (scheme == "tcp" or is_here):
            for uri in address.uris:
                if uri.startswith(f"{scheme}://"):
                    return uri
    where = "on this machine" if is_here else "on another machine"
    advice = "give every worker TLS keys (tls=) to cross machines"
    if is_here:
        advice = "start every worker with the same transports="
    raise ConnectFailed(
        f"worker {address.info.name} is {where} and listens at {', '.join(address.uris) or 'no address'}, but this "
        f"worker uses {', '.join(sorted(known))} only; {advice}"
    )


def host_identity() -> str:
    """Return an identifier that is equal for two processes exactly if they share a kernel and a network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()
