"""Another layout for one rank's shard, without the sharded tensor it belongs to: PyTorch's private names.

`ShardedTensor.redistribute` is what people want.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradwire.shard.local_shards import init_from_local_tensor
from gradwire.shard.metadata import ShardMetadata, TensorProperties
from gradwire.shard.sharding_spec import ShardingSpec, as_placement
from gradwire.shard.shards import Shard


def get_idx_from_placements(placements: Sequence[Any], current_rank: int) -> int:
    """The position of a rank among placements.

    Raises:
        RuntimeError: It is not among them.
    """
    for position, placement in enumerate(placements):
        if as_placement(placement).rank() == current_rank:
            return position
    raise RuntimeError(
        f"current_rank not in the placement: rank {current_rank} is none of {list(map(str, placements))}"
    )


def build_reshard_metadata(
    st_size: torch.Size, sharding_spec: ShardingSpec, world_size: int
) -> tuple[list[ShardMetadata], list[int]]:
    """The shards of a tensor in the order of their ranks, and the ranks in the order of the spec.

    Raises:
        ValueError: A tensor of that size cannot be divided like this, or a rank is outside of the world.
    """
    shards = sharding_spec.build_metadata(torch.Size(st_size), TensorProperties()).shards_metadata
    ranks = []
    for item in shards:
        rank = item.placement.rank() if item.placement is not None else None
        if rank is None or not 0 <= rank < world_size:
            raise ValueError(f"placement {item.placement} is no rank of a world of {world_size}")
        ranks.append(rank)
    order = sorted(range(len(shards)), key=lambda number: ranks[number])
    return [shards[number] for number in order], ranks


def reshard_local_shard(
    local_tensor: torch.Tensor,
    st_size: torch.Size,
    sharding_spec: ShardingSpec,
    resharding_spec: ShardingSpec,
    pg: Any,
) -> tuple[list[Shard], list[ShardMetadata]]:
    """This rank's shards of another layout, and the metadata of all shards, by rank. Every rank must call it.

    Args:
        local_tensor: The shard that this rank has.
        st_size: Of the whole tensor.
        sharding_spec: How it is divided.
        resharding_spec: How it is to be divided.
        pg: The process group; None for the default one.

    Raises:
        ValueError: The tensor does not fit the spec, or one of the specs the size.
    """
    old = init_from_local_tensor(local_tensor, sharding_spec, *st_size, process_group=pg)
    new = old.redistribute(resharding_spec)
    new._order_by_rank()
    return new.local_shards(), new.metadata().shards_metadata


def reshuffle_local_shard(
    local_shard: torch.Tensor,
    st_size: torch.Size,
    sharding_spec: ShardingSpec,
    resharding_spec: ShardingSpec,
    pg: Any,
) -> tuple[list[Shard], list[ShardMetadata]]:
    """The same as `reshard_local_shard`; PyTorch has one for specs along the same dimension, and one for others."""
    return reshard_local_shard(local_shard, st_size, sharding_spec, resharding_spec, pg)
