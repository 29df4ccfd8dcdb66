"""What people hand to an optimizer, as groups of named references."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from gradwire.errors import ConfigurationError
from gradwire.nn.untrained import takes_parameters
from gradwire.optim.parts import PartOf, ShardedParameter, take_sharded
from gradwire.rref import RRef
from gradwire.shard.sharded_optim import named_params_with_sharded_tensor
from gradwire.shard.tensor import ShardedTensor

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
