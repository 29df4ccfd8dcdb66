"""Sharded tensors as state: copies, pickles, state dicts of modules, and those made of shards that ranks have already."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.shard import EnumerableShardingSpec, Shard, ShardedTensor, ShardMetadata, sharded_tensor
from gradwire.shard.api import load_with_process_group
from shard.worlds import GroupWorld, World, Worlds

BACKENDS = pytest.mark.parametrize("backend", ["group", "workers"])
WHOLE = torch.arange(35.0, dtype=torch.float64).view(7, 5)


class Table(nn.Module):
    """A module with a sharded parameter."""

    def __init__(self, weight: ShardedTensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(2))
        weight._is_param = True
        self.register_parameter("weight", weight)  # type: ignore[arg-type]


class Plain(nn.Module):
    """The same, with a plain tensor."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))
        self.weight = nn.Parameter(weight)


class Inner(nn.Module):
    """Has a sharded tensor that torch knows nothing of."""

    def __init__(self, table: Any = None) -> None:
        super().__init__()
        self.table = table


class Outer(nn.Module):
    def __init__(self, *tables: Any) -> None:
        super().__init__()
        self.own = tables[0]
        self.inner = Inner(tables[1])
        self._register_state_dict_hook(sharded_tensor.state_dict_hook)
        self._register_load_state_dict_pre_hook(sharded_tensor.pre_load_state_dict_hook, True)


def weigh(world: World, tensor: ShardedTensor) -> None:
    world.backward((tensor.full_tensor() * 2).sum())


def check_copies(world: World) -> int:
    num_checked = 0
    for spec in world.specs(7, 5):
        module = Table(world.shard(WHOLE, spec, requires_grad=True))
        weigh(world, module.weight)
        copied = copy.deepcopy(module)
        assert isinstance(copied.weight, nn.Parameter)
        assert [name for name, _ in copied.named_parameters()] == ["bias", "weight"]
        assert copied.weight.sharding_spec() == spec
        assert (copied.weight.requires_grad, copied.weight.is_leaf) == (True, True)
        weigh(world, copied.weight)
        with torch.no_grad():
            for part in copied.weight._parts:
                if isinstance(part, torch.Tensor):
                    part.mul_(0)
        assert torch.equal(module.weight.full_tensor(), WHOLE)
        expected = 4.0 if isinstance(world, GroupWorld) else 2.0  # .grad was copied, too; contexts have their own
        assert torch.equal(world.full_gradient(copied.weight), torch.full_like(WHOLE, expected))
        assert torch.equal(world.full_gradient(module.weight), torch.full_like(WHOLE, 2.0))
        num_checked += 1
    pair = copy.deepcopy([module.weight, module.weight])
    assert pair[0] is pair[1]
    with pytest.raises(RuntimeError, match="deepcopy protocol"):
        copy.deepcopy(module.weight.clone())
    return num_checked


@BACKENDS
def test_copies(worlds: Worlds, backend: str) -> None:
    assert set(worlds.check(backend, 3, check_copies)) == {5}


def check_hooks(world: World) -> None:
    first, second = world.shard(WHOLE, world.chunks()), world.shard(WHOLE + 1, world.blocks(7, 5))
    saved = Outer(first, second).state_dict()
    assert list(saved) == ["own", "inner.table"]
    assert nn.Sequential(Outer(first, second)).state_dict().keys() == {"0.own", "0.inner.table"}
    fresh = Outer(None, None)
    fresh.load_state_dict(saved)  # strictly
    assert fresh.own is first
    assert fresh.inner.table is second
    assert list(saved) == ["own", "inner.table"]
    nested = nn.Sequential(Outer(None, None))
    nested.load_state_dict(nn.Sequential(Outer(first, second)).state_dict())
    assert nested[0].inner.table is second


@BACKENDS
def test_hooks_for_plain_attributes(worlds: Worlds, backend: str) -> None:
    assert set(worlds.check(backend, 2, check_hooks)) == {None}


def check_state_dicts(world: World) -> int:
    num_checked = 0
    for old in world.specs(7, 5):
        saved = Table(world.shard(WHOLE, old, requires_grad=True)).state_dict()
        assert list(saved) == ["bias", "weight"]
        assert not saved["weight"].requires_grad
        for new in (world.chunks(0), world.blocks(7, 5)):
            module = Table(world.shard(torch.zeros_like(WHOLE), new, requires_grad=True))
            weight = module.weight
            module.load_state_dict(saved)
            assert module.weight is weight
            assert weight.sharding_spec() is new
            assert (weight.requires_grad, weight.is_leaf) == (True, True)
            assert torch.equal(weight.full_tensor(), WHOLE)
            num_checked += 1
    module.load_state_dict(Plain(WHOLE + 1).state_dict())
    assert torch.equal(module.weight.full_tensor(), WHOLE + 1)
    assert module.bias.tolist() == [0, 0]
    module.load_state_dict(saved, assign=True)
    assert isinstance(module.weight, nn.Parameter)
    assert module.weight.sharding_spec() is old
    assert (module.weight.requires_grad, module.weight.is_leaf) == (True, True)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        module.load_state_dict(Plain(torch.ones(7, 4)).state_dict())
    return num_checked


@BACKENDS
def test_state_dicts_of_modules(worlds: Worlds, backend: str) -> None:
    assert set(worlds.check(backend, 3, check_state_dicts)) == {10}


# -- pickles of process groups -------------------------------------------------------------------------------------------


def check_pickles(world: GroupWorld) -> int:
    num_checked = 0
    for spec in world.specs(7, 5):
        sharded = world.shard(WHOLE, spec, requires_grad=True)
        sharded._is_param = True
        for loaded in (pickle.loads(pickle.dumps(sharded)), save_and_load({"x": [sharded]})["x"][0]):
            assert isinstance(loaded, nn.Parameter)
            assert loaded.metadata() == sharded.metadata()
            assert loaded.sharding_spec() == spec
            assert (loaded.requires_grad, loaded.is_leaf) == (True, True)
            assert torch.equal(loaded.full_tensor(), WHOLE)
        num_checked += 1
    return num_checked


def save_and_load(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer)  # with weights_only, which is the default


def test_pickles(worlds: Worlds) -> None:
    assert worlds.check("group", 3, check_pickles) == [5, 5, 5]


def check_groups_of_pickles(world: GroupWorld) -> bytes:
    """Of a part of the ranks; returns a pickle of all of them."""
    group = dist.new_group([1, 2])
    if world.rank > 0:
        spec = EnumerableShardingSpec(
            [ShardMetadata([0, 0], [2, 5], "rank:2/cpu"), ShardMetadata([2, 0], [5, 5], "rank:1/cpu")]
        )
        sharded = spec.shard(WHOLE.clone(), process_group=group)
        data = pickle.dumps(sharded)
        with load_with_process_group(group):
            loaded = pickle.loads(data)
        assert loaded._process_group is group
        assert torch.equal(loaded.full_tensor(), WHOLE)
        with pytest.raises(RuntimeError, match=r"Local rank at save time was|Local world size at save time was 2"):
            pickle.loads(data)
    return pickle.dumps(world.shard(WHOLE, world.chunks()))


def check_who_loads(world: GroupWorld, pickles: list[bytes]) -> None:
    """Fewer ranks than saved; then, other ranks."""
    with pytest.raises(RuntimeError, match="Local world size at save time was 3, but at load time was 2"):
        pickle.loads(pickles[world.rank])
    with pytest.raises(RuntimeError, match="Local rank at save time was"):
        pickle.loads(pickles[world.rank + 1])


def load_without_group(data: bytes) -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        pickle.loads(data)


def test_who_may_load_a_pickle(worlds: Worlds) -> None:
    pickles = worlds.check("group", 3, check_groups_of_pickles)
    assert worlds.check("group", 2, check_who_loads, pickles) == [None, None]
    worlds.cluster.workers[0].submit(load_without_group, pickles[0]).wait()


# -- of shards that are there already ------------------------------------------------------------------------------------


def check_from_local(world: GroupWorld) -> None:
    spec = world.chunks(1)
    sharded = world.shard(WHOLE, spec)
    local = sharded.local_tensor()
    made = ShardedTensor._init_from_local_tensor(local, spec, 7, 5)
    assert torch.equal(made.full_tensor(), WHOLE)
    assert made.local_tensor() is local
    again = ShardedTensor._init_from_local_shards(sharded.local_shards(), 7, 5)
    assert again.metadata() == sharded.metadata()
    same = ShardedTensor._init_from_local_shards_and_global_metadata(sharded.local_shards(), sharded.metadata())
    assert torch.equal(same.full_tensor(), WHOLE)
    with pytest.raises(ValueError, match="contiguous"):
        ShardedTensor._init_from_local_tensor(torch.ones(5, 7).t(), spec, 7, 5)
    with pytest.raises(ValueError, match="size does not match"):
        ShardedTensor._init_from_local_tensor(torch.ones(7, 4), spec, 7, 5)
    other = (world.rank + 1) % 2 if world.rank == 0 else world.rank  # only rank 0 does it wrong, and all are told
    with pytest.raises(ValueError, match="Local shard metadata's rank does not match"):
        sharded_tensor.init_from_local_shards(
            [Shard.from_tensor_and_offsets(torch.ones(2, 5), [2 * world.rank, 0], other)], 4, 5
        )


def check_metadata_of_local_shards(world: GroupWorld) -> None:
    utils = sharded_tensor.utils
    shards = [Shard.from_tensor_and_offsets(torch.ones(2 + world.rank, 5), [0, 0], world.rank)]
    own = utils.build_metadata_from_local_shards(shards, torch.Size([5, 5]), world.rank, None)
    told: list[Any] = [None, None]
    dist.all_gather_object(told, own)
    found = utils.build_global_metadata(told, recalc_metadata=True)
    assert [item.shard_offsets for item in found.shards_metadata] == [[0, 0], [2, 0]]
    assert found.size == (5, 5)
    with pytest.raises(ValueError, match="overlap"):
        utils.build_global_metadata(told)
    with pytest.raises(ValueError, match="no local shards"):
        utils.build_global_metadata([None])
    with pytest.raises(AssertionError):
        utils.build_metadata_from_local_shards([], torch.Size([5, 5]), 0, None)


@pytest.mark.parametrize("check", [check_from_local, check_metadata_of_local_shards])
def test_of_local_shards(worlds: Worlds, check: Any) -> None:
    assert worlds.check("group", 2, check) == [None, None]
