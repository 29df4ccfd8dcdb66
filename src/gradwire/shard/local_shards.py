"""Sharded tensors of what each rank has already, and what is said of local shards: PyTorch's private names.

Programs that keep their shards themselves (embedding libraries, trainers) call these as class methods of `ShardedTensor`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from gradwire.shard.creation import (
    _agree,
    _size,
    find_problem,
    init_from_local_shards,
    init_from_local_shards_and_metadata,
)
from gradwire.shard.metadata import ShardedTensorMetadata, TensorProperties
from gradwire.shard.sharding_spec import ShardingSpec
from gradwire.shard.shards import Shard
from gradwire.shard.tensor import ShardedTensor


def init_from_local_tensor(
    local_tensor: torch.Tensor,
    sharding_spec: ShardingSpec,
    *global_size: Any,
    process_group: Any = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """A sharded tensor of the one shard that each rank has, by a spec that everybody knows: nobody asks anybody.

    A rank that has no shard in the spec passes a tensor, too; only its dtype and `requires_grad` count.

    Args:
        local_tensor: The shard of this rank; it is used, not copied.
        sharding_spec: How the whole is divided.
        global_size: Of the whole.
        process_group: None for the default group.
        init_rrefs: Whether ranks make references to their shards for each other.

    Raises:
        ValueError: The tensor is not contiguous, is not of the size that the spec says, or the spec does not fit the size.
    """
    if not local_tensor.is_contiguous():
        raise ValueError("local_tensor is not a contiguous Tensor; pass local_tensor.contiguous()")
    properties = TensorProperties.create_from_tensor(local_tensor)
    metadata = sharding_spec.build_metadata(_size(global_size), properties)
    rank = dist.get_rank()
    own = [item for item in metadata.shards_metadata if item.placement is not None and item.placement.rank() == rank]
    if len(own) > 1:
        raise ValueError(f"rank {rank} has {len(own)} shards in {sharding_spec}; use init_from_local_shards")
    shards = [Shard(local_tensor, item) for item in own]
    return init_from_local_shards_and_metadata(shards, metadata, process_group, init_rrefs, sharding_spec)


ShardedTensor._init_from_local_shards = staticmethod(init_from_local_shards)  # type: ignore[attr-defined]
ShardedTensor._init_from_local_tensor = staticmethod(init_from_local_tensor)  # type: ignore[attr-defined]
ShardedTensor._init_from_local_shards_and_global_metadata = staticmethod(init_from_local_shards_and_metadata)  # type: ignore[attr-defined]


# -- what is said of local shards ----------------------------------------------------------------------------------------


def build_metadata_from_local_shards(
    local_shards: Sequence[Shard], global_size: torch.Size, current_rank: int, pg: Any
) -> ShardedTensorMetadata:
    """What one rank can say of a tensor.

    Args:
        local_shards: Those of this rank; at least one.
        global_size: Of the whole.
        current_rank: This process, among all.
        pg: Its process group.

    Raises:
        AssertionError: There are no shards.
        ValueError: They are not of one kind, or not this rank's.
    """
    if not local_shards:
        raise AssertionError("must have local shards!")
    first = TensorProperties.create_from_tensor(local_shards[0].tensor)
    for shard in local_shards:
        found = TensorProperties.create_from_tensor(shard.tensor)
        problem = find_problem(shard, current_rank)
        if not problem and found != first:
            problem = f"local shards of rank:{current_rank} differ: one is {first}, another {found}"
        if problem:
            raise ValueError(problem)
    return ShardedTensorMetadata([shard.metadata for shard in local_shards], torch.Size(global_size), first)


def build_global_metadata(
    gathered_metadatas: Sequence[ShardedTensorMetadata | None], recalc_metadata: bool = False
) -> ShardedTensorMetadata:
    """What all ranks together say of a tensor.

    Args:
        gathered_metadatas: What each says, in order; None of ranks that have no shards.
        recalc_metadata: Whether ranks have consecutive rows, and their offsets are still to be found.

    Raises:
        ValueError: They contradict each other, or do not make up the tensor.
    """
    told = [copy.deepcopy(item) for item in gathered_metadatas if item is not None]
    if not told:
        raise ValueError("ShardedTensor have no local shards on all ranks!")
    if recalc_metadata:
        everything = replace(told[0], shards_metadata=[shard for item in told for shard in item.shards_metadata])
        recalc_global_sharded_tensor_metadata(everything, 0)
        for item in told:  # they share their shards with it
            item.size = everything.size
    return _agree(
        [(list(item.size), [(shard, item.tensor_properties) for shard in item.shards_metadata]) for item in told]
    )


def recalc_global_sharded_tensor_metadata(
    global_sharded_tensor_metadata: ShardedTensorMetadata, sharded_dim: int
) -> None:
    """Finds offsets and size, in place, of shards that lie one after the other along a dimension, in the order of ranks.

    Raises:
        AssertionError: A shard names no rank.
    """
    shards = global_sharded_tensor_metadata.shards_metadata
    if any(shard.placement is None or shard.placement.rank() is None for shard in shards):
        raise AssertionError("every shard must say which rank has it")
    start = 0
    for shard in sorted(shards, key=lambda item: item.placement.rank()):  # type: ignore[union-attr, arg-type, return-value]
        shard.shard_offsets = [start if dim == sharded_dim else 0 for dim in range(len(shard.shard_sizes))]
        start += shard.shard_sizes[sharded_dim]
    sizes = shards[0].shard_sizes
    global_sharded_tensor_metadata.size = torch.Size(
        [start if dim == sharded_dim else sizes[dim] for dim in range(len(sizes))]
    )
