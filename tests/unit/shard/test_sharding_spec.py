"""Specs: what they make of a tensor, and what they refuse."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._shard import sharding_spec as torch_specs

from gradwire.shard import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    ShardMetadata,
    TensorProperties,
)
from gradwire.shard.sharding_spec import check_tensor, get_chunk_sharding_params, infer_sharding_spec


def ranks(number: int) -> list[str]:
    return [f"rank:{rank}/cpu" for rank in range(number)]


@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 1))
def test_chunks_are_those_of_torch(length: int, num_chunks: int, dim: int) -> None:
    size = [3, 3]
    size[dim] = length
    tensor = torch.arange(3 * length).view(size)
    spec = ChunkShardingSpec(dim - 2 if length % 2 else dim, ranks(num_chunks))
    shards = spec.build_metadata(tensor.size(), TensorProperties()).shards_metadata
    assert len(shards) == num_chunks
    expected = [chunk for chunk in tensor.chunk(num_chunks, dim) if chunk.numel()]
    full = [shard for shard in shards if shard.box.num_elements]
    assert [list(chunk.size()) for chunk in expected] == [shard.shard_sizes for shard in full]
    for chunk, shard in zip(expected, full, strict=True):
        for axis, (offset, extent) in enumerate(zip(shard.shard_offsets, shard.shard_sizes, strict=True)):
            tensor_part = tensor.narrow(axis, offset, extent)
            assert set(chunk.flatten().tolist()) <= set(tensor_part.flatten().tolist())
    check_tensor(shards, tensor.size())


def test_a_dim_smaller_than_the_number_of_placements_leaves_some_empty() -> None:
    shards = ChunkShardingSpec(0, ranks(4)).build_metadata(torch.Size([2, 5]), TensorProperties()).shards_metadata
    assert [shard.shard_sizes for shard in shards] == [[1, 5], [1, 5], [0, 5], [0, 5]]
    assert [shard.shard_offsets for shard in shards] == [[0, 0], [1, 0], [2, 0], [3, 0]]


@pytest.mark.parametrize(
    ("dim", "placements", "kind", "text"),
    [
        ("H", ranks(2), NotImplementedError, "does not support named dimension"),
        (1.5, ranks(2), ValueError, "Sharding dim needs to be an integer"),
        (True, ranks(2), ValueError, "Sharding dim needs to be an integer"),
        (0, [], ValueError, "at least one placement"),
        (0, [3], TypeError, "a placement must be a string"),
        (0, "rank:0/cpu", TypeError, "placements must be a list"),
        (0, ["rank:x/cpu"], ValueError, "Could not parse remote_device"),
        (0, ["a/b/c"], ValueError, "Could not parse remote_device"),
    ],
)
def test_chunk_specs_that_make_no_sense(dim: Any, placements: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        ChunkShardingSpec(dim, placements)


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dimension_that_the_tensor_does_not_have(dim: int) -> None:
    with pytest.raises(ValueError, match=f"Invalid sharding dim: {dim}"):
        ChunkShardingSpec(dim, ranks(2)).build_metadata(torch.Size([2, 2]), TensorProperties())


def shard(offsets: list[int], sizes: list[int], rank: int = 0) -> ShardMetadata:
    return ShardMetadata(offsets, sizes, f"rank:{rank}/cpu")


@pytest.mark.parametrize(
    ("shards", "text"),
    [
        ([], "Empty shard list"),
        ([shard([0], [1]), shard([0, 0], [1, 1])], "Found inconsistent ranks for shards: 1 and 2"),
        ([shard([0, 0], [2, 2]), shard([1, 1], [2, 2])], "overlap"),
    ],
)
def test_enumerations_that_make_no_sense(shards: list[ShardMetadata], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        EnumerableShardingSpec(shards)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        ([4], "Rank of tensor is 1, but shards rank is 2"),
        ([2, 2], "exceeds tensor dim: 2"),
        ([5, 2], r"Total volume of shards: 8 does not match tensor volume: 10"),
    ],
)
def test_enumerations_that_do_not_fit(size: list[int], text: str) -> None:
    spec = EnumerableShardingSpec([shard([0, 0], [1, 2]), shard([1, 0], [3, 2], 1)])
    with pytest.raises(ValueError, match=text):
        spec.build_metadata(torch.Size(size), TensorProperties())
    assert spec.build_metadata(torch.Size([4, 2]), TensorProperties()).shards_metadata == spec.shards


@pytest.mark.parametrize(
    ("offsets", "sizes", "text"),
    [([0], [1, 1], "the same number of elements"), ([-1], [1], "shard_offsets should be >=0"), ([0], [-1], ">= 0")],
)
def test_shards_that_make_no_sense(offsets: list[int], sizes: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ShardMetadata(offsets, sizes)


@given(st.integers(1, 30), st.integers(1, 6), st.integers(0, 1))
def test_chunks_are_recognised(length: int, num_chunks: int, dim: int) -> None:
    size = [7, 7]
    size[dim] = length
    spec = ChunkShardingSpec(dim, ranks(num_chunks))
    shards = spec.build_metadata(torch.Size(size), TensorProperties()).shards_metadata
    found = infer_sharding_spec(shards[::-1])
    assert sorted(map(str, found.build_metadata(torch.Size(size), TensorProperties()).shards_metadata)) == sorted(
        map(str, shards)
    )
    if num_chunks > 1:
        assert found == spec


@given(st.integers(0, 20), st.integers(1, 6), st.integers(-2, 1))
def test_metadata_is_that_of_torch(length: int, num_chunks: int, dim: int) -> None:
    size = [3, 3]
    size[dim] = length
    own = ChunkShardingSpec(dim, ranks(num_chunks)).build_metadata(torch.Size(size), TensorProperties())
    theirs = torch_specs.ChunkShardingSpec(dim, ranks(num_chunks)).build_metadata(torch.Size(size), None)
    assert list(map(_fields, own.shards_metadata)) == list(map(_fields, theirs.shards_metadata))


def _fields(shard: Any) -> tuple[Any, ...]:
    return shard.shard_offsets, shard.shard_sizes, shard.placement


def test_uneven_shards_are_enumerated() -> None:
    shards = [shard([0], [3], 0), shard([3], [1], 1)]
    assert infer_sharding_spec(shards) == EnumerableShardingSpec(shards)


def test_the_part_of_a_rank() -> None:
    spec = ChunkShardingSpec(0, ["rank:2/cpu", "rank:0/cpu", "rank:1/cpu"])
    assert [get_chunk_sharding_params(7, 3, spec, rank) for rank in range(3)] == [(3, 3), (6, 1), (0, 3)]
    with pytest.raises(ValueError, match="rank 5 is not among the placements"):
        get_chunk_sharding_params(7, 3, spec, 5)
    spec.placements = ranks(3)  # as text, too
    assert get_chunk_sharding_params(7, 3, spec, 1) == (3, 3)


def test_placements_of_workers() -> None:
    assert DevicePlacementSpec("worker0/cpu").device.worker_name() == "worker0"
    spec = ChunkShardingSpec(0, ["worker0/cpu", "worker1"])
    assert [item.worker_name() for item in spec.placements] == ["worker0", "worker1"]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last, torch.preserve_format])
def test_properties_are_pickled(memory_format: torch.memory_format) -> None:
    properties = TensorProperties(torch.float64, requires_grad=True, memory_format=memory_format)
    assert pickle.loads(pickle.dumps(properties)) == properties
