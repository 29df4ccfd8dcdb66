"""`ShardedTensor`, what makes one, and what says how a torch function treats one: PyTorch's names."""

from __future__ import annotations

from gradwire.shard import creation as reshard
from gradwire.shard import creation as utils
from gradwire.shard import ops, serialization  # noqa: F401  # registers how tensors are sent and pickled
from gradwire.shard.creation import (
    _create_tensor_from_params,
    empty,
    full,
    init_from_local_shards,
    ones,
    rand,
    randn,
    zeros,
)
from gradwire.shard.dispatch import _sharded_op_impl, custom_sharded_op_impl
from gradwire.shard.metadata import MEM_FORMAT_ENCODING, Shard, ShardedTensorMetadata, TensorProperties
from gradwire.shard.state_dict import pre_load_state_dict_hook, state_dict_hook
from gradwire.shard.tensor import ShardedTensor, ShardedTensorBase

__all__ = [
    "MEM_FORMAT_ENCODING",
    "Shard",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "TensorProperties",
    "_create_tensor_from_params",
    "_sharded_op_impl",
    "custom_sharded_op_impl",
    "empty",
    "full",
    "init_from_local_shards",
    "ones",
    "ops",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "reshard",
    "state_dict_hook",
    "utils",
    "zeros",
]
