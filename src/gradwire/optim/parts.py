"""Sharded parameters: each of their parts is a parameter of its own to the owner, and all together are one to people.

The parts of ``weight`` are called by where they begin, ``weight[0, 0]`` and ``weight[4, 0]``. State dicts do not show them:
state of the parts is joined on the way out and divided on the way in. So a state dict does not depend on how a parameter is
divided, and loads in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.errors import ConfigurationError, OptimizerError
from gradwire.optim.states import NamedState
from gradwire.rref import RRef
from gradwire.shard._geometry import Box
from gradwire.shard.layouts import Layout, whole
from gradwire.shard.tensor import ShardedTensor
from gradwire.shard.worker_engine import WorkerEngine


@dataclass(frozen=True, slots=True)
class PartOf:
    """What a part is a part of.

    Attributes:
        whole: The name of the sharded parameter.
        box: Where the part lies in it.
        size: Of the whole.
    """

    whole: str
    box: Box
    size: tuple[int, ...]

    @property
    def name(self) -> str:
        """By which the owner knows the part; does not depend on who the owner is."""
        return f"{self.whole}[{', '.join(str(offset) for offset in self.box.offsets)}]"


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A sharded parameter as it was when an optimizer took it.

    Attributes:
        name: Its name.
        tensor: The parameter.
        layout: How it was divided.
    """

    name: str
    tensor: ShardedTensor
    layout: Layout

    def parts(self) -> list[tuple[PartOf, RRef[Any]]]:
        """All parts with elements, and references to them."""
        size = tuple(self.tensor.size())
        return [
            (PartOf(self.name, box, size), part if isinstance(part, RRef) else RRef(part))
            for box, part in zip(self.layout.boxes, self.tensor._parts, strict=True)
            if box.num_elements
        ]


def take_sharded(name: str, tensor: ShardedTensor) -> ShardedParameter:
    """A sharded parameter, for an optimizer.

    Raises:
        ConfigurationError: Its parts are not on RPC workers.
    """
    if not isinstance(tensor._engine, WorkerEngine):
        raise ConfigurationError(
            f"parameter {name!r} is divided among the ranks of a process group, each of which steps its own part; use "
            f"gradwire.shard.ShardedOptimizer there"
        )
    return ShardedParameter(name, tensor, tensor._layout)


def prepare_step(parameters: Iterable[ShardedParameter]) -> None:
    """Looks whether the parts are still those that the optimizer knows, and waits for operations that still read them.

    Raises:
        OptimizerError: A parameter was resharded.
    """
    for parameter in parameters:
        if parameter.tensor._layout is not parameter.layout:
            raise OptimizerError(
                f"parameter {parameter.name!r} was resharded, so this optimizer has parts that are not in use any more; "
                f"make another one, and load this one's state_dict() into it"
            )
        parameter.tensor._engine.settle()  # a step changes parts in place


def fold_groups(groups: Iterable[Mapping[str, Any]], parts: Mapping[str, PartOf]) -> list[dict[str, Any]]:
    """Groups with one name for each parameter, whether it is divided or not."""
    folded = []
    for group in groups:
        names = list(dict.fromkeys(parts[name].whole if name in parts else name for name in group["param_names"]))
        folded.append({**group, "params": names, "param_names": names})
    return folded


def join_states(state: NamedState, parts: Mapping[str, PartOf]) -> NamedState:
    """State by the names of whole parameters."""
    found: NamedState = {}
    pieces: dict[str, list[tuple[PartOf, dict[str, Any]]]] = {}
    for name, values in state.items():
        if name in parts:
            pieces.setdefault(parts[name].whole, []).append((parts[name], values))
        else:
            found[name] = values
    for name, items in pieces.items():
        keys = dict.fromkeys(key for _, values in items for key in values)
        found[name] = {key: _join([(part, values[key]) for part, values in items if key in values]) for key in keys}
    return found


def _join(items: Sequence[tuple[PartOf, Any]]) -> Any:
    """What parts have of one kind: a tensor of the whole, or what the first of them has (a number of steps).

    Parts that never had a gradient have no state; zeros stand for it.
    """
    first = items[0][1]
    if not all(isinstance(value, torch.Tensor) and value.shape == part.box.sizes for part, value in items):
        return first
    size = items[0][0].size
    made = torch.zeros(size, dtype=first.dtype, device=first.device)
    for part, value in items:
        made[part.box.slices_in(whole(size))] = value.to_dense() if value.is_sparse else value
    return made


def divide_states(state: NamedState, parts: Mapping[str, PartOf]) -> NamedState:
    """State by the names of parts, from that of whole parameters."""
    wholes = {part.whole for part in parts.values()}
    found = {name: values for name, values in state.items() if name not in wholes}
    for name, part in parts.items():
        if part.whole in state:
            found[name] = {key: _take(value, part) for key, value in state[part.whole].items()}
    return found


def _take(value: Any, part: PartOf) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == part.size:
        value = value[part.box.slices_in(whole(part.size))]
    return value.clone(memory_format=torch.contiguous_format)  # a count of steps, too: every part counts its own
