"""From any spec to any spec, in both worlds, with gradients."""

from __future__ import annotations

import pytest
import torch

from gradwire.shard.sharded_tensor import reshard
from shard.worlds import World, Worlds

ENGINES = pytest.mark.parametrize("backend", ["group", "workers"])


def check_all_pairs(world: World) -> int:
    whole = torch.arange(35.0, dtype=torch.float64).view(7, 5)
    weights = torch.randn(7, 5, dtype=torch.float64)
    num_checked = 0
    for old in world.specs(7, 5):
        for new in world.specs(7, 5):
            sharded = world.shard(whole, old, requires_grad=True)
            moved = sharded.redistribute(new)
            assert moved.sharding_spec() is new
            assert moved.requires_grad
            full = moved.full_tensor()
            assert torch.equal(full, whole)
            world.backward((full * weights).sum())
            assert torch.equal(world.full_gradient(sharded), weights)
            num_checked += 1
    return num_checked


def check_local_shards(world: World) -> int:
    """PyTorch's functions for a shard alone."""
    whole = torch.arange(35.0).view(7, 5)
    old, new = world.chunks(0), world.uneven(1, 7, 5)
    tensor = world.shard(whole, old).local_tensor()
    for function in (reshard.reshard_local_shard, reshard.reshuffle_local_shard):
        shards, metadata = function(tensor, whole.size(), old, new, None)
        assert metadata == sorted(new.shards, key=lambda item: item.placement.rank())  # type: ignore[union-attr, return-value]
        assert len(shards) == 1
        start, size = shards[0].metadata.shard_offsets[1], shards[0].metadata.shard_sizes[1]
        assert torch.equal(shards[0].tensor, whole[:, start : start + size])
    return len(metadata)


def check_order(world: World) -> list[int]:
    """PyTorch lists the shards by rank after `reshard`, in whatever order they are in the spec."""
    whole = torch.arange(35.0).view(7, 5)
    new = world.uneven(1, 7, 5)
    tensor = world.shard(whole, world.chunks(0))
    assert tensor.reshard(new) is tensor
    assert tensor.sharding_spec() is new
    ranks = [item.placement.rank() for item in tensor.metadata().shards_metadata]  # type: ignore[union-attr]
    assert [item.placement.rank() for item in new.shards] == ranks[::-1]  # type: ignore[union-attr]
    tensor.metadata().shards_metadata.reverse()  # programs sort it as they like
    (shard,) = tensor.local_shards()
    start, size = shard.metadata.shard_offsets[1], shard.metadata.shard_sizes[1]
    assert torch.equal(shard.tensor, whole[:, start : start + size])
    assert torch.equal(tensor.full_tensor(), whole)
    local = tensor.local_tensor()
    assert tensor.reshard(world.uneven(1, 7, 5)).local_tensor() is local  # it is divided like this already
    return ranks


def test_shards_are_in_the_order_of_ranks_after_reshard(worlds: Worlds) -> None:
    assert worlds.check("group", 3, check_order) == [[0, 1, 2]] * 3


def test_shards_alone(worlds: Worlds) -> None:
    assert worlds.check("group", 3, check_local_shards) == [3, 3, 3]


@ENGINES
@pytest.mark.parametrize("num_places", [2, 4])
def test_any_spec_to_any_other(worlds: Worlds, backend: str, num_places: int) -> None:
    assert set(worlds.check(backend, num_places, check_all_pairs)) == {25}
