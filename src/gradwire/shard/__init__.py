"""Tensors divided among the ranks of a process group, or among RPC workers: PyTorch's ``torch.distributed._shard``."""

from __future__ import annotations

from gradwire.shard import sharded_tensor, sharding_spec
from gradwire.shard.creation import shard_tensor as _shard_tensor
from gradwire.shard.metadata import ShardMetadata
from gradwire.shard.sharded_tensor import (
    MEM_FORMAT_ENCODING,
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
)
from gradwire.shard.sharding_spec import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardingSpec,
)

__all__ = [
    "MEM_FORMAT_ENCODING",
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "PlacementSpec",
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "ShardingSpec",
    "TensorProperties",
    "_shard_tensor",
    "sharded_tensor",
    "sharding_spec",
]
