"""Applies a plan to a module: checks it on all ranks before anything is changed, and shards the parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gradwire._interrupts import interruptible
from gradwire._progress_bar import DelayedBar, count_columns
from gradwire._torch import children_of
from gradwire.shard.creation import Placed, check_source, divide_tensor, placed, scatter
from gradwire.shard.group_backend import GroupBackend, Proposal, agree, all_or_none
from gradwire.shard.layout import everywhere
from gradwire.shard.metadata import ShardMetadata, TensorProperties
from gradwire.shard.placement import backend_for, find_group, layout_of, placements_of
from gradwire.shard.sharder import Sharder
from gradwire.shard.sharding_plan import ShardingPlan
from gradwire.shard.sharding_spec import ShardingSpec
from gradwire.shard.tensor import ShardedTensor

Slot = tuple[nn.Module, str]
"""A module, and the attribute that holds something."""

Slots = dict[int, list[Slot]]
"""The slots of each tensor or submodule of a module, by their ids."""


@dataclass(frozen=True, slots=True)
class Step:
    """A parameter or submodule to replace. It is not kept here, so that it is freed once it is replaced."""

    name: str  # as the plan has it
    how: Any  # the spec that divides a parameter, or the `Sharder` that replaces a submodule
    slots: list[Slot]  # its slots; the first is the one that the plan names

    @property
    def value(self) -> Any:
        return getattr(*self.slots[0])

    def replace(self, value: Any) -> None:
        for owner, attribute in self.slots:
            setattr(owner, attribute, value)


@dataclass(slots=True)
class Steps:
    """All steps of a plan."""

    parameters: list[Step] = field(default_factory=list)
    sharders: list[Step] = field(default_factory=list)
    outputs: dict[str, ShardingSpec] = field(default_factory=dict)
    local_outputs: list[str] = field(default_factory=list)


def read_plan(module: nn.Module, plan: ShardingPlan) -> Steps:
    _check_types(module, plan)
    steps = Steps(outputs=dict(plan.output_plan or {}), local_outputs=list(plan.return_local_tensor or []))
    submodules = _slots(module, lambda owner: children_of(owner).items())
    tensors = slots_of_tensors(module)
    for name, entry in plan.plan.items():
        if isinstance(entry, Sharder):
            if name == "":
                raise KeyError("Module path must not be empty for custom sharder! A Sharder replaces a submodule")
            steps.sharders.append(Step(name, entry, list(submodules[id(module.get_submodule(name))])))
    for name, entry in plan.plan.items():
        if isinstance(entry, ShardingSpec):
            _add_parameter(steps.parameters, read_parameter(module, name, entry, tensors))
    _check_sharders(steps)
    for path in (*steps.outputs, *steps.local_outputs):
        if not any(path.startswith(f"{step.name}.") for step in steps.sharders):
            module.get_submodule(path)  # those below a Sharder are known after it has run
    return steps


def _check_types(module: Any, plan: Any) -> None:
    check_module(module)
    if not isinstance(plan, ShardingPlan):
        raise TypeError(f"plan must be a ShardingPlan, not {_kind(plan)}")
    for name, entry in _items(plan.plan, "plan"):
        if not isinstance(entry, ShardingSpec | Sharder):
            raise TypeError(f"Only `ShardingSpec` and `Sharder` are supported to shard '{name}', not {_kind(entry)}")
    for name, entry in _items(plan.output_plan or {}, "output_plan"):
        if not isinstance(entry, ShardingSpec):
            raise TypeError(f"Only `ShardingSpec` is supported as output_plan for '{name}', not {_kind(entry)}")
    paths: Any = plan.return_local_tensor or []  # programs pass anything
    if not isinstance(paths, list | tuple) or not all(isinstance(path, str) for path in paths):
        raise TypeError(f"return_local_tensor must be a list of module paths, not {paths!r}")
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"return_local_tensor lists '{path}' twice")


def check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"only an nn.Module can be sharded, not {_kind(module)}")


def _items(entries: Any, name: str) -> list[tuple[str, Any]]:
    if not isinstance(entries, Mapping) or not all(isinstance(key, str) for key in entries):
        raise TypeError(f"the {name} of a ShardingPlan must be a dict by name, not {entries!r}")
    return list(entries.items())


def _kind(value: object) -> str:
    return type(value).__name__


def slots_of_tensors(module: nn.Module) -> Slots:
    """Return the slots of the parameters and buffers of a module, by their ids."""
    return _slots(module, _tensors_of)


def _tensors_of(owner: nn.Module) -> list[tuple[str, torch.Tensor]]:
    # Not the methods of the owner: a remote module has its own, which raise.
    options: Any = {"recurse": False, "remove_duplicate": False}
    return [*nn.Module.named_parameters(owner, **options), *nn.Module.named_buffers(owner, **options)]


def _slots(module: nn.Module, items: Callable[[nn.Module], Iterable[tuple[str, Any]]]) -> Slots:
    found: Slots = defaultdict(list)
    for owner in module.modules():
        for attribute, value in items(owner):
            found[id(value)].append((owner, attribute))
    return found


def read_parameter(module: nn.Module, name: str, spec: ShardingSpec, tensors: Slots) -> Step:
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    if not hasattr(owner, attribute):
        raise AttributeError(f"{_kind(owner)} has no attribute `{attribute}`, so '{name}' cannot be sharded")
    tensor = getattr(owner, attribute)
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"Expected {_kind(owner)}.{attribute} to be a Tensor, but found {_kind(tensor)}")
    if isinstance(tensor, ShardedTensor):
        raise ValueError(f"param: {name} is already sharded; to shard it differently, call its reshard()")
    if is_lazy(tensor):
        raise ValueError(f"param: {name} has no size yet; run the module once before it is sharded")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError(f"param: {name} is not a contiguous Tensor")
    first = (owner, attribute)
    if not tensor.is_leaf or attribute not in (*dict(_tensors_of(owner)), *owner.__dict__):
        raise ValueError(
            f"{_kind(owner)}.{attribute} is a computed attribute; shard the tensor that it is computed from"
        )
    return Step(name, spec, [first, *(slot for slot in tensors.get(id(tensor), []) if slot != first)])


def _add_parameter(steps: list[Step], new: Step) -> None:
    """Add a step, unless the same parameter is there under another name."""
    known = next((step for step in steps if step.value is new.value), None)
    if known is None:
        steps.append(new)
        return
    size, properties = new.value.size(), TensorProperties.create_from_tensor(new.value)
    if known.how != new.how and (
        known.how.build_metadata(size, properties).shards_metadata
        != new.how.build_metadata(size, properties).shards_metadata
    ):
        raise ValueError(
            f"'{known.name}' and '{new.name}' are the same parameter, which cannot be divided by {known.how} and by "
            f"{new.how}"
        )


def _check_sharders(steps: Steps) -> None:
    # A Sharder may do anything with its submodule, so no other entry may be about that.
    for sharder in steps.sharders:
        inside = {id(item) for item in sharder.value.modules()}
        for step in steps.parameters:
            if any(id(owner) in inside for owner, _ in step.slots):
                raise RuntimeError(
                    f"ShardingPlan is in-valid, trying to shard a parameter: {step.name}, which is in the module of a "
                    f"Sharder: {sharder.name}; parameter sharding should not conflict with the submodule tree of a "
                    f"Sharder"
                )
        for other in steps.sharders:
            if other is not sharder and id(other.value) in inside:
                raise RuntimeError(
                    f"ShardingPlan is in-valid: there is a Sharder for {sharder.name} and another for {other.name}, "
                    f"which is in it; a Sharder should not conflict with the submodule tree of another"
                )


@dataclass(slots=True)
class Work:
    """The steps to do, and the processes that do them."""

    group: GroupBackend | None  # all ranks; None over RPC workers
    steps: Steps = field(default_factory=Steps)
    placed: list[Placed] = field(default_factory=list)  # of each parameter
    has_values: list[bool] = field(default_factory=list)  # for each parameter, whether the source has values
    lacking: dict[str, list[int]] = field(
        default_factory=dict
    )  # whole tensors, and the ranks that have no data of them


def prepare(
    module: nn.Module, read: Callable[[], Steps], specs: Sequence[ShardingSpec], src_rank: int, process_group: Any
) -> Work:
    """Check everything, here and on all ranks.

    `specs` are all specs of the plan: they determine which ranks take part even if `read`, which checks the plan against the
    module, raises.
    """
    group = find_group(specs, process_group)
    work = Work(group)

    def propose() -> Proposal:
        work.steps = read()
        parameters = work.steps.parameters
        work.placed = [placed(step.value, step.how, process_group) for step in parameters]
        shards = [ShardMetadata([0], [0], placement) for spec in specs for placement in placements_of(spec)]
        if shards:  # all placements exist, and are of one kind
            layout_of(shards, backend_for(shards, process_group))
        check_source(group, src_rank)
        work.has_values = [not step.value.is_meta for step in parameters]
        outputs = {path: [str(item) for item in placements_of(spec)] for path, spec in work.steps.outputs.items()}
        return {
            "src_rank": src_rank,
            "parameters": [(step.name, list(step.value.size()), str(step.value.dtype)) for step in parameters],
            "requires_grad": [step.value.requires_grad for step in parameters],
            "sharding_spec": [metadata.shards_metadata for _, metadata, _ in work.placed],
            "sharders": [(step.name, type(step.how).__qualname__) for step in work.steps.sharders],
            "output_plan": outputs,
            "return_local_tensor": work.steps.local_outputs,
            "has_values": work.has_values,
            "inventory": _take_inventory(module, work.steps),
        }

    if group is None:
        propose()
    else:
        proposals = agree(group.group, propose, may_differ=["has_values", "inventory"])
        work.has_values = proposals[src_rank]["has_values"]
        work.lacking = _find_lacking([item["inventory"] for item in proposals], src_rank)
    return work


def specs_in(plan: Any) -> list[ShardingSpec]:
    """Return all specs in a plan, also if it is not a valid one."""
    entries = [getattr(plan, "plan", None), getattr(plan, "output_plan", None)]
    values = [value for entry in entries if isinstance(entry, dict) for value in entry.values()]
    return [value for value in values if isinstance(value, ShardingSpec)]


def run_sharders(work: Work) -> list[nn.Module]:
    """Return the modules of the `Sharder`s, if all of them are valid on all ranks."""
    steps, made = work.steps, list[nn.Module]()

    def run() -> None:
        made.extend(map(_run_sharder, steps.sharders))
        for path in (*steps.outputs, *steps.local_outputs):
            for step, found in zip(steps.sharders, made, strict=True):
                if path.startswith(f"{step.name}."):
                    found.get_submodule(path.removeprefix(f"{step.name}."))

    if steps.sharders and work.group is not None:
        all_or_none(work.group.group, run)
    else:
        run()
    return made


@interruptible
def _run_sharder(step: Step) -> nn.Module:
    found = step.how.shard(step.value)
    if not isinstance(found, nn.Module):
        raise TypeError(f"{_kind(step.how)}.shard must return an nn.Module for '{step.name}', not {_kind(found)}")
    return found


def divide_parameters(work: Work, src_rank: int) -> None:
    """Replace the parameters by sharded tensors, one by one; nothing here keeps the originals."""
    num_parameters, is_source = len(work.steps.parameters), work.group is None or work.group.own_place == src_rank
    with DelayedBar("sharding parameters", count_columns, is_shown=is_source) as bar:
        parts = zip(work.steps.parameters, work.placed, work.has_values, strict=True)
        for number, (step, where, has_values) in enumerate(parts):
            bar.update(number, num_parameters)
            tensor = step.value
            if type(step.how).shard is ShardingSpec.shard:
                made = divide_tensor(where, tensor, step.how, src_rank, has_values)
            else:  # other classes have their own method
                group = where[0].group if isinstance(where[0], GroupBackend) else None
                made = _shard_by_own_spec(step.how, tensor, src_rank, group)
            if isinstance(tensor, nn.Parameter):
                made._is_param = True
            step.replace(made)
            del tensor
        bar.update(num_parameters, num_parameters)


@interruptible
def _shard_by_own_spec(spec: ShardingSpec, tensor: torch.Tensor, src_rank: int, group: Any) -> ShardedTensor:
    return spec.shard(tensor.detach().requires_grad_(tensor.requires_grad), src_rank, group)


Inventory = dict[str, tuple[list[int], str, bool]]
"""Plain tensors that are not sharded, by name: size, dtype, and whether they have data."""


def _take_inventory(module: nn.Module, steps: Steps) -> Inventory:
    taken = {id(step.value) for step in steps.parameters}
    for step in steps.sharders:
        taken |= {id(item) for item in [*step.value.parameters(), *step.value.buffers()]}
    return {
        name: (list(tensor.size()), str(tensor.dtype), not tensor.is_meta)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        if id(tensor) not in taken
    }


def _find_lacking(inventories: Sequence[Inventory], source: int) -> dict[str, list[int]]:
    """Return the names of tensors that the source has data of, each with the ranks that have none."""
    found: dict[str, list[int]] = {}
    for rank, inventory in enumerate(inventories):
        for name, (size, dtype, has_data) in inventory.items():
            if has_data:
                continue
            there = inventories[source].get(name)
            if there is None or there[:2] != (size, dtype):
                has = "no tensor of that name" if there is None else f"one of size {there[0]} and {there[1]}"
                raise ValueError(
                    f"{name} on rank {rank} is on the meta device with size {size} and {dtype}, but rank {source}, the "
                    f"source, has {has}; create the same module on every rank"
                )
            if there[2]:
                found.setdefault(name, []).append(rank)
    return dict(sorted(found.items()))  # the same order on all ranks


def send_lacking(work: Work, module: nn.Module, source: int) -> None:
    """Send ranks the tensors that they lack; tied ones stay tied."""
    if work.group is None:
        return
    slots = slots_of_tensors(module)
    for name, ranks in work.lacking.items():
        path, _, attribute = name.rpartition(".")
        tensor: torch.Tensor = getattr(module.get_submodule(path), attribute)
        layout, devices = everywhere(tensor.size(), ranks), [_own_device(work)] * len(ranks)
        for made in scatter(work.group, tensor, source, layout, devices, has_values=True):
            assert isinstance(made, torch.Tensor)
            value = nn.Parameter(made, made.requires_grad) if isinstance(tensor, nn.Parameter) else made
            Step(name, None, slots[id(tensor)]).replace(value)


def _own_device(work: Work) -> str:
    """Return the device of this rank's shards, where tensors that it lacks go, too."""
    for backend, metadata, layout in work.placed:
        for number in layout.numbers_at(backend.own_place):
            if number < len(metadata.shards_metadata):
                return str(metadata.shards_metadata[number].placement.device())  # type: ignore[union-attr]
    return "cpu"
