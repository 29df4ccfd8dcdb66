"""Registry of backends by name, like `torch.distributed.rpc.backend_registry`.

gradwire has a single backend, which chooses its transports itself. It is also registered under PyTorch's name. Programs can
register others with their own options.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

from gradwire.errors import ConfigurationError
from gradwire.rpc.options import (
    DEFAULT_INIT_METHOD,
    DEFAULT_RPC_TIMEOUT_SEC,
    RpcBackendOptions,
    RpcOptions,
    TensorPipeRpcBackendOptions,
)


class BackendValue(NamedTuple):
    """Functions that make a backend's options and start the backend."""

    construct_rpc_backend_options_handler: Callable[..., RpcBackendOptions]
    init_backend_handler: Callable[..., Any]


class _Members(type):
    """Make a class behave like an enumeration to which members can be added later."""

    __members__: dict[str, BackendType]

    def __getitem__(cls, name: str) -> BackendType:
        return cls.__members__[name]

    def __iter__(cls) -> Iterator[BackendType]:
        return iter(list(cls.__members__.values()))

    def __len__(cls) -> int:
        return len(cls.__members__)


class BackendType(metaclass=_Members):
    """Enumeration of the backends; `register_backend` adds to it.

    Attributes:
        name: Name of the backend.
        value: Its functions.
    """

    __members__: ClassVar[dict[str, BackendType]] = {}
    GRADWIRE: ClassVar[BackendType]
    TENSORPIPE: ClassVar[BackendType]

    def __init__(self, name: str, value: BackendValue) -> None:
        self.name = name
        self.value = value
        self.__members__[name] = self
        setattr(BackendType, name, self)

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, (BackendType, self.name)


def _init(name: str, rank: int = -1, world_size: int | None = None, rpc_backend_options: Any = None, **_: Any) -> Any:
    from gradwire.rpc import api

    api.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=rpc_backend_options)
    return api.current_agent()


BackendType("GRADWIRE", BackendValue(RpcOptions, _init))
BackendType("TENSORPIPE", BackendValue(TensorPipeRpcBackendOptions, _init))


def find_backend(backend: Any) -> BackendType:
    """Return a backend by name, or by the name of a member of another enumeration such as torch's.

    Raises:
        ConfigurationError: There is no such backend.
    """
    if isinstance(backend, BackendType):
        return backend
    name = getattr(backend, "name", backend)
    if name not in BackendType.__members__:
        raise ConfigurationError(f"unknown RPC backend {name!r}; known backends: {', '.join(BackendType.__members__)}")
    return BackendType[name]


def backend_registered(backend_name: str) -> bool:
    """Return whether a backend of that name is registered."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., RpcBackendOptions],
    init_backend_handler: Callable[..., Any],
) -> BackendType:
    """Register another backend.

    Raises:
        RuntimeError: The name is taken.
    """
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    return BackendType(backend_name, BackendValue(construct_rpc_backend_options_handler, init_backend_handler))


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> RpcBackendOptions:
    """Return options for a backend.

    Raises:
        ConfigurationError: There is no such backend.
    """
    make = find_backend(backend).value.construct_rpc_backend_options_handler
    return make(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Start a backend; return its agent.

    Raises:
        ConfigurationError: There is no such backend.
    """
    return find_backend(backend).value.init_backend_handler(*args, **kwargs)
