"""Sharded tensors of shards that are there already: what is found out, and what is checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gradwire.shard import Shard, ShardedTensor, ShardingSpec, ShardMetadata, TensorProperties, sharded_tensor
from gradwire.shard.metadata import ShardedTensorMetadata
from gradwire.shard.sharded_tensor import ShardedTensorBase, init_from_local_shards
from gradwire.shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec
from shard.worlds import GroupWorld, Worlds

WHOLE = torch.arange(8.0).view(4, 2)


def describe_halves(**properties: Any) -> ShardedTensorMetadata:
    shards = [ShardMetadata([2 * rank, 0], [2, 2], f"rank:{rank}/cpu") for rank in range(2)]
    return ShardedTensorMetadata(shards, torch.Size([4, 2]), TensorProperties(**properties))


# -- without a process group -------------------------------------------------------------------------------------------


def test_shards_without_a_process_group_can_be_looked_at() -> None:
    metadata = describe_halves()
    shards = [Shard(WHOLE.t().contiguous().t()[2 * n : 2 * n + 2], metadata.shards_metadata[n]) for n in range(2)]
    assert not shards[0].tensor.is_contiguous()
    made = ShardedTensorBase._init_from_local_shards_and_global_metadata(shards, sharded_tensor_metadata=metadata)
    assert isinstance(made, ShardedTensor)
    assert made.metadata() is metadata
    assert made.sharding_spec() == ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    assert [shard.tensor is own.tensor for shard, own in zip(made.local_shards(), shards, strict=True)] == [True, True]
    assert made.size() == (4, 2)
    for use in (lambda: made + 1, made.full_tensor, made.sum):
        with pytest.raises(RuntimeError, match="was made without a process group"):
            use()


def test_some_shards_without_a_process_group() -> None:
    metadata = describe_halves()
    spec = EnumerableShardingSpec(metadata.shards_metadata)
    second = Shard(WHOLE[2:], metadata.shards_metadata[1])
    made = ShardedTensorBase._init_from_local_shards_and_global_metadata([second], metadata, sharding_spec=spec)
    assert [shard.metadata.shard_offsets for shard in made.local_shards()] == [[2, 0]]
    assert made.sharding_spec() is spec
    stranger = Shard(WHOLE[1:3], ShardMetadata([1, 0], [2, 2], "rank:0/cpu"))
    with pytest.raises(ValueError, match="is not in the metadata"):
        ShardedTensorBase._init_from_local_shards_and_global_metadata([stranger], metadata)
    with pytest.raises(ValueError, match="shards_metadata must not be empty"):
        ShardedTensorBase._init_from_local_shards_and_global_metadata([], replace(metadata, shards_metadata=[]))
    with pytest.raises(ValueError, match=r"Only torch.strided layout"):
        ShardedTensorBase._init_from_local_shards_and_global_metadata([], describe_halves(layout=torch.sparse_coo))


def test_one_empty_shard_from_its_properties() -> None:
    properties = TensorProperties(torch.float64, requires_grad=True)
    made = sharded_tensor._create_tensor_from_params(
        5, 3, local_device=torch.device("cpu"), tensor_properties=properties
    )
    assert (made.size(), made.dtype, made.requires_grad) == ((5, 3), torch.float64, True)


# -- sizes that are to be found out ------------------------------------------------------------------------------------


def check_unknown_size(world: GroupWorld) -> Any:
    rows = torch.full((world.rank + 1, 3), float(world.rank))
    shards = [Shard.from_tensor_and_offsets(rows, [0, 0], world.rank)] if world.rank != 1 else []
    made = init_from_local_shards(shards, None, None)
    assert torch.equal(made.full_tensor()[:, 0], torch.tensor([0.0, 2.0, 2.0, 2.0]))
    assert [item.shard_offsets for item in made.metadata().shards_metadata] == [[0, 0], [1, 0]]
    again = init_from_local_shards(shards, [None, 3])
    assert again.metadata() == made.metadata()
    with pytest.raises(ValueError, match="global_size property does not match from different ranks"):
        init_from_local_shards(shards, *((None, 3) if world.rank == 2 else (4, 3)))
    with pytest.raises(ValueError, match="no local shards on all ranks"):
        init_from_local_shards([], None, None)
    with pytest.raises(ValueError, match="Rank of tensor is 0, but shards rank is 2"):
        init_from_local_shards(shards)
    nothing = Shard.from_tensor_and_offsets(torch.ones(0, 0), [0, 0], world.rank)
    assert init_from_local_shards([nothing], None, None).size() == (0, 0)
    return made.size(), [shard.metadata.shard_offsets for shard in shards]


def test_size_and_offsets_are_found_from_everybody_s_rows(worlds: Worlds) -> None:
    size = torch.Size([4, 3])
    assert worlds.check("group", 3, check_unknown_size) == [(size, [[0, 0]]), (size, []), (size, [[1, 0]])]


# -- held against metadata ---------------------------------------------------------------------------------------------


def check_against_metadata(world: GroupWorld) -> bool:
    init = ShardedTensor._init_from_local_shards_and_global_metadata
    metadata = describe_halves()
    own = metadata.shards_metadata[world.rank]
    assert torch.equal(init([Shard(WHOLE[:2].clone(), own)], metadata).full_tensor(), WHOLE[:2].repeat(2, 1))
    for shards in ([], [Shard(torch.ones(2, 2), own)] * 2):
        with pytest.raises(RuntimeError, match=r"does not match number of local shards metadata .*\(1\) on rank"):
            init(shards, metadata)
    wrong = {
        "dtype": torch.ones(2, 2, dtype=torch.int),
        "layout": torch.ones(2, 2).to_sparse(),
        "requires_grad": torch.ones(2, 2, requires_grad=True),
    }
    for name, tensor in wrong.items():
        with pytest.raises(ValueError, match=f"Local shards' tensor {name} property is incompatible with"):
            init([Shard(tensor, own)], metadata)
    with pytest.raises(ValueError, match=r"Only torch.contiguous_format memory_format"):
        init([Shard(torch.ones(2, 2, dtype=torch.float32).t().expand(2, 2).t()[:, [1, 0]].t(), own)], metadata)
    return True


def check_view_of_one_rank(world: GroupWorld) -> Any:
    """Every rank says that the tensor is its own shard, and that the others have none."""
    shards = [ShardMetadata([0 if rank < world.rank else 3, 0], [0, 0], f"rank:{rank}/cpu") for rank in range(3)]
    shards[world.rank] = ShardMetadata([0, 0], [3, 2], f"rank:{world.rank}/cpu")
    metadata = ShardedTensorMetadata(shards, torch.Size([3, 2]), TensorProperties())
    own = Shard(torch.ones(3, 2), shards[world.rank])
    made = ShardedTensor._init_from_local_shards_and_global_metadata([own], metadata)
    assert made.local_tensor() is own.tensor
    return [shard.metadata.shard_offsets for shard in made.local_shards()]


def test_empty_shards_may_be_anywhere(worlds: Worlds) -> None:
    assert worlds.check("group", 3, check_view_of_one_rank) == [[[0, 0]]] * 3


def test_shards_that_are_not_what_the_metadata_says(worlds: Worlds) -> None:
    assert all(worlds.check("group", 2, check_against_metadata))


# -- specs of other classes --------------------------------------------------------------------------------------------


class Doubled(ShardingSpec):
    """Has a way of its own to divide a tensor."""

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        return _rows().build_metadata(tensor_sizes, tensor_properties)

    def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: Any = None) -> ShardedTensor:
        return _rows().shard(tensor.detach() * 2, src_rank, process_group)


def _rows() -> ChunkShardingSpec:
    return ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])


def check_own_way(world: GroupWorld) -> bool:
    from gradwire.shard import _shard_tensor, shard_parameter

    assert torch.equal(_shard_tensor(WHOLE, Doubled()).full_tensor(), WHOLE * 2)
    module = torch.nn.Linear(2, 4)
    with torch.no_grad():
        module.weight.fill_(3.0)
    shard_parameter(module, "weight", Doubled())
    assert torch.equal(module.weight.full_tensor(), torch.full((4, 2), 6.0))  # type: ignore[operator]
    return True


def test_a_spec_that_has_a_way_of_its_own_is_asked(worlds: Worlds) -> None:
    assert all(worlds.check("group", 2, check_own_way))
