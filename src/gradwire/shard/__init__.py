"""Tensors that are divided among workers: how they are divided, and what is known of the parts."""

from __future__ import annotations

from gradwire.shard.metadata import MEM_FORMAT_ENCODING, ShardedTensorMetadata, ShardMetadata, TensorProperties
from gradwire.shard.specs import (
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
    "ShardMetadata",
    "ShardedTensorMetadata",
    "ShardingSpec",
    "TensorProperties",
]
