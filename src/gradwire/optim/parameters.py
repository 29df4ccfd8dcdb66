"""What people hand to an optimizer, as groups of named references."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from gradwire.errors import ConfigurationError, OptimizerError
from gradwire.nn.remote_module import takes_parameters
from gradwire.optim.state_dict import NamedState
from gradwire.rref import RRef
from gradwire.shard.layout import Box, Layout, whole
from gradwire.shard.sharded_optim import named_params_with_sharded_tensor
from gradwire.shard.tensor import ShardedTensor
from gradwire.shard.worker_backend import WorkerBackend


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
    if not isinstance(tensor._backend, WorkerBackend):
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
        parameter.tensor._backend.settle()  # a step changes parts in place


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


Named = tuple[str, RRef[Any]]


@runtime_checkable
class HasRemoteParameters(Protocol):
    """A module that lives on another worker."""

    def named_remote_parameters(self) -> list[tuple[str, RRef[Any]]]:
        """Its parameters, by name."""


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that share options.

    Attributes:
        entries: Unique names and references, in order.
        options: Those that were given for the group.
        sharded: Parameters that are divided; the entries have their parts.
        parts: What those entries are parts of, by their names.
    """

    entries: list[Named]
    options: dict[str, Any]
    sharded: list[ShardedParameter] = field(default_factory=list)
    parts: dict[str, PartOf] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.entries]


class GroupReader:
    """Reads groups, and gives every parameter a name that no other has.

    Parameters of a module, and those in pairs, have names; others are called by their number. If a module's names are
    taken, they get the module's number in front. So the same list gives the same names wherever the parameters are.
    Parts of a sharded parameter have its name, and where they begin.
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._num_parameters = 0
        self._num_modules = 0

    def copy(self) -> GroupReader:
        """One that has given the same names."""
        made = GroupReader()
        made._taken, made._num_parameters, made._num_modules = (
            set(self._taken),
            self._num_parameters,
            self._num_modules,
        )
        return made

    @takes_parameters
    def read_all(self, params: Any) -> list[Group]:
        """Groups, or one group for parameters that are not in any.

        Raises:
            ConfigurationError: There are none, or something is no parameter.
        """
        if isinstance(params, dict):
            raise ConfigurationError("put the group in a list: [{'params': [...]}]")
        items = [params] if _is_one(params) else list(params)
        if not any(isinstance(item, dict) for item in items):
            return [self.read({"params": items})]
        return [self.read(item) for item in items]

    @takes_parameters
    def read(self, group: Any) -> Group:
        """One group.

        Raises:
            ConfigurationError: It is no group, or something in it is no parameter.
        """
        if not isinstance(group, dict) or "params" not in group:
            raise ConfigurationError(f'a parameter group is a dict with "params", not {type(group).__name__}')
        params = group["params"]
        if isinstance(params, set):
            raise ConfigurationError("parameters in a set have no order; pass a list")
        items = [params] if _is_one(params) else list(params)
        made = Group([], {key: value for key, value in group.items() if key not in ("params", "param_names")})
        for item in items:
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
            yield from self._named_in_module(list(_parameters_of(item)))
        else:
            yield str(self._num_parameters), item

    def _named_in_module(self, found: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        number, self._num_modules = self._num_modules, self._num_modules + 1
        if any(name in self._taken for name, _ in found):
            return [(f"{number}.{name}", parameter) for name, parameter in found]
        return found

    def _add(self, group: Group, name: str, parameter: Any) -> None:
        self._take(name)
        self._num_parameters += 1
        if not isinstance(parameter, ShardedTensor):
            group.entries.append((name, _reference(parameter)))
            return
        sharded = take_sharded(name, parameter)
        group.sharded.append(sharded)
        for part, rref in sharded.parts():
            self._take(part.name)
            group.entries.append((part.name, rref))
            group.parts[part.name] = part

    def _take(self, name: str) -> None:
        if name in self._taken:
            raise ConfigurationError(f"two parameters would have the name {name!r}; pass (name, parameter) pairs")
        self._taken.add(name)


def by_owner(groups: Iterable[Group]) -> dict[str, dict[int, list[Named]]]:
    """Which parameters of which groups each worker has; groups by their number."""
    found: dict[str, dict[int, list[Named]]] = {}
    for number, group in enumerate(groups):
        for name, rref in group.entries:
            found.setdefault(rref.owner_name(), {}).setdefault(number, []).append((name, rref))
    return found


def _is_one(params: Any) -> bool:
    """Whether that is a parameter or a module by itself, and not several."""
    if isinstance(params, str | bytes) or not hasattr(params, "__iter__"):
        if not isinstance(params, RRef | torch.nn.Module | HasRemoteParameters):
            raise ConfigurationError(f"expected a list of parameters, not {type(params).__name__}")
        return True
    return isinstance(params, torch.Tensor | torch.nn.Module | HasRemoteParameters)


def _parameters_of(module: Any) -> Iterator[tuple[str, Any]]:
    """Parameters of a module that is here or elsewhere, or partly so; each under the first of its names, as torch does."""
    if isinstance(module, HasRemoteParameters):
        yield from module.named_remote_parameters()
        return
    seen: set[torch.Tensor] = set()
    for path, part in module.named_modules():  # a part that is there twice comes once
        prefix = f"{path}." if path else ""
        if isinstance(part, HasRemoteParameters):
            yield from ((prefix + name, rref) for name, rref in part.named_remote_parameters())
            continue
        for name, parameter in named_params_with_sharded_tensor(part, recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                yield prefix + name, parameter


def _reference(item: Any) -> RRef[Any]:
    if isinstance(item, RRef):
        return item
    if isinstance(item, torch.Tensor):
        return RRef(item)
    raise ConfigurationError(
        f"expected an RRef of a parameter, a module, a parameter or a ShardedTensor, not {type(item).__name__}; wrap "
        f"values of other workers with gradwire.rpc.remote"
    )
