"""Conversion to and from DTensor: the same values, the same memory, gradients through it, and what it cannot say."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from gradwire.shard import ChunkShardingSpec, EnumerableShardingSpec, dtensor
from shard.worlds import GroupWorld, WorkerWorld, Worlds

WORKERS_IMPORT = ["torch._dynamo"]  # DTensor imports it, which takes a second
WHOLE = torch.arange(35.0, dtype=torch.float64).view(7, 5)
WEIGHTS = WHOLE.sqrt() + 1


def check_chunks(world: GroupWorld) -> None:
    """Along each dimension, of a tensor that does not divide evenly, and of one with fewer rows than ranks."""
    for whole in (WHOLE, WHOLE[:2].contiguous()):
        for dim in (0, 1):
            sharded = world.shard(whole, world.chunks(dim))
            made = dtensor.to_dtensor(sharded)
            assert made.placements == (Shard(dim),)
            assert made.shape == whole.shape
            assert torch.equal(made.full_tensor(), whole)
            assert made.to_local().data_ptr() == sharded.local_tensor().data_ptr()
            back = dtensor.from_dtensor(made)
            assert back.metadata() == sharded.metadata()
            assert isinstance(back.sharding_spec(), ChunkShardingSpec)
            assert back.local_tensor().data_ptr() == sharded.local_tensor().data_ptr()
            assert torch.equal(back.full_tensor(), whole)


def check_gradients(world: GroupWorld) -> None:
    sharded = world.shard(WHOLE, world.chunks(0), requires_grad=True)
    made = dtensor.to_dtensor(sharded)
    (made * DTensor.from_local(WEIGHTS, made.device_mesh, [Replicate()])).sum().full_tensor().backward()
    assert torch.equal(world.full_gradient(sharded), WEIGHTS)
    parameter = torch.nn.Parameter(distribute_tensor(WHOLE, made.device_mesh, [Shard(1)]))
    converted = dtensor.from_dtensor(parameter)
    assert (converted.requires_grad, converted.is_leaf) == (True, False)
    (converted.full_tensor() * WEIGHTS).sum().backward()
    assert torch.equal(parameter.grad.full_tensor(), WEIGHTS)  # type: ignore[union-attr]


def check_blocks(world: GroupWorld) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(0), Shard(0)]):
        original = distribute_tensor(WHOLE, mesh, placements)
        sharded = dtensor.from_dtensor(original)
        assert torch.equal(sharded.full_tensor(), WHOLE)
        back = dtensor.to_dtensor(sharded, mesh)
        assert back.placements == tuple(placements)
        assert torch.equal(back.full_tensor(), WHOLE)
        assert back.to_local().data_ptr() == original.to_local().data_ptr()
    blocks = dtensor.from_dtensor(distribute_tensor(WHOLE, mesh, [Shard(0), Shard(1)]))
    assert isinstance(blocks.sharding_spec(), EnumerableShardingSpec)


def check_parts_of_the_ranks(world: GroupWorld) -> None:
    """A group that does not begin with rank 0."""
    group = dist.new_group([1, 3])
    if world.rank in (1, 3):
        spec = ChunkShardingSpec(0, ["rank:1/cpu", "rank:3/cpu"])
        sharded = spec.shard(WHOLE.clone(), process_group=group)
        made = dtensor.to_dtensor(sharded)
        assert torch.equal(made.full_tensor(), WHOLE)
        assert dtensor.from_dtensor(made).metadata() == sharded.metadata()


def check_refusals(world: GroupWorld) -> None:
    mesh = init_device_mesh("cpu", (world.num_places,))
    for spec in (world.blocks(7, 5), world.uneven(0, 7, 5)):
        with pytest.raises(ValueError, match=r"redistribute\(\)"):
            dtensor.to_dtensor(world.shard(WHOLE, spec))
    with pytest.raises(ValueError, match="redistribute"):
        dtensor.to_dtensor(world.shard(WHOLE[:5], world.chunks()), init_device_mesh("cpu", (2, 2)))
    for placement in (Replicate(), Partial()):
        with pytest.raises(ValueError, match="redistribute it to Shard"):
            dtensor.from_dtensor(DTensor.from_local(WHOLE, mesh, [placement]))


def check_all(world: GroupWorld) -> int:
    check_chunks(world)
    check_gradients(world)
    check_blocks(world)
    check_parts_of_the_ranks(world)
    check_refusals(world)
    dist.barrier()  # no rank leaves while another one still connects to the groups of the last mesh
    return world.rank


def test_dtensor(worlds: Worlds) -> None:
    assert worlds.check("group", 4, check_all) == [0, 1, 2, 3]


def check_workers(world: WorkerWorld) -> None:
    with pytest.raises(ValueError, match="RPC workers"):
        dtensor.to_dtensor(world.shard(WHOLE, world.chunks()))


def test_not_of_workers(worlds: Worlds) -> None:
    assert worlds.check("workers", 2, check_workers) == [None]
