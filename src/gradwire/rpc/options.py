"""Options of `init_rpc`, with PyTorch's names."""

from __future__ import annotations

from typing import Any

import torch

from gradwire.config import Limits, TlsKeys, WorkerConfig
from gradwire.errors import ConfigurationError
from gradwire.types import Trust
from gradwire.wire.devices import read_device, read_device_map

_DEFAULTS = WorkerConfig()
DEFAULT_RPC_TIMEOUT_SEC = _DEFAULTS.rpc_timeout_s
DEFAULT_INIT_METHOD = "env://"
DEFAULT_INIT_TIMEOUT_SEC = 300.0
DEFAULT_SHUTDOWN_TIMEOUT = 0.0
DEFAULT_NUM_WORKER_THREADS = _DEFAULTS.num_worker_threads
UNSET_RPC_TIMEOUT = -1.0

DeviceMap = dict[Any, Any]


class RpcBackendOptions:
    """Options common to all backends.

    Args:
        rpc_timeout: Default timeout of a call in seconds; 0 for no timeout.
        init_method: Where the workers meet: ``env://``, ``tcp://host:port`` or ``file:///path``.

    Raises:
        TypeError: The timeout is not a number.
    """

    def __init__(self, rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC, init_method: str = DEFAULT_INIT_METHOD) -> None:
        if not isinstance(rpc_timeout, int | float):
            kind, given = type(self).__name__, type(rpc_timeout).__name__
            raise TypeError(
                f"{kind}: incompatible constructor arguments: rpc_timeout must be a number of seconds, not a {given}"
            )
        self.rpc_timeout = float(rpc_timeout)
        self.init_method = init_method

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in vars(self).items())})"


class RpcOptions(RpcBackendOptions):
    """Options of a worker, and of how the workers find each other.

    Args:
        num_worker_threads: User functions that run at the same time; those waiting for another call do not count.
        rpc_timeout: Default timeout of a call in seconds; 0 for no timeout.
        init_method: Where the workers meet: ``env://``, ``tcp://host:port`` or ``file:///path``.
        init_timeout: Seconds to wait for the other workers.
        trust: ``"code"`` (any function, pickled arguments) or ``"data"`` (exposed functions, plain data, no pickle);
            by default ``"data"`` if TLS keys are given, otherwise ``"code"``.
        transports: Schemes to use; by default ``unix`` and, if TLS keys are given, ``tcp``.
        tls: Keys for connections between machines. With keys, the rendezvous uses TLS as well: rank 0 itself listens at the
            ``tcp://`` or ``env://`` address.
        bind_host: Address for ``tcp``; by default the one that faces the meeting point.
        bind_port: Port for ``tcp``: 0 for any free port, ``(first, last)`` for a free one in that range.
        limits: Limits on what is accepted from other workers.
        shared_memory_from: Size in bytes from which tensors go through shared memory on one machine.
        device_maps: Device maps by worker name: ``{"worker1": {"cuda:0": "cuda:1"}}`` sends tensors from ``cuda:0`` here to
            ``cuda:1`` of worker1. Without a map for a worker, tensors arrive there on the device of the same name.
        devices: Devices here that maps may name, including the maps of other workers; any by default.

    Raises:
        ConfigurationError: An item of `device_maps` or `devices` is not valid.
        TypeError: `rpc_timeout` is not a number.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        init_timeout: float = DEFAULT_INIT_TIMEOUT_SEC,
        trust: Trust | None = None,
        transports: tuple[str, ...] | None = None,
        tls: TlsKeys | None = None,
        bind_host: str | None = None,
        bind_port: int | tuple[int, int] = 0,
        limits: Limits | None = None,
        shared_memory_from: int = _DEFAULTS.shared_memory_from,
        device_maps: dict[str, DeviceMap] | None = None,
        devices: list[Any] | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        self.num_worker_threads = num_worker_threads
        self.init_timeout = float(init_timeout)
        self.trust = trust
        self.transports = transports
        self.tls = tls
        self.bind_host = bind_host
        self.bind_port = bind_port
        self.limits = limits or Limits()
        self.shared_memory_from = shared_memory_from
        self.device_maps: dict[str, dict[torch.device, torch.device]] = {}
        self.devices: list[torch.device] = []
        for worker, device_map in (device_maps or {}).items():
            self.set_device_map(worker, device_map)
        self.set_devices(devices or [])

    def worker_config(self, token: bytes, bind_host: str) -> WorkerConfig:
        """Return the settings of one worker, whose address as seen from the meeting point is `bind_host`.

        Raises:
            ConfigurationError: A setting is wrong.
        """
        return WorkerConfig(
            num_worker_threads=self.num_worker_threads,
            rpc_timeout_s=self.rpc_timeout,
            trust=self.trust,
            transports=self.transports,
            bind_host=self.bind_host or bind_host,
            bind_port=self.bind_port,
            advertised_host=bind_host if self.bind_host in ("0.0.0.0", "::") else None,
            tls=self.tls,
            token=token,
            limits=self.limits,
            shared_memory_from=self.shared_memory_from,
            device_maps={
                to: {str(here): str(there) for here, there in devices.items()}
                for to, devices in self.device_maps.items()
            },
            devices=tuple(map(str, self.devices)),
        )

    def set_device_map(self, to: str, device_map: DeviceMap) -> None:
        """Add a map from devices of this worker to devices of worker `to`.

        Raises:
            ConfigurationError: A name is not a device, two devices are mapped to the same device, or a device is already
                mapped to another one.
        """
        known, more = self.device_maps.get(to, {}), read_device_map(to, device_map)
        for here, there in more.items():
            if known.get(here, there) != there:
                raise ConfigurationError(
                    f"`set_device_map` only supports 1-to-1 mapping: {here} cannot be both {there} and {known[here]} of {to}"
                )
        self.device_maps[to] = read_device_map(to, known | more)

    def set_devices(self, devices: list[Any]) -> None:
        """Set the devices that maps may name.

        Raises:
            ConfigurationError: An item does not name a single device.
        """
        self.devices = [read_device("the list of devices", device) for device in devices]


class TensorPipeRpcBackendOptions(RpcOptions):
    """Options with the signature of PyTorch's class of the same name. `_transports` and `_channels` are ignored."""

    def __init__(
        self, *, _transports: list[str] | None = None, _channels: list[str] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
