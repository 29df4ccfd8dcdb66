"""`torch.distributed.rpc` on gradwire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradwire import rpc

_PACKAGE = (
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "_get_current_rpc_agent",
    "_get_debug_info",
    "_is_current_rpc_agent_set",
    "_set_rpc_timeout",
    "enable_gil_profiling",
    "get_rpc_timeout",
    "init_rpc",
    "is_available",
)
_API = ("_all_gather", "_barrier", "_wait_all", "_wait_all_workers", "get_worker_info", "rpc_async", "rpc_sync", "shutdown")
_REGISTRY = (
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
)


def make_tables() -> dict[str, Mapping[str, Any]]:
    """By torch module, the values of its names."""
    return {
        "torch.distributed.rpc": {name: getattr(rpc, name) for name in _PACKAGE},
        "torch.distributed.rpc.api": {name: getattr(rpc, name) for name in _API},
        "torch.distributed.rpc.functions": {"async_execution": rpc.functions.async_execution},
        "torch.distributed.rpc.backend_registry": {name: getattr(rpc.backend_registry, name) for name in _REGISTRY},
    }
