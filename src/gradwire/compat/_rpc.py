"""`torch.distributed.rpc` and its submodules on gradwire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradwire import rpc, rref
from gradwire.compat import _agent, _calls, _rref, _start

_SAME = (
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "_is_current_rpc_agent_set",
    "_set_rpc_timeout",
    "enable_gil_profiling",
    "get_rpc_timeout",
    "is_available",
)
_SAME_API = ("_all_gather", "_barrier", "_wait_all", "get_worker_info")
_SAME_REGISTRY = (
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
)


def make_package_table() -> Mapping[str, Any]:
    """The names of ``torch.distributed.rpc``."""
    return {
        **{name: getattr(rpc, name) for name in _SAME},
        "PyRRef": rref.RRef,
        "RpcAgent": _agent.RpcAgent,
        "TensorPipeAgent": _agent.TensorPipeAgent,
        "WorkerInfo": _agent.WorkerInfo,
        "_delete_all_user_and_unforked_owner_rrefs": _rref.delete_all,
        "_get_current_rpc_agent": _agent.current_agent,
        "_get_debug_info": _agent.get_debug_info,
        "_init_rpc_backend": _start._init_rpc_backend,
        "_reset_current_rpc_agent": _start._reset_current_rpc_agent,
        "_rref_context_get_debug_info": _rref.get_debug_info,
        "_set_and_start_rpc_agent": _start._set_and_start_rpc_agent,
        "init_rpc": _start.init_rpc,
    }


def make_api_table() -> Mapping[str, Any]:
    """The names of ``torch.distributed.rpc.api``."""
    return {
        **{name: getattr(rpc, name) for name in _SAME_API},
        "RRef": rref.RRef,
        "_thread_local_var": rpc.api._thread_local_var,
        "_wait_all_workers": _start._wait_all_workers,
        "remote": _rref.remote,
        "rpc_async": _calls.rpc_async,
        "rpc_sync": _calls.rpc_sync,
        "shutdown": _start.shutdown,
    }


def make_functions_table() -> Mapping[str, Any]:
    """The names of ``torch.distributed.rpc.functions``."""
    return {"async_execution": rpc.functions.async_execution}


def make_registry_table() -> Mapping[str, Any]:
    """The names of ``torch.distributed.rpc.backend_registry``."""
    return {name: getattr(rpc.backend_registry, name) for name in _SAME_REGISTRY}
