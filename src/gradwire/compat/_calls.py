"""torch's `rpc_sync` and `rpc_async`: gradwire's, known to torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradwire import rpc
from gradwire.compat._profiling import ProfiledCall, is_profiling, run_profiled
from gradwire.rpc.peer_table import To

Function = Callable[..., Any]


def rpc_sync(
    to: To,
    func: Function,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = rpc.UNSET_RPC_TIMEOUT,
) -> Any:
    """As `gradwire.rpc.rpc_sync`.

    Raises:
        TypeError: The function cannot be called.
        RpcError: The call failed.
        Exception: What the function raised, as its own type.
    """
    _check(func)
    if is_profiling():
        return _call_profiled("sync", to, func, args, kwargs, timeout).wait()
    return rpc.rpc_sync(to, func, args, kwargs, timeout)


def rpc_async(
    to: To,
    func: Function,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = rpc.UNSET_RPC_TIMEOUT,
) -> torch.futures.Future[Any]:
    """As `gradwire.rpc.rpc_async`.

    Raises:
        TypeError: The function cannot be called.
        RpcError: The call could not be made.
    """
    _check(func)
    if is_profiling():
        return _call_profiled("async", to, func, args, kwargs, timeout)
    return rpc.rpc_async(to, func, args, kwargs, timeout)


def _check(function: object) -> None:
    if not callable(function):
        raise TypeError(f"function should be callable, unlike {function!r}")


def _call_profiled(
    mode: str,
    to: To,
    function: Function,
    args: Sequence[Any] | None,
    kwargs: dict[str, Any] | None,
    timeout: float,
) -> torch.futures.Future[Any]:
    call = ProfiledCall(mode, to, function)
    return call.follow(rpc.rpc_async(to, run_profiled, call.arguments(args or (), kwargs), timeout=timeout))
