"""What people hand to an optimizer, as groups of named references."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from gradwire.errors import ConfigurationError
from gradwire.rref import RRef

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
    """

    entries: list[Named]
    options: dict[str, Any]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.entries]


class GroupReader:
    """Reads groups, and gives every parameter a name that no other has.

    Parameters of a module, and those in pairs, have names; others are called by their number. If a module's names are
    taken, they get the module's number in front. So the same list gives the same names wherever the parameters are.
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._num_modules = 0

    def copy(self) -> GroupReader:
        """One that has given the same names."""
        made = GroupReader()
        made._taken, made._num_modules = set(self._taken), self._num_modules
        return made

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
        entries = [entry for item in items for entry in self._entries(item)]
        if not entries:
            raise ConfigurationError("optimizer got an empty parameter list")
        return Group(entries, {key: value for key, value in group.items() if key not in ("params", "param_names")})

    def _entries(self, item: Any) -> Iterator[Named]:
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
            if item[0] in self._taken:
                raise ConfigurationError(f"two parameters have the name {item[0]!r}; give each its own")
            yield self._take(item[0]), _reference(item[1])
        elif isinstance(item, HasRemoteParameters | torch.nn.Module):
            yield from self._module_entries(list(_parameters_of(item)))
        else:
            yield self._take(str(len(self._taken))), _reference(item)

    def _module_entries(self, found: list[Named]) -> Iterator[Named]:
        number, self._num_modules = self._num_modules, self._num_modules + 1
        if any(name in self._taken for name, _ in found):
            found = [(f"{number}.{name}", rref) for name, rref in found]
        for name, rref in found:
            yield self._take(name), rref

    def _take(self, name: str) -> str:
        if name in self._taken:
            raise ConfigurationError(f"two parameters would have the name {name!r}; pass (name, parameter) pairs")
        self._taken.add(name)
        return name


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


def _parameters_of(module: Any) -> Iterator[Named]:
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
        for name, parameter in part.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                yield prefix + name, RRef(parameter)


def _reference(item: Any) -> RRef[Any]:
    if isinstance(item, RRef):
        return item
    if isinstance(item, torch.Tensor):
        return RRef(item)
    raise ConfigurationError(
        f"expected an RRef of a parameter, a module or a parameter, not {type(item).__name__}; wrap values of other "
        f"workers with gradwire.rpc.remote"
    )
