"""What is known of a sharded tensor without its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.distributed.remote_device import _remote_device

from gradwire.shard._geometry import Box

Placement = str | _remote_device


@dataclass
class ShardMetadata:
    """Where one shard lies in the tensor, and who has it.

    Args:
        shard_offsets: Its first element, along every dimension.
        shard_sizes: Its extent along every dimension.
        placement: ``"rank:1/cpu"`` in a process group, ``"worker1/cpu"`` among RPC workers.

    Raises:
        ValueError: The two do not fit together, or one of them is negative.
    """

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: _remote_device | None = None

    def __init__(
        self, shard_offsets: Sequence[int], shard_sizes: Sequence[int], placement: Placement | None = None
    ) -> None:
        self.shard_offsets = [int(item) for item in shard_offsets]
        self.shard_sizes = [int(item) for item in shard_sizes]
        self.placement = _remote_device(placement) if isinstance(placement, str) else placement
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
        """The part of the tensor that it is."""
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
    """What all shards of a tensor have in common."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """Those of an ordinary tensor."""
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
    """A sharded tensor: its shards, its size, and what the shards have in common."""

    shards_metadata: list[ShardMetadata] = field(default_factory=list)
    size: torch.Size = field(default_factory=lambda: torch.Size([]))
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)
