"""Tensors sharded over the ranks of a process group, or over RPC workers: the API of ``torch.distributed._shard``."""

from __future__ import annotations

from gradwire.shard import api, sharded_optim, sharded_tensor, sharder, sharding_plan, sharding_spec
from gradwire.shard import metadata as _utils
from gradwire.shard.api import _shard_tensor, load_with_process_group, shard_module, shard_parameter
from gradwire.shard.dtensor import from_dtensor, to_dtensor
from gradwire.shard.grad_clip import clip_grad_norm_, clip_grad_value_
from gradwire.shard.metadata import ShardMetadata
from gradwire.shard.sharded_optim import ShardedOptimizer, named_params_with_sharded_tensor
from gradwire.shard.sharded_tensor import (
    MEM_FORMAT_ENCODING,
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
)
from gradwire.shard.sharder import Sharder
from gradwire.shard.sharding_plan import BalancedPlanner, ShardingPlan, ShardingPlanner
from gradwire.shard.sharding_spec import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardingSpec,
)

__all__ = [
    "MEM_FORMAT_ENCODING",
    "BalancedPlanner",
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "PlacementSpec",
    "Shard",
    "ShardMetadata",
    "ShardedOptimizer",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "Sharder",
    "ShardingPlan",
    "ShardingPlanner",
    "ShardingSpec",
    "TensorProperties",
    "_shard_tensor",
    "_utils",
    "api",
    "clip_grad_norm_",
    "clip_grad_value_",
    "from_dtensor",
    "load_with_process_group",
    "named_params_with_sharded_tensor",
    "shard_module",
    "shard_parameter",
    "sharded_optim",
    "sharded_tensor",
    "sharder",
    "sharding_plan",
    "sharding_spec",
    "to_dtensor",
]
