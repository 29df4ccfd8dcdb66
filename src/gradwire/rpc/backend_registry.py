"""Backends by name, as `torch.distributed.rpc.backend_registry` has them.

gradwire has one way to carry calls, which chooses its transports by itself, so there is one backend. It answers to
PyTorch's name, too. Others can be registered by programs that bring their own options.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from gradwire.errors import ConfigurationError
from gradwire.rpc.options import (
    DEFAULT_INIT_METHOD,
    DEFAULT_RPC_TIMEOUT_SEC,
    RpcBackendOptions,
    RpcOptions,
    TensorPipeRpcBackendOptions,
)


class BackendValue(NamedTuple):
    """How to make a backend's options, and how to start it."""

    construct_rpc_backend_options_handler: Callable[..., RpcBackendOptions]
    init_backend_handler: Callable[..., Any]


class BackendType(enum.Enum):
    """The backends there are. `register_backend` keeps further ones beside it."""

    GRADWIRE = "GRADWIRE"
    TENSORPIPE = "TENSORPIPE"


def _init(name: str, rank: int = -1, world_size: int | None = None, rpc_backend_options: Any = None, **_: Any) -> Any:
    from gradwire.rpc import api

    api.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=rpc_backend_options)
    return api.current_agent()


_values: dict[str, BackendValue] = {
    "GRADWIRE": BackendValue(RpcOptions, _init),
    "TENSORPIPE": BackendValue(TensorPipeRpcBackendOptions, _init),
}


def name_of(backend: Any) -> str:
    """The name of a backend.

    Raises:
        ConfigurationError: No such backend.
    """
    name = backend.name if isinstance(backend, enum.Enum) else str(backend)
    if name not in _values:
        raise ConfigurationError(f"no backend {name!r}; there are {', '.join(_values)}")
    return name


def backend_registered(backend_name: str) -> bool:
    """Whether a backend of that name is known."""
    return backend_name in _values


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., RpcBackendOptions],
    init_backend_handler: Callable[..., Any],
) -> str:
    """Makes a further backend known.

    Raises:
        RuntimeError: The name is taken.
    """
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    _values[backend_name] = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    return backend_name


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> RpcBackendOptions:
    """Options for a backend.

    Raises:
        ConfigurationError: No such backend.
    """
    make = _values[name_of(backend)].construct_rpc_backend_options_handler
    return make(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Starts a backend; returns its agent.

    Raises:
        ConfigurationError: No such backend.
    """
    return _values[name_of(backend)].init_backend_handler(*args, **kwargs)
