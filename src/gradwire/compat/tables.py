"""Which names of which torch modules gradwire answers for.

One line for each torch module, with the function that makes its table. The function is called when a program has imported
the module, so what only this table needs (`gradwire.optim`, say) is imported inside the function. A name is listed at the
module that people find it in; wherever else the same object is bound (torch's submodules, its C modules, programs),
`_patching` finds it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd import profiler_legacy

from gradwire import autograd, rpc, rref
from gradwire.autograd.functions import RecvFunction, SendFunction
from gradwire.compat import profiler as _calls
from gradwire.compat import profiler as _profiling
from gradwire.compat import rref as _rref
from gradwire.compat import start as _agent
from gradwire.compat import start as _start
from gradwire.compat.patching import MakeTable, Patch, Table
from gradwire.rpc.futures import InterruptibleFuture
from gradwire.rref import RRef

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


_SAME_IN_AUTOGRAD = (
    "DistAutogradContext",
    "_current_context",
    "_get_debug_info",
    "_get_max_id",
    "_is_valid_context",
    "_new_context",
    "_release_context",
    "_retrieve_context",
    "context",
    "get_gradients",
    "is_available",
)
_SPACE = "torch::distributed::autograd::"


def _init(worker_id: int) -> None:
    """Every worker of gradwire has its autograd from the start."""


def backward(context_id: Any, roots: Any, retain_graph: bool = False) -> None:
    """As `gradwire.autograd.backward`, with torch's event for the profiler and its check of types.

    Raises:
        TypeError: An argument is of another type.
        AutogradError: A root cannot be one.
        UnknownContext: The context was released, or never existed here.
        BackwardFailed: Something failed on this or another worker.
    """
    if not isinstance(context_id, int) or not isinstance(roots, Sequence | torch.Tensor):
        raise TypeError(
            f"backward(): incompatible function arguments: it takes a context id and a list of tensors, not "
            f"{type(context_id).__name__} and {type(roots).__name__}"
        )
    with torch.autograd.profiler.record_function(f"{_SPACE}backward"):
        autograd.backward(context_id, roots, retain_graph)


def make_autograd_table() -> Mapping[str, Any]:
    """The names of ``torch.distributed.autograd``."""
    same = {name: getattr(autograd, name) for name in _SAME_IN_AUTOGRAD}
    return {**same, "_init": _init, "backward": backward}


def make_node_names() -> dict[type, str]:
    """The nodes of the local graph, and what torch calls them."""
    kinds: dict[Any, str] = {SendFunction: "SendRpcBackward", RecvFunction: "RecvRpcBackward"}
    return {kind._backward_cls: f"{_SPACE}{name}" for kind, name in kinds.items()}


def make_optimizer_table() -> Mapping[str, Any]:
    """The names of ``torch.distributed.optim.optimizer``."""
    from gradwire import optim

    return {"DistributedOptimizer": optim.DistributedOptimizer}


def make_remote_module_table() -> Mapping[str, Any]:
    """The names of ``torch.distributed.nn.api.remote_module``."""
    from gradwire import nn

    return {"RemoteModule": nn.RemoteModule, "_RemoteModule": nn.RemoteModule}


_NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "_utils": ("metadata", ("narrow_tensor", "narrow_tensor_by_index")),
    "metadata": ("metadata", ("ShardMetadata",)),
    "sharder": ("sharder", ("Sharder",)),
    "sharding_plan.api": ("sharding_plan", ("ShardingPlan", "ShardingPlanner")),
    "sharding_spec.api": (
        "sharding_spec",
        (
            "DevicePlacementSpec",
            "EnumerableShardingSpec",
            "PlacementSpec",
            "ShardingSpec",
            "_infer_sharding_spec_from_shards_metadata",
            "custom_sharding_spec_op",
        ),
    ),
    "sharding_spec.chunk_sharding_spec": ("sharding_spec", ("ChunkShardingSpec",)),
    "sharding_spec._internals": (
        "sharding_spec",
        (
            "check_tensor",
            "get_chunk_sharding_params",
            "get_chunked_dim_size",
            "get_split_size",
            "validate_non_overlapping_shards_metadata",
        ),
    ),
    "sharded_tensor": (
        "sharded_tensor",
        (
            "_sharded_op_impl",
            "custom_sharded_op_impl",
            "empty",
            "full",
            "init_from_local_shards",
            "ones",
            "pre_load_state_dict_hook",
            "rand",
            "randn",
            "state_dict_hook",
            "zeros",
        ),
    ),
    "sharded_tensor.api": (
        "sharded_tensor",
        ("ShardedTensor", "ShardedTensorBase", "_create_tensor_from_params"),
    ),
    "sharded_tensor.metadata": ("metadata", ("MEM_FORMAT_ENCODING", "ShardedTensorMetadata", "TensorProperties")),
    "sharded_tensor.reshard": (
        "creation",
        ("build_reshard_metadata", "get_idx_from_placements", "reshard_local_shard", "reshuffle_local_shard"),
    ),
    "sharded_tensor.shard": ("sharded_tensor", ("Shard",)),
    "sharded_tensor.utils": (
        "creation",
        (
            "_parse_and_validate_remote_device",
            "build_global_metadata",
            "build_metadata_from_local_shards",
            "recalc_global_sharded_tensor_metadata",
        ),
    ),
    "api": (
        "api",
        (
            "_collect_local_shard",
            "_get_current_process_group",
            "_reshard_output",
            "_shard_tensor",
            "load_with_process_group",
            "shard_module",
            "shard_parameter",
        ),
    ),
}
"""By module of torch, the module of gradwire that has its names."""


def make_shard_table() -> Table:
    """The names of the package and all of its modules.

    They are changed together, once torch has imported all of them: its modules use each other's names on the way, to derive
    classes and to register operations, and those must stay torch's.
    """
    return {
        f"{path}.{name}": getattr(importlib.import_module(f"gradwire.shard.{source}"), name)
        for path, (source, names) in _NAMES.items()
        for name in names
    }


def make_sharded_optimizer_table() -> Table:
    """The names of ``sharded_optim``, which the package does not import."""
    from gradwire.shard import sharded_optim

    return {
        "api.ShardedOptimizer": sharded_optim.ShardedOptimizer,
        "named_params_with_sharded_tensor": sharded_optim.named_params_with_sharded_tensor,
    }


def wait_all(futures: Sequence[torch.futures.Future[Any]]) -> list[Any]:
    """The values of all futures, in their order.

    Raises:
        Exception: What one of them ended with, at once; the others are not waited for.
    """
    gathered = _gather(futures)
    failed = gathered.wait()
    return [torch._C.Future.wait(future) for future in ([failed] if failed is not None else futures)]


def _gather(futures: Sequence[torch.futures.Future[Any]]) -> InterruptibleFuture[Any]:
    """A future for the first one that failed; None if all are done and none has."""
    outcome: InterruptibleFuture[Any] = InterruptibleFuture()
    left = list(futures)  # a removal from a list is one step, so no lock is needed

    def on_done(future: torch.futures.Future[Any]) -> None:
        try:
            torch._C.Future.wait(future)
        except Exception:
            _complete(outcome, future)
        left.pop()
        if not left:
            _complete(outcome, None)

    for future in futures:
        torch._C.Future.add_done_callback(future, on_done)
    if not futures:
        _complete(outcome, None)
    return outcome


def _complete(outcome: InterruptibleFuture[Any], value: Any) -> None:
    if not outcome.done():
        try:
            outcome.set_result(value)
        except RuntimeError:  # another thread was faster
            return


def make_futures_table() -> Mapping[str, Any]:
    """The names of ``torch.futures``."""
    return {"wait_all": wait_all}


MODULES: dict[str, MakeTable] = {
    "torch.distributed.rpc": make_package_table,
    "torch.distributed.rpc.api": make_api_table,
    "torch.distributed.rpc.functions": make_functions_table,
    "torch.distributed.rpc.backend_registry": make_registry_table,
    "torch.distributed.autograd": make_autograd_table,
    "torch.distributed.optim.optimizer": make_optimizer_table,
    "torch.distributed.nn.api.remote_module": make_remote_module_table,
    "torch.futures": make_futures_table,
    "torch.distributed._shard": make_shard_table,
    "torch.distributed._shard.sharded_optim": make_sharded_optimizer_table,
}


def make_patch() -> Patch:
    """Replace the names of all modules that are imported, and see to the others when they are.

    Raises:
        RuntimeError: torch's own rpc is running in this process.
    """
    _check_quiet()
    return Patch(MODULES, _make_class_tables())


def _make_class_tables() -> dict[type, Table]:
    return {
        RRef: _rref.METHODS,
        profiler_legacy.profile: {"__enter__": _profiling.enter, "__exit__": _profiling.leave},
        **{kind: {"__name__": name} for kind, name in make_node_names().items()},
    }


def _check_quiet() -> None:
    inner = importlib.import_module("torch._C._distributed_rpc")
    if inner._is_current_rpc_agent_set():
        raise RuntimeError(
            "torch's own rpc is running in this process; call torch.distributed.rpc.shutdown() before compat.install()"
        )
