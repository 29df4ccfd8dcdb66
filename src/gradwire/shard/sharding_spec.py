"""Sharding specs: equal chunks along one dimension, or shards exactly as enumerated."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradwire._torch import RemoteDevice
from gradwire.shard.dispatch import custom_sharding_spec_op as custom_sharding_spec_op
from gradwire.shard.layout import find_overlap, whole
from gradwire.shard.metadata import Placement, ShardedTensorMetadata, ShardMetadata, TensorProperties

if TYPE_CHECKING:
    from gradwire.shard.tensor import ShardedTensor


class PlacementSpec(ABC):  # noqa: B024  (programs derive from it)
    """Base of placements."""


@dataclass
class DevicePlacementSpec(PlacementSpec):
    """Placement on one device of one worker.

    Raises:
        ValueError: The string is malformed.
        RuntimeError: The device is not a valid torch device.
        TypeError: It is neither a string nor a `torch.device`.
    """

    device: Any

    def __post_init__(self) -> None:
        if not isinstance(self.device, RemoteDevice):
            self.device = RemoteDevice(self.device)


class ShardingSpec(ABC):
    """Base of the classes that say how to shard a tensor."""

    @abstractmethod
    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """Return the shards of a tensor of that size.

        Raises:
            ValueError: A tensor of that size cannot be sharded like this.
        """

    def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: Any = None) -> ShardedTensor:
        """Shard a tensor, with the values of one rank; over RPC workers, with the values here.

        Args:
            tensor: A tensor of the same size and dtype on every rank. Only the source needs data: on other ranks it may
                be on the ``meta`` device. If it is on the source, too, the elements of shards are undefined.
            src_rank: The rank in the group whose values are used.
            process_group: The process group; None for the default group.

        Raises:
            ValueError: It is not contiguous, cannot be sharded like this, or differs between ranks.
            RuntimeError: There is no process group, or this process is not an RPC worker.
        """
        from gradwire.shard.creation import shard_tensor  # creation stands on this module

        return shard_tensor(tensor, self, src_rank, process_group)


@dataclass
class ChunkShardingSpec(ShardingSpec):
    """Equal chunks along one dimension, as `torch.chunk` makes them; the last may be smaller, or empty.

    Args:
        dim: The dimension; negative numbers count from the end.
        placements: Placement of each chunk, in order.

    Raises:
        ValueError: `dim` is not an integer, there are no placements, or the string of one is malformed.
        RuntimeError: The device of a placement is not a valid torch device.
        TypeError: A placement is not a string, `torch.device` or remote device, or `placements` is a string.
        NotImplementedError: `dim` is a name.
    """

    dim: int
    placements: list[Any]

    def __post_init__(self) -> None:
        if isinstance(self.dim, str):
            raise NotImplementedError("ChunkShardingSpec does not support named dimension yet! Give its number")
        if type(self.dim) is not int:
            raise ValueError(f"Sharding dim needs to be an integer, found: {self.dim}")
        if isinstance(self.placements, str):
            raise TypeError(f"placements must be a list, even for one: [{self.placements!r}]")
        if not self.placements:
            raise ValueError("ChunkShardingSpec needs at least one placement")
        self.placements = [as_placement(item) for item in self.placements]

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        num_dims = len(tensor_sizes)
        if not -num_dims <= self.dim < num_dims:
            raise ValueError(f"Invalid sharding dim: {self.dim}, for a tensor with {num_dims} dimensions")
        dim = self.dim % num_dims
        length = tensor_sizes[dim]
        split = get_split_size(length, len(self.placements))
        shards = []
        for number, placement in enumerate(self.placements):
            start = split * number  # of an empty chunk, too, as PyTorch has it
            box = whole(tensor_sizes).with_range(dim, start, get_chunked_dim_size(length, split, number))
            shards.append(ShardMetadata(box.offsets, box.sizes, placement))
        return ShardedTensorMetadata(shards, torch.Size(tensor_sizes), tensor_properties)


@dataclass
class EnumerableShardingSpec(ShardingSpec):
    """Any shards that do not overlap: uneven ones, several or none on a rank, along several dimensions.

    Raises:
        ValueError: There are no shards, their numbers of dimensions differ, or two of them overlap.
    """

    shards: list[ShardMetadata]

    def __post_init__(self) -> None:
        validate_shards(self.shards)

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        check_tensor(self.shards, tensor_sizes)
        return ShardedTensorMetadata(self.shards, torch.Size(tensor_sizes), tensor_properties)


def as_placement(value: Placement) -> RemoteDevice:
    """Return a placement, which may be passed as a string."""
    if isinstance(value, RemoteDevice):
        return value
    if not isinstance(value, str | torch.device):
        raise TypeError(f"a placement must be a string such as 'rank:0/cpu' or 'worker0/cpu', not {value!r}")
    return RemoteDevice(value)


def validate_shards(shards: Sequence[ShardMetadata]) -> None:
    """Check that shards can belong to one tensor."""
    if not shards:
        raise ValueError(f"Empty shard list provided: {shards}")
    ranks = {len(shard.shard_offsets) for shard in shards}
    if len(ranks) > 1:
        raise ValueError(f"Found inconsistent ranks for shards: {' and '.join(map(str, sorted(ranks)))}")
    validate_non_overlapping_shards_metadata(shards)


def validate_non_overlapping_shards_metadata(shards: Sequence[ShardMetadata]) -> None:
    """Check that no two shards have an element in common."""
    pair = find_overlap([shard.box for shard in shards])
    if pair is not None:
        raise ValueError(f"Shards {shards[pair[0]]} and {shards[pair[1]]} overlap")


def check_tensor(shards_metadata: Sequence[ShardMetadata], tensor_dims: Sequence[int]) -> None:
    """Check that shards, which do not overlap, cover a tensor of that size."""
    shards_rank = len(shards_metadata[0].shard_offsets)
    if len(tensor_dims) != shards_rank:
        raise ValueError(f"Rank of tensor is {len(tensor_dims)}, but shards rank is {shards_rank}")
    for shard in shards_metadata:
        if not shard.box.num_elements:
            continue  # it is nowhere
        for offset, size, length in zip(shard.shard_offsets, shard.shard_sizes, tensor_dims, strict=True):
            if offset + size > length:
                raise ValueError(
                    f"Shard offset {offset} and length {size} exceeds tensor dim: {length} for shard {shard}"
                )
    found, wanted = sum(shard.box.num_elements for shard in shards_metadata), math.prod(tensor_dims)
    if found != wanted:
        raise ValueError(
            f"Total volume of shards: {found} does not match tensor volume: {wanted}, in other words all the "
            f"individual shards do not cover the entire tensor"
        )


def get_split_size(dim_size: int, chunks: int) -> int:
    """Return the length of all chunks but the last ones, as `torch.chunk` makes them."""
    return (dim_size + chunks - 1) // chunks


def get_chunked_dim_size(dim_size: int, split_size: int, idx: int) -> int:
    """Return the length of chunk `idx`."""
    return max(min(dim_size, split_size * (idx + 1)) - split_size * idx, 0)


def get_chunk_sharding_params(
    sharding_dim_size: int, world_size: int, spec: ChunkShardingSpec, rank: int
) -> tuple[int, int]:
    """Return the offset and the length of the chunk of a rank."""
    split = get_split_size(sharding_dim_size, world_size)
    for number, placement in enumerate(spec.placements):
        if as_placement(placement).rank() == rank:
            return min(split * number, sharding_dim_size), get_chunked_dim_size(sharding_dim_size, split, number)
    raise ValueError(f"rank {rank} is not among the placements {spec.placements}")


def infer_sharding_spec(shards_metadata: Sequence[ShardMetadata]) -> ShardingSpec:
    """Return the spec of these shards: a `ChunkShardingSpec` if they are chunks, else an enumerable one."""
    shards = list(shards_metadata)
    full = [shard for shard in shards if shard.box.num_elements] or shards
    lengths = [
        max(s.shard_offsets[dim] + s.shard_sizes[dim] for s in full) for dim in range(len(shards[0].shard_sizes))
    ]
    for dim in range(len(lengths)):
        ordered = sorted(shards, key=lambda shard: (shard.shard_offsets[dim], -shard.shard_sizes[dim]))
        if any(shard.placement is None for shard in shards):
            break
        spec = ChunkShardingSpec(dim, [shard.placement for shard in ordered])
        chunks = spec.build_metadata(torch.Size(lengths), TensorProperties()).shards_metadata
        if all(map(_are_same, chunks, ordered)):
            return spec
    return EnumerableShardingSpec(shards)


def _are_same(one: ShardMetadata, other: ShardMetadata) -> bool:
    # Where an empty one lies does not matter.
    return one == other or (
        one.shard_sizes == other.shard_sizes and one.placement == other.placement and not one.box.num_elements
    )


_infer_sharding_spec_from_shards_metadata = infer_sharding_spec
