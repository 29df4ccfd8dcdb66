"""Reads the parameters passed to an optimizer into groups of named references; sharded ones shard by shard."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradwire.errors import ConfigurationError, OptimizerError
from gradwire.nn.module_owner import HasRemoteParameters, walk_parameters
from gradwire.nn.remote_module import takes_parameters
from gradwire.optim.state_dict import NamedState, options_of
from gradwire.rref import RRef
from gradwire.shard.layout import Box, Layout, whole
from gradwire.shard.sharded_optim import named_params_with_sharded_tensor
from gradwire.shard.tensor import ShardedTensor
from gradwire.shard.worker_backend import WorkerBackend

Named = tuple[str, RRef[Any]]


@dataclass(frozen=True, slots=True)
class Group:
    entries: list[Named]  # unique names and references, in order; of sharded parameters, those of the parts
    options: dict[str, Any]
    sharded: list[ShardedParameter] = field(default_factory=list)
    parts: dict[str, PartOf] = field(default_factory=dict)  # by the names of entries

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.entries]


class GroupReader:
    """Reads groups, and gives every parameter a unique name.

    Parameters of a module, and those in pairs, have names; others are named by their number. If a module's names are
    taken, they are prefixed with the module's number. So the same list gives the same names wherever the parameters
    are. Shards of a parameter are named by its name and their offsets.
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._num_parameters = 0
        self._num_modules = 0

    def copy(self) -> GroupReader:
        """Return a reader with the same names taken."""
        made = copy.copy(self)
        made._taken = set(self._taken)
        return made

    @takes_parameters
    def read_all(self, params: Any) -> list[Group]:
        """Return the groups, or one group for parameters that are not in any."""
        if isinstance(params, dict):
            raise ConfigurationError("put the group in a list: [{'params': [...]}]")
        items = _items(params)
        if not any(isinstance(item, dict) for item in items):
            return [self.read({"params": items})]
        return [self.read(item) for item in items]

    @takes_parameters
    def read(self, group: Any) -> Group:
        if not isinstance(group, dict) or "params" not in group:
            found = f"one with the keys {list(group)!r:.100}" if isinstance(group, dict) else type(group).__name__
            raise ConfigurationError(f'a parameter group is a dict with the key "params", not {found}')
        params = group["params"]
        if isinstance(params, set):
            raise ConfigurationError("parameters in a set have no order; pass a list")
        made = Group([], options_of(group))
        for item in _items(params):
            for name, parameter in self._named(item):
                self._add(made, name, parameter)
        if not made.entries:
            raise ConfigurationError("optimizer got an empty parameter list")
        return made

    def _named(self, item: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
            if item[0] in self._taken:
                raise ConfigurationError(f"two parameters have the name {item[0]!r}; give each its own")
            yield item
        elif isinstance(item, HasRemoteParameters | torch.nn.Module):
            number, self._num_modules = self._num_modules, self._num_modules + 1
            found = list(walk_parameters(item, own=_own_parameters))  # type: ignore[arg-type]  # both kinds work
            prefix = f"{number}." if any(name in self._taken for name, _ in found) else ""
            yield from ((prefix + name, parameter) for name, parameter in found)
        else:
            yield str(self._num_parameters), item

    def _add(self, group: Group, name: str, parameter: Any) -> None:
        self._take(name)
        self._num_parameters += 1
        if not isinstance(parameter, ShardedTensor):
            group.entries.append((name, _reference(parameter)))
            return
        sharded = ShardedParameter.take(name, parameter)
        group.sharded.append(sharded)
        for part, rref in sharded.parts():
            self._take(part.name)
            group.entries.append((part.name, rref))
            group.parts[part.name] = part

    def _take(self, name: str) -> None:
        if name in self._taken:
            raise ConfigurationError(f"two parameters would have the name {name!r}; pass (name, parameter) pairs")
        self._taken.add(name)


_own_parameters = functools.partial(named_params_with_sharded_tensor, recurse=False)


def _items(params: Any) -> list[Any]:
    """Return the items of an iterable, or a single parameter or module in a list."""
    if isinstance(params, torch.Tensor | torch.nn.Module | RRef | HasRemoteParameters):
        return [params]
    if isinstance(params, str | bytes) or not isinstance(params, Iterable):
        raise ConfigurationError(f"expected a list of parameters, not {type(params).__name__}")
    return list(params)


def _reference(item: Any) -> RRef[Any]:
    if isinstance(item, RRef):
        return item
    if isinstance(item, torch.Tensor):
        return RRef(item)
    raise ConfigurationError(
        f"expected an RRef of a parameter, a module, a parameter or a ShardedTensor, not {type(item).__name__}; wrap "
        f"values of other workers with gradwire.rpc.remote"
    )


def by_owner(groups: Iterable[Group]) -> dict[str, dict[int, list[Named]]]:
    found: dict[str, dict[int, list[Named]]] = {}
    for number, group in enumerate(groups):
        for name, rref in group.entries:
            found.setdefault(rref.owner_name(), {}).setdefault(number, []).append((name, rref))
    return found


# -- sharded parameters, and their state -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartOf:
    whole: str  # the name of the sharded parameter
    box: Box  # where the part lies in it
    size: tuple[int, ...]  # of the whole

    @property
    def name(self) -> str:
        """Name of the part on its owner; independent of which worker that is."""
        return f"{self.whole}[{', '.join(str(offset) for offset in self.box.offsets)}]"


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A sharded parameter as it was when it was passed to an optimizer."""

    name: str
    tensor: ShardedTensor
    layout: Layout

    @classmethod
    def take(cls, name: str, tensor: ShardedTensor) -> ShardedParameter:
        """Return a sharded parameter for an optimizer."""
        if not isinstance(tensor._backend, WorkerBackend):
            raise ConfigurationError(
                f"parameter {name!r} is sharded over the ranks of a process group, each of which steps its own shard; "
                f"use gradwire.shard.ShardedOptimizer there"
            )
        return cls(name, tensor, tensor._layout)

    def parts(self) -> list[tuple[PartOf, RRef[Any]]]:
        size = tuple(self.tensor.size())
        return [
            (PartOf(self.name, box, size), part if isinstance(part, RRef) else RRef(part))
            for box, part in zip(self.layout.boxes, self.tensor._parts, strict=True)
            if box.num_elements
        ]

    def prepare_step(self) -> None:
        """Check that the parts are still those that the optimizer knows, and wait for operations that still read them."""
        if self.tensor._layout is not self.layout:
            raise OptimizerError(
                f"parameter {self.name!r} was resharded, so this optimizer holds parts that are no longer in use; "
                f"create another one, and load this one's state_dict() into it"
            )
        self.tensor._backend.settle()  # a step changes parts in place


def fold_groups(groups: Iterable[Mapping[str, Any]], parts: Mapping[str, PartOf]) -> list[dict[str, Any]]:
    """Return groups with one name for each parameter, whether it is sharded or not."""
    folded = []
    for group in groups:
        names = list(dict.fromkeys(parts[name].whole if name in parts else name for name in group["param_names"]))
        folded.append({**group, "params": names, "param_names": names})
    return folded


def join_tensors(items: Sequence[tuple[PartOf, Any]]) -> Any:
    """Join one state value of all parts: a tensor of the whole, or the value of the first part (a number of steps).

    Parts that never had a gradient have no state; zeros are used for it.
    """
    first = items[0][1]
    if not all(isinstance(value, torch.Tensor) and value.shape == part.box.sizes for part, value in items):
        return first
    size = items[0][0].size
    made = torch.zeros(size, dtype=first.dtype, device=first.device)
    for part, value in items:
        made[part.box.slices_in(whole(size))] = value.to_dense() if value.is_sparse else value
    return made


def join_states(
    state: NamedState,
    parts: Mapping[str, PartOf],
    join: Callable[[Sequence[tuple[PartOf, Any]]], Any] = join_tensors,
) -> NamedState:
    """Return state by the names of whole parameters, from that of their parts.

    ``join`` combines the values that the parts have under one key.
    """
    found: NamedState = {}
    pieces: dict[str, dict[Any, list[tuple[PartOf, Any]]]] = {}
    for name, values in state.items():
        if name not in parts:
            found[name] = values
            continue
        for key, value in values.items():
            pieces.setdefault(parts[name].whole, {}).setdefault(key, []).append((parts[name], value))
    for name, by_key in pieces.items():
        found[name] = {key: join(items) for key, items in by_key.items()}
    return found


def cut_tensor(value: Any, part: PartOf) -> Any:
    """Return a part's share of a value of its parameter: its region of a tensor, or a copy of a value of another size."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == part.size:
        value = value[part.box.slices_in(whole(part.size))]
    return value.clone(memory_format=torch.contiguous_format)  # a count of steps, too: every part counts its own


def divide_states(
    state: NamedState,
    parts: Mapping[str, PartOf],
    cut: Callable[[Any, PartOf], Any] = cut_tensor,
) -> NamedState:
    """Return state by the names of parts, from that of whole parameters; ``cut`` returns a part's share of one value."""
    wholes = {part.whole for part in parts.values()}
    found = {name: values for name, values in state.items() if name not in wholes}
    for name, part in parts.items():
        if part.whole in state:
            found[name] = {key: cut(value, part) for key, value in state[part.whole].items()}
    return found
