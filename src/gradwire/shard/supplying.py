"""Only the source needs data: what stays whole, and is on the ``meta`` device on other ranks, gets the source's values.

So a model that no rank but one has room for can be sharded: the others make it on the ``meta`` device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gradwire.shard._plan_steps import Slot, Steps, slots_of_tensors
from gradwire.shard.engines import Engine
from gradwire.shard.layouts import everywhere
from gradwire.shard.scattering import scatter

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


def supply(engine: Engine, module: nn.Module, lacking: dict[str, list[int]], source: int, device: str) -> None:
    """Gives ranks the tensors that they lack; tied ones stay tied."""
    slots = slots_of_tensors(module)
    for name, ranks in lacking.items():
        path, _, attribute = name.rpartition(".")
        tensor: torch.Tensor = getattr(module.get_submodule(path), attribute)
        layout = everywhere(tensor.size(), ranks)
        for made in scatter(engine, tensor, source, layout, [device] * len(ranks), has_values=True):
            _put(made, slots[id(tensor)], isinstance(tensor, nn.Parameter))


def _put(made: Any, slots: Sequence[Slot], is_parameter: bool) -> None:
    value = nn.Parameter(made, made.requires_grad) if is_parameter else made
    for owner, attribute in slots:
        setattr(owner, attribute, value)
