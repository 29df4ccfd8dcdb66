"""Settings and their defaults, each defined, documented and checked in one place.

`WorkerConfig` holds the settings of a worker. `gradwire.rpc.RpcOptions` takes most of them, under names familiar from
PyTorch; a `Cluster` takes some. Both build one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradwire.errors import ConfigurationError
from gradwire.types import Trust

__all__ = ["GIB", "KIB", "MIB", "Limits", "TlsKeys", "WorkerConfig"]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_MAX_PORT = 65_535


def _is_port(value: Any) -> bool:
    ports = list(value) if isinstance(value, tuple) and len(value) == 2 else [value]
    if not all(isinstance(port, int) and not isinstance(port, bool) for port in ports):
        return False
    least = 0 if len(ports) == 1 else 1
    return bool(least <= ports[0] <= ports[-1] <= _MAX_PORT)


def check_port(port: object) -> None:
    """Check the port of a server.

    Raises:
        ConfigurationError: It is not a number from 0 to 65,535.
    """
    if isinstance(port, tuple) or not _is_port(port):
        raise ConfigurationError(f"port must be a whole number from 0 (any free port) to {_MAX_PORT:,}, not {port!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on what a worker accepts from another; larger requests are refused before anything is decoded or allocated.

    Attributes:
        frame_bytes: Size of a message's payload (arguments and tensors).
        header_bytes: Size of a message's header.
        num_tensors: Number of tensors in a message.
        num_dims: Number of dimensions of a tensor.
        depth: Nesting depth of containers in arguments.
        name_bytes: Length of a worker's or function's name.
        calls_in_flight: Calls that one worker may have open at another; `rpc_async` waits for room.
        connections: Connections for calls, and as many again for control operations, that one worker may have open to
            another; beyond that the oldest is closed. One is enough; there are briefly more when one breaks.
        arena_bytes: Shared memory that one connection may hold; beyond it tensors travel through the socket.
        half_open: Number of connections that have not completed their handshake.
        handshake_bytes: Bytes accepted before the handshake is complete.
        handshake_timeout_s: Seconds allowed for a handshake.
        error_text_bytes: Size of an error's text including its traceback; longer texts are shortened in the middle.
        autograd_bytes: Estimated memory that one worker may make another hold for its autograd contexts, the messages
            recorded in them and their backward passes.

    Raises:
        ConfigurationError: A limit is not a positive number.
    """

    frame_bytes: int = 1 * GIB
    header_bytes: int = 1 * MIB
    num_tensors: int = 4096
    num_dims: int = 64
    depth: int = 32
    name_bytes: int = 128
    calls_in_flight: int = 1024
    connections: int = 4
    arena_bytes: int = 1 * GIB
    half_open: int = 64
    handshake_bytes: int = 4 * KIB
    handshake_timeout_s: float = 5.0
    error_text_bytes: int = 64 * KIB
    autograd_bytes: int = 512 * MIB

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if not _is_number(value) or not value > 0:
                raise ConfigurationError(f"Limits.{item.name} must be a positive number, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsKeys:
    """Files with which a worker proves that it belongs to the cluster, as written by `gradwire.transports.tls.make_keys`.

    Attributes:
        ca: Certificate of the cluster's authority.
        certificate: This worker's certificate, signed by the authority.
        key: This worker's private key; must be readable only by its owner.
    """

    ca: Path
    certificate: Path
    key: Path

    @classmethod
    def in_folder(cls, folder: str | Path, name: str = "worker") -> TlsKeys:
        """Return the files ``ca.pem``, ``<name>.pem`` and ``<name>.key`` in one folder."""
        base = Path(folder)
        return cls(ca=base / "ca.pem", certificate=base / f"{name}.pem", key=base / f"{name}.key")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of one worker.

    Attributes:
        num_worker_threads: User functions that run at the same time; those waiting for another call do not count.
        rpc_timeout_s: Default timeout of a call in seconds; 0 means no timeout.
        trust: ``"code"`` or ``"data"``; by default ``"data"`` if TLS keys are given, otherwise ``"code"``.
        transports: Schemes to listen on, or None for ``unix`` and, if keys are given, ``tcp``.
        bind_host: Address on which ``tcp`` listens. Anything but loopback requires `tls`.
        bind_port: Port for ``tcp``: 0 for any free port, ``(first, last)`` for a free one in that range.
        advertised_host: Address that other workers connect to if `bind_host` is a wildcard.
        tls: Keys for mutual TLS 1.3.
        token: Secret shared by the workers of a cluster; proven by HMAC in the handshake.
        limits: Limits on what is accepted from other workers.
        shared_memory_from: Size in bytes from which tensors go through shared memory on one machine.
        device_maps: Device maps by worker name: ``{"worker1": {"cuda:0": "cuda:1"}}`` sends tensors from ``cuda:0`` here to
            ``cuda:1`` of worker1. Without a map for a worker, tensors arrive there on the device of the same name.
        devices: Devices that maps may name; any if empty.

    Raises:
        ConfigurationError: A setting is wrong; the message names it.
    """

    num_worker_threads: int = 16
    rpc_timeout_s: float = 60.0
    trust: Trust | None = None
    transports: tuple[str, ...] | None = None
    bind_host: str = "127.0.0.1"
    bind_port: int | tuple[int, int] = 0
    advertised_host: str | None = None
    tls: TlsKeys | None = None
    token: bytes = field(default=b"", repr=False)
    limits: Limits = Limits()
    shared_memory_from: int = 64 * KIB
    device_maps: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _is_number(self.num_worker_threads) or not self.num_worker_threads >= 1:
            raise ConfigurationError(f"num_worker_threads must be at least 1, not {self.num_worker_threads!r}")
        if not _is_number(self.rpc_timeout_s) or not self.rpc_timeout_s >= 0:
            raise ConfigurationError(f"rpc_timeout must be 0 (none) or positive, not {self.rpc_timeout_s!r}")
        if self.trust not in (None, "code", "data"):
            raise ConfigurationError(f'trust must be "code" or "data", not {self.trust!r}')
        transports: object = self.transports
        if isinstance(transports, str) or not all(
            scheme in ("inproc", "unix", "tcp") for scheme in self.transports or ()
        ):
            raise ConfigurationError(
                f'transports must be a tuple of "inproc", "unix" and "tcp", such as ("unix", "tcp"), not {self.transports!r}'
            )
        if not _is_port(self.bind_port):
            raise ConfigurationError(
                f"bind_port (port_range of a Cluster) must be 0 to {_MAX_PORT:,}, or a range (first, last) with "
                f"1 <= first <= last, not {self.bind_port!r}"
            )
        if not isinstance(self.limits, Limits):
            raise ConfigurationError(f"limits must be a gradwire.config.Limits, not {self.limits!r}")
