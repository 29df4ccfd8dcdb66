"""What cannot be made in a process that is not an RPC worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from gradwire.shard import ChunkShardingSpec, sharded_tensor
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
