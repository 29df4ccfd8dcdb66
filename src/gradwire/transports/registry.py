"""From a worker's settings to its transports, and from an address to the best way there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from gradwire.config import WorkerConfig
from gradwire.errors import ConfigurationError, ConnectFailed
from gradwire.transports.base import Transport
from gradwire.transports.inproc import InprocTransport
from gradwire.transports.stream import StreamOptions
from gradwire.transports.tcp import TcpTransport
from gradwire.transports.unix import UnixTransport
from gradwire.types import Trust, WorkerAddress
from gradwire.wire.tensors import SHAREABLE_DTYPES

LOCAL = "local"  # the host of workers that whoever made the directory knows to be on this machine
_PREFERENCE = ("inproc", "unix", "tcp")  # cheapest first


def make_transports(config: WorkerConfig, trust: Trust, folder: Path | None) -> dict[str, Transport]:
    """The transports a worker listens on and connects with.

    Raises:
        ConfigurationError: A transport lacks what it needs.
    """
    schemes = config.transports or (("unix", "tcp") if config.tls is not None else ("unix",))
    options = StreamOptions(
        limits=config.limits,
        shared_memory_from=config.shared_memory_from,
        shared_dtypes=SHAREABLE_DTYPES[trust],
    )
    transports: dict[str, Transport] = {}
    for scheme in schemes:
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
    """The best of a worker's addresses from here: shared memory on one machine, TCP otherwise.

    Raises:
        ConnectFailed: None of them can be used from here.
    """
    known = set(schemes)
    is_here = address.host in (host, LOCAL)
    for scheme in _PREFERENCE:
        if scheme not in known or (scheme != "tcp" and not is_here):
            continue
        for uri in address.uris:
            if uri.startswith(f"{scheme}://"):
                return uri
    where = "on this machine" if is_here else "on another machine"
    raise ConnectFailed(
        f"worker {address.info.name} is {where} and listens at {', '.join(address.uris) or 'no address'}, but this "
        f"worker speaks {', '.join(sorted(known))} only; give every worker TLS keys (tls=) to cross machines"
    )


def host_identity() -> str:
    """Equal for two processes exactly when they share a kernel and a network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        import socket

        return socket.gethostname()
    return f"{boot}/{namespace}"
