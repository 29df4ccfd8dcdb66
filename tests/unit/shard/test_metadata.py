"""Parts of plain tensors that shards are to have."""

from __future__ import annotations

import pytest
import torch

import gradwire.shard
from gradwire.shard import ShardMetadata


def test_narrowing() -> None:
    tensor = torch.arange(12).view(3, 4)
    found = gradwire.shard._utils.narrow_tensor(tensor, ShardMetadata([1, 2], [2, 2]))
    assert found.tolist() == [[6, 7], [10, 11]]
    assert found.data_ptr() == tensor[1, 2:].data_ptr()
    with pytest.raises(ValueError, match=r"shorter|longer"):
        gradwire.shard._utils.narrow_tensor_by_index(tensor, [0], [1])
