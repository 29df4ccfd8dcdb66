"""Decorators for functions that other workers call: `expose` and `async_execution`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import torch
from msgspec import Meta

from gradwire.errors import ConfigurationError
from gradwire.types import is_class
from gradwire.wire.serialization import import_home, register_plain_class

F = TypeVar("F", bound=Callable[..., Any])

exposed: dict[str, Callable[..., Any]] = {}  # by exposed name
_names: dict[Callable[..., Any], str] = {}

ASYNC_MARK = "_wrapped_async_rpc_function"  # the attribute that torch's decorator of the same name sets, too


def expose(function: Any = None, *, name: str | None = None) -> Any:
    """Mark a function (or a dataclass, named tuple or enum that arguments may hold) as callable with ``trust="data"``.

    A module class can be exposed too: other workers may then create such modules here (`gradwire.nn.RemoteModule`).

    Args:
        function: The function or class.
        name: The name by which others call it; ``module:qualname`` if not given.

    Raises:
        ConfigurationError: The name is not valid or already taken, or the class is of another kind.
    """
    if function is None:
        return functools.partial(expose, name=name)
    if is_class(function) and not issubclass(function, torch.nn.Module):
        register_plain_class(function, name)
        return function
    public = name or f"{function.__module__}:{function.__qualname__}"
    if not public or public.startswith("~"):
        raise ConfigurationError(f"{public!r} is not a valid name for an exposed function")
    known = exposed.get(public)
    if known is not None and known is not function and not _is_redefinition(known, function):
        raise ConfigurationError(
            f"another function is already exposed as {public!r}; pass name= to choose a different name"
        )
    exposed[public] = function
    _names[function] = public
    return function


def _is_redefinition(known: Callable[..., Any], function: Callable[..., Any]) -> bool:
    """Return whether the function is the same one from a module or notebook cell that was run again."""
    return (known.__module__, known.__qualname__) == (function.__module__, function.__qualname__)


def exposed_function(name: str) -> Callable[..., Any] | None:
    """Return the function exposed under that name; gradwire's own functions are imported on first use."""
    function = exposed.get(name)
    return exposed.get(name) if function is None and import_home(name) else function


def exposed_name(function: Callable[..., Any]) -> str | None:
    """Return the name under which a function is exposed."""
    try:
        return _names.get(function)
    except TypeError:  # not hashable
        return None


def async_execution(function: F) -> F:
    """Mark a function that returns a `torch.futures.Future`: the caller receives the future's value once it is completed.

    The worker thread is free as soon as the function returns. On methods, apply this decorator before ``@staticmethod`` or
    ``@classmethod``, that is, below it.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    setattr(wrapper, ASYNC_MARK, function)
    return wrapper  # type: ignore[return-value]


class Later:
    """Returned by gradwire's own functions if their result is the value of a future."""

    __slots__ = ("future",)

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        self.future = future


def is_async_execution(function: Callable[..., Any]) -> bool:
    """Return whether the function was marked with `async_execution`."""
    return hasattr(function, ASYNC_MARK)


CallId = Annotated[int, Meta(ge=1, le=2**63 - 1)]

WorkerName = Annotated[str, Meta(min_length=1, max_length=1024)]
"""Long enough for any sensible `Limits.name_bytes`."""

Group = Annotated[list[WorkerName], Meta(min_length=1, max_length=65_536)]
"""Names of workers; there cannot be more ranks."""

Codec = Annotated[int, Meta(ge=0, le=5)]
"""How a packed value is encoded; see `gradwire.wire.serialization`."""

EncodedAddress = Annotated[bytes, Meta(max_length=32_768)]
"""For `gradwire.wire.messages.decode_address`."""

WorldSize = Annotated[int, Meta(ge=1, le=65_536)]
