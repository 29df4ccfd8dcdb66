"""PyTorch's module ``sharded_tensor``: the class, the functions that make one, custom operations, hooks for state dicts."""

from __future__ import annotations

from typing import Any

from torch import nn

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


def state_dict_hook(module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Put sharded tensors that are plain attributes of a module into its `state_dict`.

    To be registered with `torch.nn.Module._register_state_dict_hook`.
    """
    for below, submodule in module.named_modules():
        for name, value in vars(submodule).items():
            if isinstance(value, ShardedTensor):
                destination[_key(prefix, below, name)] = value


def pre_load_state_dict_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Make sharded tensors of a `state_dict` the attributes of a module that they were before.

    To be registered with ``torch.nn.Module._register_load_state_dict_pre_hook(hook, True)``. They are removed from the
    dict, which is a copy of the caller's: loading with ``strict=True`` would not know them.
    """
    for below, submodule in module.named_modules():
        for name in list(vars(submodule)):
            key = _key(prefix, below, name)
            if isinstance(state_dict.get(key), ShardedTensor):
                setattr(submodule, name, state_dict.pop(key))


def _key(prefix: str, module: str, name: str) -> str:
    return f"{prefix}{module}.{name}" if module else f"{prefix}{name}"
