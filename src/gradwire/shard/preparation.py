"""What is to be done to a module is found out, and agreed upon by all ranks, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from gradwire.shard._plan_steps import Steps
from gradwire.shard.agreement import Said, agree
from gradwire.shard.creation import check_source, placed
from gradwire.shard.engines import Engine
from gradwire.shard.group_engine import GroupEngine
from gradwire.shard.metadata import ShardedTensorMetadata, ShardMetadata
from gradwire.shard.placing import engine_for, find_group, layout_of, placements_of
from gradwire.shard.sharding_spec import ShardingSpec
from gradwire.shard.supplying import find_lacking, take_inventory


@dataclass(slots=True)
class Work:
    """What is to be done, and by whom.

    Attributes:
        steps: What.
        placed: For each parameter, its engine and who is to have what.
        group: All ranks; None over RPC workers.
        has_values: For each parameter, whether the source has values.
        lacking: Names of tensors that stay whole, each with the ranks that have no data of it.
    """

    steps: Steps
    placed: list[tuple[Engine, ShardedTensorMetadata]]
    group: GroupEngine | None
    has_values: list[bool]
    lacking: dict[str, list[int]] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """Where this rank's shards are to be, and so all that it lacks."""
        for engine, metadata in self.placed:
            layout = layout_of(metadata.shards_metadata, engine)
            for number in layout.of(engine.here):
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

    def find_out() -> Said:
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
        said = agree(group, find_out, own_matters=["has_values", "inventory"])
        work.has_values = said[src_rank]["has_values"]
        work.lacking = find_lacking([item["inventory"] for item in said], src_rank)
    return work


def _describe(work: Work, src_rank: int) -> Said:
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
        layout_of(shards, engine_for(shards, process_group))
