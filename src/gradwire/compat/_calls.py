"""torch's `rpc_sync` and `rpc_async`: gradwire's, known to torch's profiler."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradwire import rpc
from gradwire.compat._profiling import ProfiledCall, is_profiling, run_profiled
from gradwire.errors import RpcTimeout, WorkerLost
from gradwire.rpc.futures import InterruptibleFuture
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
    func = by_name(func)
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
        CannotSend: An argument cannot travel.
        UnknownWorker: There is no such worker.
    """
    _check(func)
    func = by_name(func)
    if is_profiling():
        return _call_profiled("async", to, func, args, kwargs, timeout)
    try:
        return rpc.rpc_async(to, func, args, kwargs, timeout)
    except (RpcTimeout, WorkerLost) as error:  # with torch, whoever waits is told
        failed: InterruptibleFuture[Any] = InterruptibleFuture()
        failed.set_exception(error)
        return failed


def _check(function: object) -> None:
    if not callable(function):
        raise TypeError(f"function should be callable, unlike {function!r}")


def by_name(function: Function) -> Function:
    """The function itself; for one of TorchScript, which does not travel, another that finds it there by its name."""
    if not isinstance(function, torch.jit.ScriptFunction):
        return function
    return functools.partial(_run_script, torch._jit_internal._qualified_name(function))


def _run_script(name: str, *args: Any, **kwargs: Any) -> Any:
    module, _, attribute = name.removeprefix("__torch__.").rpartition(".")
    return getattr(importlib.import_module(module), attribute)(*args, **kwargs)


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
