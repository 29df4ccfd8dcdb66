"""Calls to other workers, with the API of `torch.distributed.rpc`.

from gradwire import rpc

rpc.init_rpc("worker0", rank=0, world_size=2)
total = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
rpc.shutdown()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gradwire.rpc import backend_registry, functions
from gradwire.rpc.agent import Agent, AgentStatistics
from gradwire.rpc.api import (
    _all_gather,
    _barrier,
    _get_current_rpc_agent,
    _get_debug_info,
    _is_current_rpc_agent_set,
    _set_rpc_timeout,
    _wait_all,
    _wait_all_workers,
    barrier,
    current_agent,
    enable_gil_profiling,
    get_rpc_timeout,
    get_worker_info,
    init_rpc,
    is_available,
    rpc_async,
    rpc_sync,
    set_current_agent,
    shutdown,
    start_serving,
)
from gradwire.rpc.backend_registry import BackendType
from gradwire.rpc.functions import expose
from gradwire.rpc.futures import CallFuture
from gradwire.rpc.interceptors import Envelope, Interceptor
from gradwire.rpc.options import (
    DEFAULT_INIT_METHOD,
    DEFAULT_INIT_TIMEOUT_SEC,
    DEFAULT_NUM_WORKER_THREADS,
    DEFAULT_RPC_TIMEOUT_SEC,
    DEFAULT_SHUTDOWN_TIMEOUT,
    UNSET_RPC_TIMEOUT,
    RpcBackendOptions,
    RpcOptions,
    TensorPipeRpcBackendOptions,
)
from gradwire.types import WorkerInfo

if TYPE_CHECKING:  # defined by a layer above, and imported when they are used
    from gradwire.rref import PyRRef, RRef, remote

__all__ = [
    "DEFAULT_INIT_METHOD",
    "DEFAULT_INIT_TIMEOUT_SEC",
    "DEFAULT_NUM_WORKER_THREADS",
    "DEFAULT_RPC_TIMEOUT_SEC",
    "DEFAULT_SHUTDOWN_TIMEOUT",
    "UNSET_RPC_TIMEOUT",
    "Agent",
    "AgentStatistics",
    "BackendType",
    "CallFuture",
    "Envelope",
    "Interceptor",
    "PyRRef",
    "RRef",
    "RpcBackendOptions",
    "RpcOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "_all_gather",
    "_barrier",
    "_get_current_rpc_agent",
    "_get_debug_info",
    "_is_current_rpc_agent_set",
    "_set_rpc_timeout",
    "_wait_all",
    "_wait_all_workers",
    "backend_registry",
    "barrier",
    "current_agent",
    "enable_gil_profiling",
    "expose",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "remote",
    "rpc_async",
    "rpc_sync",
    "set_current_agent",
    "shutdown",
    "start_serving",
]


def __getattr__(name: str) -> Any:
    if name in ("PyRRef", "RRef", "remote"):
        value = globals()[name] = getattr(importlib.import_module("gradwire.rref"), name)
        return value
    raise AttributeError(f"module 'gradwire.rpc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
