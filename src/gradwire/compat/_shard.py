"""`torch.distributed._shard` on gradwire.

torch's own users of these names (``torch.distributed.checkpoint``, the state dicts of FSDP) get gradwire's classes, too, so
that what they make and what they look for are of one kind.
"""

from __future__ import annotations

import importlib

from gradwire.compat._patching import Table

_NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "_utils": ("_narrowing", ("narrow_tensor", "narrow_tensor_by_index")),
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
        "reshard",
        ("build_reshard_metadata", "get_idx_from_placements", "reshard_local_shard", "reshuffle_local_shard"),
    ),
    "sharded_tensor.shard": ("sharded_tensor", ("Shard",)),
    "sharded_tensor.utils": (
        "local_shards",
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


def make_table() -> Table:
    """The names of the package and all of its modules.

    They are changed together, once torch has imported all of them: its modules use each other's names on the way, to derive
    classes and to register operations, and those must stay torch's.
    """
    return {
        f"{path}.{name}": getattr(importlib.import_module(f"gradwire.shard.{source}"), name)
        for path, (source, names) in _NAMES.items()
        for name in names
    }


def make_optimizer_table() -> Table:
    """The names of ``sharded_optim``, which the package does not import."""
    from gradwire.shard import sharded_optim

    return {
        "api.ShardedOptimizer": sharded_optim.ShardedOptimizer,
        "named_params_with_sharded_tensor": sharded_optim.named_params_with_sharded_tensor,
    }
