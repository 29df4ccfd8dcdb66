"""Sharded tensors as state of modules: copies, and hooks for modules that have them as plain attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradwire.errors import ConfigurationError
from gradwire.shard.backend import Backend
from gradwire.shard.group_backend import GroupBackend
from gradwire.shard.layout import whole
from gradwire.shard.tensor import ShardedTensor


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


Values = dict[str, Any]
"""State of one parameter, or of one of its parts."""

RESERVED = ("params", "param_names")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A named parameter.

    Attributes:
        name: Its name.
        value: The parameter.
        parts: What this rank has of it: its shards, or the whole parameter.
    """

    name: str
    value: torch.Tensor
    parts: tuple[torch.Tensor, ...]

    @classmethod
    def take(cls, name: str, value: Any) -> Parameter:
        """A parameter as people give it.

        Raises:
            ConfigurationError: It is no tensor, or divided among RPC workers.
        """
        if not isinstance(value, torch.Tensor):
            raise ConfigurationError(f"parameter {name!r} is no tensor, but of type {type(value).__name__}")
        if not isinstance(value, ShardedTensor):
            return cls(name, value, (value,))
        if not isinstance(value._backend, GroupBackend):
            raise ConfigurationError(
                f"parameter {name!r} is divided among RPC workers; use gradwire.optim.DistributedOptimizer for it"
            )
        return cls(name, value, _tensors(value))

    @property
    def is_sharded(self) -> bool:
        """Whether ranks have different parts of it."""
        return isinstance(self.value, ShardedTensor)

    @property
    def is_stale(self) -> bool:
        """Whether it has other parts by now."""
        if not isinstance(self.value, ShardedTensor):
            return False
        now = self.value._parts
        return len(now) != len(self.parts) or any(a is not b for a, b in zip(now, self.parts, strict=True))


def _tensors(value: ShardedTensor) -> tuple[torch.Tensor, ...]:
    return tuple(part for part in value._parts if isinstance(part, torch.Tensor))  # of a process group all are


# -- out -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Described:
    """What a rank has of the state of one parameter.

    Attributes:
        sharded: What has the size of the parts, with its dtype.
        plain: The rest, itself.
    """

    sharded: dict[str, torch.dtype]
    plain: Values


def collect(parameters: Sequence[Parameter], state: Mapping[torch.Tensor, Values]) -> dict[str, Values]:
    """State by the names of parameters, from that of this rank's tensors. Every rank must call it.

    Args:
        parameters: The same on every rank, in the same order.
        state: Of the tensors of this rank.
    """
    said = _describe_all(parameters, state)
    found: dict[str, Values] = {}
    for parameter in parameters:
        if parameter.is_sharded:
            values = _joined(parameter, state, said[parameter.name])
        else:
            values = dict(state.get(parameter.value, {}))
        if values:
            found[parameter.name] = values
    return found


def _describe_all(parameters: Sequence[Parameter], state: Mapping[torch.Tensor, Values]) -> dict[str, list[_Described]]:
    """What everybody has of each sharded parameter; ranks of a group talk once."""
    by_backend: dict[Backend, dict[str, _Described]] = {}
    for parameter in parameters:
        if isinstance(parameter.value, ShardedTensor):
            by_backend.setdefault(parameter.value._backend, {})[parameter.name] = _describe(parameter, state)
    found: dict[str, list[_Described]] = {}
    for backend, own in by_backend.items():
        everybody = backend.gather_objects(own)
        found.update({name: [each[name] for each in everybody] for name in own})
    return found


def _describe(parameter: Parameter, state: Mapping[torch.Tensor, Values]) -> _Described:
    made = _Described({}, {})
    for part in parameter.parts:
        for key, value in state.get(part, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == part.shape:
                made.sharded[key] = value.dtype
            else:
                made.plain.setdefault(key, value)
    return made


def _joined(parameter: Parameter, state: Mapping[torch.Tensor, Values], said: Sequence[_Described]) -> Values:
    """One state, from what everybody has of it. Parts that never had a gradient have none; zeros stand for it."""
    assert isinstance(parameter.value, ShardedTensor)
    plain = {key: value for each in reversed(said) for key, value in each.plain.items()}
    dtypes = {key: dtype for each in said for key, dtype in each.sharded.items() if key not in plain}
    found: Values = {}
    for key, dtype in dtypes.items():
        own = [state.get(part, {}).get(key) for part in parameter.parts]
        parts = [
            torch.zeros_like(part, dtype=dtype, requires_grad=False) if value is None else _dense(value)
            for part, value in zip(parameter.parts, own, strict=True)
        ]
        with torch.no_grad():
            found[key] = parameter.value._with_parts(parts, dtype)
    return {**plain, **found}


def _dense(value: torch.Tensor) -> torch.Tensor:
    return value.to_dense() if value.is_sparse else value


# -- in ------------------------------------------------------------------------------------------------------------------


def match(
    state_dict: Mapping[str, Any], groups: Sequence[Sequence[Parameter]]
) -> tuple[dict[str, Values], list[dict[str, Any]]]:
    """State by the names of parameters, and the options of each group.

    Raises:
        ConfigurationError: The state dict is one of other parameters.
    """
    try:
        state, saved = state_dict["state"], list(state_dict["param_groups"])
        keys = [key for group in saved for key in group["params"]]
    except (KeyError, TypeError) as error:
        raise ConfigurationError('not the state of an optimizer: it needs "state" and "param_groups"') from error
    if len(saved) != len(groups):
        raise ConfigurationError(
            f"loaded state dict has a different number of parameter groups: {len(saved)} instead of {len(groups)}"
        )
    theirs = [name for group in saved for name in group.get("param_names") or group["params"]]
    names = _names(theirs, [len(group["params"]) for group in saved], groups)
    found = {name: state[key] for key, name in zip(keys, names, strict=True) if key in state}
    return found, [{key: value for key, value in group.items() if key not in RESERVED} for group in saved]


def _names(theirs: list[Any], sizes: list[int], groups: Sequence[Sequence[Parameter]]) -> list[str]:
    """Which parameter each entry of a state dict means."""
    own = [item.name for group in groups for item in group]
    if sorted(own) == sorted(str(name) for name in theirs):
        return [str(name) for name in theirs]
    if any(isinstance(name, str) for name in theirs):
        missing, unexpected = sorted(set(own) - set(theirs)), sorted(set(theirs) - set(own))
        raise ConfigurationError(f"the state is of other parameters: missing {missing}, unexpected {unexpected}")
    if sizes != [len(group) for group in groups]:
        raise ConfigurationError(
            "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
        )
    return own


def divide(parameter: Parameter, values: Mapping[str, Any]) -> list[Values]:
    """The state of each of this rank's parts, which shares no memory with what it was made of. Every rank must call it.

    Raises:
        ConfigurationError: A tensor is that of another parameter.
    """
    found: list[Values] = [{} for _ in parameter.parts]
    for key in sorted(values):  # on every rank in the same order, since tensors may have to move
        for part, value in zip(found, _divided(parameter, key, values[key]), strict=True):
            part[key] = value
    return found


def _divided(parameter: Parameter, key: str, value: Any) -> list[Any]:
    target = parameter.value
    if isinstance(value, ShardedTensor):
        if value.size() != target.size():
            raise ConfigurationError(
                f"{key!r} of parameter {parameter.name!r} has size {list(value.size())}, the parameter {list(target.size())}"
            )
        return _from_sharded(target, value)
    if not isinstance(value, torch.Tensor):
        return [value for _ in parameter.parts]
    if isinstance(target, ShardedTensor) and value.shape == target.size():
        outer = whole(target.size())
        return [value.detach()[box.slices_in(outer)].clone() for box in target._boxes()]
    return [value.detach().clone() for _ in parameter.parts]


def _from_sharded(target: torch.Tensor, value: ShardedTensor) -> list[Any]:
    with torch.no_grad():
        if not isinstance(target, ShardedTensor):
            return [value.full_tensor()]
        if value._backend != target._backend:
            raise ConfigurationError("the state is divided among others than the parameter; gather it first")
        moved = value._backend.move(value._parts, value._layout, target._layout, value._like)
        return [part.detach().clone() if isinstance(part, torch.Tensor) else part for part in moved]
