"""One shard, and several that make up a box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.remote_device import _remote_device

from gradwire.rref import RRef
from gradwire.shard._geometry import Box
from gradwire.shard.metadata import ShardMetadata


@dataclass
class Shard:
    """One part of a sharded tensor.

    Args:
        tensor: The part.
        metadata: Where it lies in the whole.
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
        """A shard of a rank, from the tensor and where it begins.

        Raises:
            ValueError: The offsets do not fit the tensor.
        """
        placement = _remote_device(f"rank:{rank}/{tensor.device}")
        return cls(tensor, ShardMetadata(shard_offsets, list(tensor.size()), placement))


def make_shard(part: RRef[Any], metadata: ShardMetadata) -> Shard:
    """A shard of a part that is here, on the worker that has it."""
    return Shard(part.to_here(), metadata)


def join_shards(shards: Sequence[Shard]) -> torch.Tensor:
    """Shards that make up a box, as one tensor.

    Raises:
        RuntimeError: They do not.
    """
    boxes = [shard.metadata.box for shard in shards]
    num_dims = len(boxes[0].sizes)
    start = tuple(min(box.offsets[dim] for box in boxes) for dim in range(num_dims))
    end = tuple(max(box.offsets[dim] + box.sizes[dim] for box in boxes) for dim in range(num_dims))
    outer = Box(start, tuple(last - first for first, last in zip(start, end, strict=True)))
    if outer.num_elements != sum(box.num_elements for box in boxes):
        raise RuntimeError(
            f"the {len(boxes)} shards here do not make up one tensor; use local_shards(), or reshard so that they do"
        )
    made = shards[0].tensor.new_empty(outer.sizes)
    for shard, box in zip(shards, boxes, strict=True):
        made[box.slices_in(outer)] = shard.tensor
    return made
