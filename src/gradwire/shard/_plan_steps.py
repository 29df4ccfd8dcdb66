"""From a plan to what has to be done to a module, if the plan fits it. Nothing is changed here, and nobody is asked.

Parameters and submodules that a module has in several places are found in all of them: a parameter that is tied stays tied,
and a `Sharder`'s module is put wherever the original was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gradwire.shard.metadata import TensorProperties
from gradwire.shard.sharder import Sharder
from gradwire.shard.sharding_plan import ShardingPlan
from gradwire.shard.sharding_spec import ShardingSpec
from gradwire.shard.tensor import ShardedTensor

Slot = tuple[nn.Module, str]
"""A module, and the name by which it has something."""


@dataclass(frozen=True, slots=True)
class ParameterStep:
    """A parameter that is to be divided. It is not held here, so that it is freed once it is replaced.

    Attributes:
        name: As the plan has it.
        spec: How.
        slots: Where the module has it; the first is the one that the plan names.
    """

    name: str
    spec: ShardingSpec
    slots: list[Slot]

    @property
    def tensor(self) -> torch.Tensor:
        """The parameter."""
        found: torch.Tensor = getattr(*self.slots[0])
        return found


@dataclass(frozen=True, slots=True)
class SharderStep:
    """A submodule that a `Sharder` is to replace."""

    path: str
    sharder: Sharder
    slots: list[Slot]

    @property
    def module(self) -> nn.Module:
        """The submodule."""
        found: nn.Module = getattr(*self.slots[0])
        return found


@dataclass(slots=True)
class Steps:
    """All that a plan asks for."""

    parameters: list[ParameterStep] = field(default_factory=list)
    sharders: list[SharderStep] = field(default_factory=list)
    outputs: dict[str, ShardingSpec] = field(default_factory=dict)
    local_outputs: list[str] = field(default_factory=list)


def read_plan(module: nn.Module, plan: ShardingPlan) -> Steps:
    """What has to be done.

    Raises:
        TypeError: Something in the plan is not what belongs there.
        AttributeError: The module has no such parameter or submodule.
        KeyError: A `Sharder` is to replace the module itself.
        RuntimeError: A `Sharder` and another entry are about the same part of the module.
        ValueError: Something cannot be divided, or is to be divided in two ways.
    """
    _check_types(module, plan)
    steps = Steps(outputs=dict(plan.output_plan or {}), local_outputs=list(plan.return_local_tensor or []))
    submodules = _slots_of_modules(module)
    for path, entry in plan.plan.items():
        if isinstance(entry, Sharder):
            steps.sharders.append(_read_sharder(module, path, entry, submodules))
    tensors = slots_of_tensors(module)
    for name, entry in plan.plan.items():
        if isinstance(entry, ShardingSpec):
            _add_parameter(steps.parameters, read_parameter(module, name, entry, tensors))
    _check_sharders(steps)
    _check_outputs(module, steps)
    return steps


# -- what is in the plan -----------------------------------------------------------------------------------------------


def _check_types(module: Any, plan: Any) -> None:
    check_module(module)
    if not isinstance(plan, ShardingPlan):
        raise TypeError(f"a module is sharded by a ShardingPlan, not {type(plan).__name__}")
    for name, entry in _items(plan.plan, "plan"):
        if not isinstance(entry, ShardingSpec | Sharder):
            raise TypeError(f"Only `ShardingSpec` and `Sharder` are supported to shard '{name}', not {_kind(entry)}")
    for name, entry in _items(plan.output_plan or {}, "output_plan"):
        if not isinstance(entry, ShardingSpec):
            raise TypeError(f"Only `ShardingSpec` is supported as output_plan for '{name}', not {_kind(entry)}")
    paths: Any = plan.return_local_tensor or []  # people pass what they like
    if not isinstance(paths, list | tuple) or not all(isinstance(path, str) for path in paths):
        raise TypeError(f"return_local_tensor is a list of paths of modules, not {paths!r}")
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"return_local_tensor has '{path}' twice")


def check_module(module: Any) -> None:
    """
    Raises:
        TypeError: It is no module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"only an nn.Module can be sharded, not {_kind(module)}")


def _items(entries: Any, name: str) -> list[tuple[str, Any]]:
    if not isinstance(entries, Mapping) or not all(isinstance(key, str) for key in entries):
        raise TypeError(f"the {name} of a ShardingPlan is a dict by names, not {entries!r}")
    return list(entries.items())


def _kind(value: object) -> str:
    return type(value).__name__


# -- parameters --------------------------------------------------------------------------------------------------------


def slots_of_tensors(module: nn.Module) -> dict[int, list[Slot]]:
    """Where a module has each of its parameters and buffers, by their ids."""
    found: dict[int, list[Slot]] = defaultdict(list)
    for owner in module.modules():
        for attribute, tensor in _tensors(owner):
            found[id(tensor)].append((owner, attribute))
    return found


def _tensors(owner: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for tensors in (owner._parameters, owner._buffers):
        for attribute, tensor in tensors.items():
            if tensor is not None:
                yield attribute, tensor


def read_parameter(module: nn.Module, name: str, spec: ShardingSpec, tensors: dict[int, list[Slot]]) -> ParameterStep:
    """A parameter that is to be divided.

    Raises:
        AttributeError: There is none of that name.
        ValueError: It cannot be divided.
    """
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    if not hasattr(owner, attribute):
        raise AttributeError(f"{_kind(owner)} has no attribute `{attribute}`, so '{name}' cannot be sharded")
    tensor = getattr(owner, attribute)
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"Expected {_kind(owner)}.{attribute} to be a Tensor, but found {_kind(tensor)}")
    if isinstance(tensor, ShardedTensor):
        raise ValueError(f"param: {name} is sharded already; to divide it in another way, call its reshard()")
    if is_lazy(tensor):
        raise ValueError(f"param: {name} has no size yet; run the module once before it is sharded")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError(f"param: {name} is not a contiguous Tensor")
    first = (owner, attribute)
    if not tensor.is_leaf or attribute not in (*owner._parameters, *owner._buffers, *owner.__dict__):
        raise ValueError(f"{_kind(owner)}.{attribute} is computed; shard what it is computed from")
    others = [slot for slot in tensors.get(id(tensor), []) if slot != first]
    return ParameterStep(name, spec, [first, *others])


def _add_parameter(steps: list[ParameterStep], new: ParameterStep) -> None:
    """Adds one, unless the same parameter is there under another name."""
    known = next((step for step in steps if step.tensor is new.tensor), None)
    if known is None:
        steps.append(new)
    elif not _is_same(known, new):
        raise ValueError(
            f"'{known.name}' and '{new.name}' are the same parameter, which cannot be divided by {known.spec} and by "
            f"{new.spec}"
        )


def _is_same(one: ParameterStep, other: ParameterStep) -> bool:
    size, properties = one.tensor.size(), TensorProperties.create_from_tensor(one.tensor)
    return one.spec == other.spec or (
        one.spec.build_metadata(size, properties).shards_metadata
        == other.spec.build_metadata(size, properties).shards_metadata
    )


# -- submodules --------------------------------------------------------------------------------------------------------


def _slots_of_modules(module: nn.Module) -> dict[int, list[Slot]]:
    found: dict[int, list[Slot]] = defaultdict(list)
    for parent in module.modules():
        for attribute, child in parent._modules.items():
            if child is not None:
                found[id(child)].append((parent, attribute))
    return found


def _read_sharder(module: nn.Module, path: str, sharder: Sharder, slots: dict[int, list[Slot]]) -> SharderStep:
    if path == "":
        raise KeyError("Module path must not be empty for custom sharder! It is put where a submodule was")
    return SharderStep(path, sharder, list(slots[id(module.get_submodule(path))]))


def _check_sharders(steps: Steps) -> None:
    """A `Sharder` does what it likes with its submodule, so nothing else in the plan may be about that."""
    for sharder in steps.sharders:
        inside = {id(item) for item in sharder.module.modules()}
        for step in steps.parameters:
            if any(id(owner) in inside for owner, _ in step.slots):
                raise RuntimeError(
                    f"ShardingPlan is in-valid, trying to shard a parameter: {step.name}, which is in the module of a "
                    f"Sharder: {sharder.path}; parameter sharding should not conflict with the submodule tree of a Sharder"
                )
        for other in steps.sharders:
            if other is not sharder and id(other.module) in inside:
                raise RuntimeError(
                    f"ShardingPlan is in-valid: there is a Sharder for {sharder.path} and another for {other.path}, "
                    f"which is in it; a Sharder should not conflict with the submodule tree of another"
                )


def _check_outputs(module: nn.Module, steps: Steps) -> None:
    """Paths below that of a `Sharder` are known when it has done its work."""
    for path in (*steps.outputs, *steps.local_outputs):
        if not any(path.startswith(f"{sharder.path}.") for sharder in steps.sharders):
            module.get_submodule(path)
