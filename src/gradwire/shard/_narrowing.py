"""Parts of a plain tensor, by where they lie: PyTorch's private names."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.shard._geometry import Box
from gradwire.shard.layouts import whole
from gradwire.shard.metadata import ShardMetadata


def narrow_tensor_by_index(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """A view of a part of a tensor.

    Args:
        tensor: Not sharded.
        offsets: Where the part begins, along every dimension.
        sizes: Its extent along every dimension.

    Raises:
        ValueError: There are not as many offsets and sizes as dimensions.
    """
    return tensor[Box(tuple(offsets), tuple(sizes)).slices_in(whole(tensor.size()))]


def narrow_tensor(tensor: torch.Tensor, metadata: ShardMetadata) -> torch.Tensor:
    """A view of the part of a tensor that a shard is to have.

    Raises:
        ValueError: The shard has another number of dimensions.
    """
    return narrow_tensor_by_index(tensor, metadata.shard_offsets, metadata.shard_sizes)
