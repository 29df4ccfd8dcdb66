"""Sharded tensors of some of the ranks, on the others too, and tensors that change their process group."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.shard import ChunkShardingSpec, ShardedTensor, load_with_process_group, sharded_tensor
from gradwire.shard.sharded_tensor import utils
from shard.worlds import GroupWorld, Worlds

SPEC = ChunkShardingSpec(0, ["rank:2/cpu", "rank:3/cpu"])


def new_group(ranks: list[int]) -> Any:
    """A process group of some ranks. All of them have connected when this returns; see `groups.join_group`."""
    group = dist.new_group(ranks)
    dist.barrier()
    return group


def make(**options: Any) -> tuple[ShardedTensor, bool]:
    """A tensor of ranks 1, 2 and 3, of which 1 has no shard; and whether this rank is one of them."""
    group = new_group([1, 2, 3])
    tensor = sharded_tensor.full(SPEC, [10, 2], 3.0, process_group=group, **options)
    return tensor, dist.get_rank() > 0


def check_outside(world: GroupWorld) -> int:
    tensor, is_member = make()
    assert [item.shard_offsets for item in tensor.metadata().shards_metadata] == [[0, 0], [5, 0]]
    assert tensor.size() == (10, 2)
    assert not tensor.requires_grad
    assert tensor.is_leaf
    assert tensor.grad_fn is None
    more = torch.relu(tensor) * 2 + 1  # all ranks run the program; those outside have nothing to do
    assert more.local_shards() == [] or torch.equal(more.local_tensor(), torch.full((5, 2), 7.0))
    assert torch.equal(tensor, tensor.clone())
    gathered = more.gather(dst=2)  # rank 3 among all
    assert gathered is None or torch.equal(gathered, torch.full((10, 2), 7.0))
    assert (gathered is not None) == (world.rank == 3)
    if is_member:
        assert torch.equal(more.full_tensor(), torch.full((10, 2), 7.0))
        assert more.sum() == 140
    else:
        for use in (more.full_tensor, more.sum, lambda: torch.nn.functional.linear(torch.ones(1, 2), tensor)):
            with pytest.raises(RuntimeError, match="this rank is not in the process group"):
                use()
    return len(tensor.local_shards())


def test_ranks_outside_of_the_process_group_know_the_tensor_and_have_nothing_of_it(worlds: Worlds) -> None:
    assert worlds.check("group", 4, check_outside) == [0, 0, 1, 1]


def check_references(world: GroupWorld) -> tuple[int, list[int]]:
    tensor, _ = make(init_rrefs=True)
    found = tensor.remote_shards()
    for worker, references in found.items():
        (reference,) = references
        assert reference.owner().id == worker
        shard = reference.to_here()
        assert torch.equal(shard.tensor, torch.full((5, 2), 3.0))
        assert shard.metadata in tensor.metadata().shards_metadata
    assert sorted(tensor.to(torch.float64).remote_shards()) == sorted(found)
    dist.barrier()  # the shards are there until everybody has looked
    return gw.rpc.get_worker_info().id, sorted(found)


def test_references_are_for_all_ranks_and_to_those_that_have_shards(worlds: Worlds) -> None:
    told = worlds.check("group", 4, check_references)
    ids = [worker for worker, _ in told]
    having = sorted(ids[2:])
    assert [found for _, found in told] == [having, having, [ids[3]], [ids[2]]]


def check_pickles(world: GroupWorld) -> bool:
    tensor, is_member = make()
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    with load_with_process_group(tensor._process_group):
        loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded, tensor)
    assert loaded.metadata() == tensor.metadata()
    assert loaded.sharding_spec() == SPEC
    return is_member


def test_all_ranks_save_and_load_it(worlds: Worlds) -> None:
    assert worlds.check("group", 4, check_pickles) == [False, True, True, True]


def check_placements(world: GroupWorld) -> Any:
    group = new_group([1, 2])
    with pytest.raises(ValueError, match="remote device is None"):
        utils._parse_and_validate_remote_device(group, None)
    inside, outside = (dist._remote_device(f"rank:{rank}/cpu") for rank in (2, 0))
    assert utils._parse_and_validate_remote_device(group, inside) == (2, torch.device("cpu"))
    if world.rank == 0:  # it does not know who is in the group
        return utils._parse_and_validate_remote_device(group, outside)
    with pytest.raises(ValueError, match=r"Global rank 0 does not exist in input process group: it has \[1, 2\]"):
        utils._parse_and_validate_remote_device(group, outside)
    worker = gw.rpc.get_worker_info()
    assert utils._parse_and_validate_remote_device(None, dist._remote_device(f"{worker.name}/cpu"))[0] == worker.id
    with pytest.raises(ValueError, match="Invalid worker name 'stranger'"):
        utils._parse_and_validate_remote_device(None, dist._remote_device("stranger/cpu"))
    return None


def test_placements_are_held_against_the_group(worlds: Worlds) -> None:
    assert worlds.check("group", 3, check_placements)[0] == (0, torch.device("cpu"))


def check_other_group(world: GroupWorld) -> bool:
    group = new_group([0, 1])
    tensor = sharded_tensor.ones(world.chunks(0), 3, 2)
    assert tensor._process_group is dist.group.WORLD
    assert tensor.cpu() is tensor
    assert tensor.to("cpu") is tensor
    assert tensor.to(dtype=torch.float32, process_group=dist.group.WORLD) is tensor
    for moved in (tensor.cpu(process_group=group), tensor.to("cpu", torch.float64, process_group=group)):
        assert moved._process_group is group
        assert [str(item.placement) for item in moved.metadata().shards_metadata] == ["rank:0/cpu", "rank:1/cpu"]
        assert torch.equal(moved.full_tensor(), torch.ones(3, 2, dtype=moved.dtype))
        with pytest.raises(RuntimeError, match="All distributed tensors should use the same ProcessGroup"):
            torch.add(moved, tensor.to(moved.dtype))
    with pytest.raises(RuntimeError, match=r"Only `torch.contiguous_format` or `torch.preserve_format` is supported"):
        tensor.cpu(memory_format=torch.channels_last)
    return True


def test_a_tensor_goes_to_another_group_of_the_same_ranks(worlds: Worlds) -> None:
    assert all(worlds.check("group", 2, check_other_group))
