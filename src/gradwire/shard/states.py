"""Sharded tensors as state of modules: copies, and hooks for modules that have them as plain attributes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradwire.shard.dispatch import implements
from gradwire.shard.tensor import ShardedTensor


@implements(torch.Tensor.__deepcopy__)
def _deepcopy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """A leaf of its own, with the same layout; also what makes it a parameter is kept.

    Raises:
        RuntimeError: It is the result of an operation.
    """
    tensor: ShardedTensor = args[0]
    memo: dict[int, Any] = args[1] if len(args) > 1 else kwargs.get("memo", {})
    if id(tensor) in memo:
        found: ShardedTensor = memo[id(tensor)]
        return found
    if not tensor.is_leaf:
        raise RuntimeError(
            "only sharded tensors that are leaves of the graph support the deepcopy protocol, and this one is the result of "
            "an operation; copy tensor.detach()"
        )
    requires_grad = tensor.requires_grad
    with torch.no_grad():
        parts = tensor._engine.run(copy_part, tensor._layout, tensor._parts, requires_grad=requires_grad)
        made = tensor._with_parts(parts)
    made._metadata = tensor._metadata
    made._is_result = False
    if getattr(tensor, "_is_param", False):
        made._is_param = True  # what makes it a torch.nn.Parameter
    memo[id(tensor)] = made
    return made


def copy_part(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """A part of its own, with its gradient."""
    made = tensor.detach().clone().requires_grad_(requires_grad)
    if tensor.is_leaf and tensor.grad is not None:
        made.grad = tensor.grad.detach().clone()
    return made


def state_dict_hook(module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Puts sharded tensors that are plain attributes of a module into its `state_dict`.

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
    """Makes sharded tensors of a `state_dict` the attributes of a module that they were before.

    To be registered with ``torch.nn.Module._register_load_state_dict_pre_hook(hook, True)``. What was taken is removed from
    the dict, which is a copy of the caller's: loading with ``strict=True`` would not know it.
    """
    for below, submodule in module.named_modules():
        for name in list(vars(submodule)):
            key = _key(prefix, below, name)
            if isinstance(state_dict.get(key), ShardedTensor):
                setattr(submodule, name, state_dict.pop(key))


def _key(prefix: str, module: str, name: str) -> str:
    return f"{prefix}{module}.{name}" if module else f"{prefix}{name}"
