"""Layouts of one rank's shard, without a process group."""

from __future__ import annotations

import pytest
import torch

from gradwire.shard import ChunkShardingSpec, ShardMetadata
from gradwire.shard.sharded_tensor import reshard

SPEC = ChunkShardingSpec(0, ["rank:2/cpu", "rank:0/cpu", "rank:1/cpu"])


def test_position_of_a_rank() -> None:
    assert [reshard.get_idx_from_placements(SPEC.placements, rank) for rank in range(3)] == [1, 2, 0]
    with pytest.raises(RuntimeError, match="current_rank not in the placement"):
        reshard.get_idx_from_placements(SPEC.placements, 3)


def test_shards_in_the_order_of_ranks() -> None:
    shards, ranks = reshard.build_reshard_metadata(torch.Size([7, 2]), SPEC, 3)
    assert ranks == [2, 0, 1]
    assert shards == [
        ShardMetadata([3, 0], [3, 2], "rank:0/cpu"),
        ShardMetadata([6, 0], [1, 2], "rank:1/cpu"),
        ShardMetadata([0, 0], [3, 2], "rank:2/cpu"),
    ]
    with pytest.raises(ValueError, match="rank:2/cpu is not a rank of a world of 2"):
        reshard.build_reshard_metadata(torch.Size([7, 2]), SPEC, 2)
