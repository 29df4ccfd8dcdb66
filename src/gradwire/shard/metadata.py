"""Metadata of sharded tensors: offsets, sizes and placements of shards, and the properties that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from gradwire._torch import RemoteDevice
from gradwire.rref import RRef
from gradwire.shard.layout import Box, whole

Placement = str | RemoteDevice


@dataclass
class ShardMetadata:
    """Offsets, sizes and placement of one shard.

    Args:
        shard_offsets: Index of its first element, along every dimension.
        shard_sizes: Its size along every dimension.
        placement: ``"rank:1/cpu"`` in a process group, ``"worker1/cpu"`` among RPC workers.

    Raises:
        ValueError: Offsets and sizes have different lengths, or one of them is negative.
    """

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: RemoteDevice | None = None

    def __init__(
        self, shard_offsets: Sequence[int], shard_sizes: Sequence[int], placement: Placement | None = None
    ) -> None:
        self.shard_offsets = [int(item) for item in shard_offsets]
        self.shard_sizes = [int(item) for item in shard_sizes]
        self.placement = RemoteDevice(placement) if isinstance(placement, str) else placement
        if len(self.shard_offsets) != len(self.shard_sizes):
            raise ValueError(
                f"shard_offsets and shard_sizes should have the same number of elements, found "
                f"{len(self.shard_offsets)} and {len(self.shard_sizes)}"
            )
        if any(item < 0 for item in self.shard_offsets):
            raise ValueError(f"shard_offsets should be >=0, found {self.shard_offsets}")
        if any(item < 0 for item in self.shard_sizes):
            raise ValueError(f"shard_sizes should be >= 0, found {self.shard_sizes}")

    def __hash__(self) -> int:
        return hash((tuple(self.shard_offsets), tuple(self.shard_sizes), self.placement))

    @property
    def box(self) -> Box:
        return Box(tuple(self.shard_offsets), tuple(self.shard_sizes))


class MEM_FORMAT_ENCODING(Enum):
    """Memory formats as numbers: `torch.memory_format` itself cannot be pickled."""

    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2


_FORMATS = {
    MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT: torch.contiguous_format,
    MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST: torch.channels_last,
    MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT: torch.preserve_format,
}


@dataclass
class TensorProperties:
    """Properties that all shards of a tensor share."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """Return the properties of a plain tensor."""
        return TensorProperties(tensor.dtype, tensor.layout, tensor.requires_grad, pin_memory=tensor.is_pinned())

    def __getstate__(self) -> tuple[Any, ...]:
        for code, memory_format in _FORMATS.items():
            if memory_format == self.memory_format:
                return self.dtype, self.layout, self.requires_grad, code, self.pin_memory
        raise RuntimeError(f"Invalid torch.memory_format: {self.memory_format}")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype, self.layout, self.requires_grad, code, self.pin_memory = state
        if code not in _FORMATS:
            raise RuntimeError(f"Invalid torch.memory_format encoding: {code}")
        self.memory_format = _FORMATS[code]


@dataclass
class ShardedTensorMetadata:
    """A sharded tensor's shards, size, and the properties that all shards share."""

    shards_metadata: list[ShardMetadata] = field(default_factory=list)
    size: torch.Size = field(default_factory=lambda: torch.Size([]))
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)


@dataclass
class Shard:
    """One part of a sharded tensor.

    Args:
        tensor: The part.
        metadata: Its place in the whole tensor.
    """

    tensor: torch.Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        if list(self.tensor.size()) != self.metadata.shard_sizes:
            raise ValueError(
                f"Shard tensor size does not match with metadata.shard_lengths! Found shard tensor size: "
                f"{list(self.tensor.size())}, metadata.shard_lengths: {self.metadata.shard_sizes}"
            )
        placement = self.metadata.placement
        if placement is not None and placement.device() != self.tensor.device:
            raise ValueError(
                f"Local shard tensor device does not match with local Shard's placement! Found local shard tensor "
                f"device: {self.tensor.device}, local shard metadata placement device: {placement.device()}"
            )

    @classmethod
    def from_tensor_and_offsets(cls, tensor: torch.Tensor, shard_offsets: list[int], rank: int) -> Shard:
        """Create a shard of a rank from a tensor and its offsets.

        Raises:
            ValueError: The offsets do not fit the tensor.
        """
        placement = RemoteDevice(f"rank:{rank}/{tensor.device}")
        return cls(tensor, ShardMetadata(shard_offsets, list(tensor.size()), placement))


def make_shard(part: RRef[Any], metadata: ShardMetadata) -> Shard:
    """Create a shard of a part, on the worker that holds it."""
    return Shard(part.to_here(), metadata)


def join_shards(shards: Sequence[Shard]) -> torch.Tensor:
    """Return shards that form a box as one tensor."""
    boxes = [shard.metadata.box for shard in shards]
    starts = [min(along) for along in zip(*(box.offsets for box in boxes), strict=True)]
    ends = [max(map(sum, along)) for along in zip(*(box.ranges for box in boxes), strict=True)]
    outer = Box.from_ranges((start, end - start) for start, end in zip(starts, ends, strict=True))
    if outer.num_elements != sum(box.num_elements for box in boxes):
        raise RuntimeError(
            f"the {len(boxes)} shards here do not make up one tensor; use local_shards(), or reshard so that they do"
        )
    made = shards[0].tensor.new_empty(outer.sizes)
    for shard, box in zip(shards, boxes, strict=True):
        made[box.slices_in(outer)] = shard.tensor
    return made


def narrow_tensor_by_index(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return a view of a part of a plain tensor."""
    return tensor[Box(tuple(offsets), tuple(sizes)).slices_in(whole(tensor.size()))]


def narrow_tensor(tensor: torch.Tensor, metadata: ShardMetadata) -> torch.Tensor:
    """Return a view of the part of a tensor that belongs to a shard."""
    return narrow_tensor_by_index(tensor, metadata.shard_offsets, metadata.shard_sizes)
