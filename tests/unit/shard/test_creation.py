"""Sharded tensors: what cannot be made, the layouts of one rank, pieces that go from a source to its shards."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from gradwire.shard import ChunkShardingSpec, ShardMetadata, sharded_tensor
from gradwire.shard.creation import ROUND_BYTES, rounds
from gradwire.shard.layout import Box
from gradwire.shard.sharded_tensor import reshard
from gradwire.testing import LeakCheck


@pytest.fixture
def one_rank(leak_check: LeakCheck) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_references_need_rpc(one_rank: None) -> None:
    spec = ChunkShardingSpec(0, ["rank:0/cpu"])
    with pytest.raises(RuntimeError, match=r"RPC Framework needs to be initialized .* ranks \[0\] are not RPC workers"):
        sharded_tensor.ones(spec, 3, init_rrefs=True)
    with pytest.raises(RuntimeError, match="created with init_rrefs=False"):
        sharded_tensor.ones(spec, 3).remote_shards()


def test_names_of_workers_need_rpc() -> None:
    with pytest.raises(RuntimeError, match="RPC framework needs to be initialized for placements with worker names"):
        sharded_tensor.ones(ChunkShardingSpec(0, ["worker0/cpu"]), 3)


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


def test_creation_takes_what_pytorch_takes() -> None:
    spec = ChunkShardingSpec(0, ["rank:0/cpu"])
    for name in ("empty", "ones", "zeros", "rand", "randn"):
        with pytest.raises(TypeError, match="has no option 'shape'"):
            getattr(sharded_tensor, name)(spec, 2, shape=[2])


def test_no_round_is_larger_than_said_and_none_is_empty() -> None:
    boxes = [Box((0, 0), (2**12, 2**12)), Box((2**12, 0), (0, 2**12)), Box((2**12, 0), (2**11, 2**12))]
    found = list(rounds(boxes, 4))
    assert sum(box.num_elements for pieces in found for _, box in pieces) == math.prod((2**12 + 2**11, 2**12))
    assert all(0 < 4 * sum(box.num_elements for _, box in pieces) <= ROUND_BYTES for pieces in found)
    assert {number for pieces in found for number, _ in pieces} == {0, 2}
