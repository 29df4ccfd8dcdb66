"""The names of torch modules that gradwire replaces.

A name is listed at its public module; other bindings of the same object (in torch's submodules, C modules, programs)
are found by `gradwire.compat.patching`. The modules of gradwire behind the names of a torch module are imported when a
program has imported that module.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping

from torch.autograd import profiler_legacy

from gradwire._torch import backward_class, distributed_rpc
from gradwire.autograd.functions import RecvFunction, SendFunction
from gradwire.compat import profiler
from gradwire.compat.patching import Patch, Table
from gradwire.compat.torch_api import AUTOGRAD_NAMESPACE, RREF_METHODS
from gradwire.rref import RRef

Sources = Mapping[str, tuple[str, ...]]
"""By module of gradwire, the names that it provides for a torch module; ``"api.f"`` is ``f`` of submodule ``api``."""

NAMES: dict[str, Sources] = {
    "torch.distributed.rpc": {
        "gradwire.rpc": (
            "RpcBackendOptions",
            "TensorPipeRpcBackendOptions",
            "_is_current_rpc_agent_set",
            "_set_rpc_timeout",
            "enable_gil_profiling",
            "get_rpc_timeout",
            "is_available",
        ),
        "gradwire.rref": ("PyRRef",),
        "gradwire.compat.torch_api": (
            "RpcAgent",
            "TensorPipeAgent",
            "WorkerInfo",
            "_delete_all_user_and_unforked_owner_rrefs",
            "_get_current_rpc_agent",
            "_get_debug_info",
            "_init_rpc_backend",
            "_reset_current_rpc_agent",
            "_rref_context_get_debug_info",
            "_set_and_start_rpc_agent",
            "init_rpc",
        ),
    },
    "torch.distributed.rpc.api": {
        "gradwire.rpc": ("_all_gather", "_barrier", "_wait_all", "_wait_all_workers", "get_worker_info"),
        "gradwire.rpc.api": ("_thread_local_var",),
        "gradwire.rref": ("RRef",),
        "gradwire.compat.torch_api": ("remote", "rpc_async", "rpc_sync", "shutdown"),
    },
    "torch.distributed.rpc.functions": {"gradwire.rpc.functions": ("async_execution",)},
    "torch.distributed.rpc.backend_registry": {
        "gradwire.rpc.backend_registry": (
            "BackendType",
            "BackendValue",
            "backend_registered",
            "construct_rpc_backend_options",
            "init_backend",
            "register_backend",
        ),
    },
    "torch.distributed.autograd": {
        "gradwire.autograd": (
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
        ),
        "gradwire.compat.torch_api": ("_init", "backward"),
    },
    "torch.distributed.optim.optimizer": {"gradwire.optim": ("DistributedOptimizer",)},
    "torch.distributed.nn.api.remote_module": {"gradwire.nn": ("RemoteModule", "_RemoteModule")},
    "torch.futures": {"gradwire.compat.torch_api": ("wait_all",)},
    # Changed together, once torch has imported all of the package: its modules use each other's names on the way, to derive
    # classes and to register operations, and those must stay torch's.
    "torch.distributed._shard": {
        "gradwire.shard.api": (
            "api._collect_local_shard",
            "api._get_current_process_group",
            "api._reshard_output",
            "api._shard_tensor",
            "api.load_with_process_group",
            "api.shard_module",
            "api.shard_parameter",
        ),
        "gradwire.shard.creation": (
            "sharded_tensor.reshard.build_reshard_metadata",
            "sharded_tensor.reshard.get_idx_from_placements",
            "sharded_tensor.reshard.reshard_local_shard",
            "sharded_tensor.reshard.reshuffle_local_shard",
            "sharded_tensor.utils._parse_and_validate_remote_device",
            "sharded_tensor.utils.build_global_metadata",
            "sharded_tensor.utils.build_metadata_from_local_shards",
            "sharded_tensor.utils.recalc_global_sharded_tensor_metadata",
        ),
        "gradwire.shard.metadata": (
            "_utils.narrow_tensor",
            "_utils.narrow_tensor_by_index",
            "metadata.ShardMetadata",
            "sharded_tensor.metadata.MEM_FORMAT_ENCODING",
            "sharded_tensor.metadata.ShardedTensorMetadata",
            "sharded_tensor.metadata.TensorProperties",
        ),
        "gradwire.shard.sharded_tensor": (
            "sharded_tensor._sharded_op_impl",
            "sharded_tensor.api.ShardedTensor",
            "sharded_tensor.api.ShardedTensorBase",
            "sharded_tensor.api._create_tensor_from_params",
            "sharded_tensor.custom_sharded_op_impl",
            "sharded_tensor.empty",
            "sharded_tensor.full",
            "sharded_tensor.init_from_local_shards",
            "sharded_tensor.ones",
            "sharded_tensor.pre_load_state_dict_hook",
            "sharded_tensor.rand",
            "sharded_tensor.randn",
            "sharded_tensor.shard.Shard",
            "sharded_tensor.state_dict_hook",
            "sharded_tensor.zeros",
        ),
        "gradwire.shard.sharder": ("sharder.Sharder",),
        "gradwire.shard.sharding_plan": ("sharding_plan.api.ShardingPlan", "sharding_plan.api.ShardingPlanner"),
        "gradwire.shard.sharding_spec": (
            "sharding_spec._internals.check_tensor",
            "sharding_spec._internals.get_chunk_sharding_params",
            "sharding_spec._internals.get_chunked_dim_size",
            "sharding_spec._internals.get_split_size",
            "sharding_spec._internals.validate_non_overlapping_shards_metadata",
            "sharding_spec.api.DevicePlacementSpec",
            "sharding_spec.api.EnumerableShardingSpec",
            "sharding_spec.api.PlacementSpec",
            "sharding_spec.api.ShardingSpec",
            "sharding_spec.api._infer_sharding_spec_from_shards_metadata",
            "sharding_spec.api.custom_sharding_spec_op",
            "sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
        ),
    },
    "torch.distributed._shard.sharded_optim": {
        "gradwire.shard.sharded_optim": ("api.ShardedOptimizer", "named_params_with_sharded_tensor"),
    },
}
_OTHER_NAMES = {"_RemoteModule": "RemoteModule"}  # what gradwire calls them


def make_patch() -> Patch:
    """Replace the names of all imported modules, and those of others when they are imported."""
    if distributed_rpc()._is_current_rpc_agent_set():
        raise RuntimeError(
            "torch's own rpc is running in this process; call torch.distributed.rpc.shutdown() before compat.install()"
        )
    tables = {module: functools.partial(_make_table, sources) for module, sources in NAMES.items()}
    classes: dict[type, Table] = {
        RRef: RREF_METHODS,
        profiler_legacy.profile: {"__enter__": profiler.enter, "__exit__": profiler.leave},
        backward_class(SendFunction): {"__name__": f"{AUTOGRAD_NAMESPACE}SendRpcBackward"},
        backward_class(RecvFunction): {"__name__": f"{AUTOGRAD_NAMESPACE}RecvRpcBackward"},
    }
    return Patch(tables, classes)


def _make_table(sources: Sources) -> Table:
    table = {}
    for source, paths in sources.items():
        module = importlib.import_module(source)
        for path in paths:
            name = path.rpartition(".")[2]
            table[path] = getattr(module, _OTHER_NAMES.get(name, name))
    return table
