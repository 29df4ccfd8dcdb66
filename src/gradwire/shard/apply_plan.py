"""What is to be done to a module is found out, and agreed upon by all ranks, before anything is changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gradwire.shard.backend import Backend
from gradwire.shard.creation import check_source, placed, scatter
from gradwire.shard.group_backend import GroupBackend, Proposal, agree
from gradwire.shard.layout import everywhere
from gradwire.shard.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from gradwire.shard.placement import backend_for, find_group, layout_of, placements_of
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


Inventory = dict[str, tuple[list[int], str, bool]]
"""Plain tensors that stay as they are, by name: size, dtype, and whether they have data."""


def take_inventory(module: nn.Module, steps: Steps) -> Inventory:
    """What neither the plan nor a `Sharder` is about to replace."""
    taken = {id(step.tensor) for step in steps.parameters}
    for step in steps.sharders:
        taken |= {id(item) for item in [*step.module.parameters(), *step.module.buffers()]}
    return {
        name: (list(tensor.size()), str(tensor.dtype), not tensor.is_meta)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        if id(tensor) not in taken
    }


def find_lacking(everybody: Sequence[Inventory], source: int) -> dict[str, list[int]]:
    """Names of tensors that the source has data of, each with the ranks that have none.

    Raises:
        ValueError: Such a tensor is another one at the source.
    """
    found: dict[str, list[int]] = {}
    for rank, inventory in enumerate(everybody):
        for name, (size, dtype, has_data) in inventory.items():
            if has_data:
                continue
            there = everybody[source].get(name)
            if there is None or there[:2] != (size, dtype):
                raise ValueError(
                    f"{name} on rank {rank} is on the meta device, and rank {source}, the source, has no such tensor: "
                    f"{there} instead of size {size} and {dtype}"
                )
            if there[2]:
                found.setdefault(name, []).append(rank)
    return dict(sorted(found.items()))  # all ranks must go through them in the same order


def supply(backend: Backend, module: nn.Module, lacking: dict[str, list[int]], source: int, device: str) -> None:
    """Gives ranks the tensors that they lack; tied ones stay tied."""
    slots = slots_of_tensors(module)
    for name, ranks in lacking.items():
        path, _, attribute = name.rpartition(".")
        tensor: torch.Tensor = getattr(module.get_submodule(path), attribute)
        layout = everywhere(tensor.size(), ranks)
        for made in scatter(backend, tensor, source, layout, [device] * len(ranks), has_values=True):
            _put(made, slots[id(tensor)], isinstance(tensor, nn.Parameter))


def _put(made: Any, slots: Sequence[Slot], is_parameter: bool) -> None:
    value = nn.Parameter(made, made.requires_grad) if is_parameter else made
    for owner, attribute in slots:
        setattr(owner, attribute, value)


@dataclass(slots=True)
class Work:
    """What is to be done, and by whom.

    Attributes:
        steps: What.
        placed: For each parameter, its backend and who is to have what.
        group: All ranks; None over RPC workers.
        has_values: For each parameter, whether the source has values.
        lacking: Names of tensors that stay whole, each with the ranks that have no data of it.
    """

    steps: Steps
    placed: list[tuple[Backend, ShardedTensorMetadata]]
    group: GroupBackend | None
    has_values: list[bool]
    lacking: dict[str, list[int]] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """Where this rank's shards are to be, and so all that it lacks."""
        for backend, metadata in self.placed:
            layout = layout_of(metadata.shards_metadata, backend)
            for number in layout.numbers_at(backend.own_place):
                if number < len(metadata.shards_metadata):
                    return str(metadata.shards_metadata[number].placement.device())  # type: ignore[union-attr]
        return "cpu"


def prepare(
    module: nn.Module, read: Callable[[], Steps], specs: Sequence[ShardingSpec], src_rank: int, process_group: Any
) -> Work:
    """Checks everything, here and on all ranks.

    Args:
        module: What is to be sharded.
        read: Finds out what is asked for, and whether the module can do it.
        specs: All that are in the plan; they tell who takes part even if the plan cannot be read.
        src_rank: The rank in the group whose values count.
        process_group: The ranks; None for the default group.

    Raises:
        Exception: What `read` raises, here or on another rank.
        ValueError: A placement names nobody, or ranks want different things.
        RuntimeError: There is no process group, or this process is no RPC worker.
    """
    group = find_group(specs, process_group)
    work = Work(Steps(), [], group, [])

    def find_out() -> Proposal:
        work.steps = read()
        work.placed = [placed(step.tensor, step.spec, process_group) for step in work.steps.parameters]
        _check_places(specs, process_group)
        if group is not None:
            check_source(group, src_rank)
        work.has_values = [not step.tensor.is_meta for step in work.steps.parameters]
        return {**_describe(work, src_rank), "inventory": take_inventory(module, work.steps)}

    if group is None:
        find_out()
    else:
        said = agree(group.group, find_out, may_differ=["has_values", "inventory"])
        work.has_values = said[src_rank]["has_values"]
        work.lacking = find_lacking([item["inventory"] for item in said], src_rank)
    return work


def _describe(work: Work, src_rank: int) -> Proposal:
    """What this rank is about to do, to be compared with the others."""
    steps, parameters = work.steps, work.steps.parameters
    return {
        "src_rank": src_rank,
        "parameters": [(item.name, list(item.tensor.size()), str(item.tensor.dtype)) for item in parameters],
        "requires_grad": [item.tensor.requires_grad for item in parameters],
        "sharding_spec": [metadata.shards_metadata for _, metadata in work.placed],
        "sharders": [(item.path, type(item.sharder).__qualname__) for item in steps.sharders],
        "output_plan": {path: [str(item) for item in placements_of(spec)] for path, spec in steps.outputs.items()},
        "return_local_tensor": steps.local_outputs,
        "has_values": work.has_values,
    }


def specs_in(plan: Any) -> list[ShardingSpec]:
    """Whatever specs are there, also in a plan that is not one."""
    entries = [getattr(plan, "plan", None), getattr(plan, "output_plan", None)]
    values = [value for entry in entries if isinstance(entry, dict) for value in entry.values()]
    return [value for value in values if isinstance(value, ShardingSpec)]


def _check_places(specs: Sequence[ShardingSpec], process_group: Any) -> None:
    """
    Raises:
        ValueError: A placement names nobody, or some name ranks and some RPC workers.
    """
    shards = [ShardMetadata([0], [0], placement) for spec in specs for placement in placements_of(spec)]
    if shards:
        layout_of(shards, backend_for(shards, process_group))
