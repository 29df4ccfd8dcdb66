"""State dicts of distributed optimizers: torch's form, so that they load in one process, too.

``{"state": {0: {...}}, "param_groups": [{"lr": 0.1, "params": [0, 1], "param_names": ["weight", "bias"]}]}``

State is matched by the parameter's name where both sides have names, otherwise by its number; where the parameters live does
not matter.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from gradwire.errors import ConfigurationError
from gradwire.shard.torch_optimizer import Form, form_of

Options = dict[str, Any]
NamedState = dict[str, dict[Any, Any]]
"""State of parameters by their names."""
RESERVED = ("params", "param_names")
"""Keys of a group that are not options."""


def pack(groups: Sequence[Mapping[str, Any]], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict from groups and the state of parameters by name; without names if none were given, as torch."""
    names = _names(groups)
    numbers = {name: number for number, name in enumerate(names)}
    packed = []
    for group in groups:
        named = {} if _are_numbers(names) else {"param_names": list(group["param_names"])}
        packed.append({**options_of(group), "params": [numbers[name] for name in group["param_names"]], **named})
    return {"state": {numbers[name]: found for name, found in state.items()}, "param_groups": packed}


def unpack(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> tuple[NamedState, list[Options]]:
    """Return the state of the parameters in some groups by name, and the options of each group."""
    try:
        state, saved = state_dict["state"], list(state_dict["param_groups"])
        sizes = [len(group["params"]) for group in saved]
    except (KeyError, TypeError) as error:
        raise ConfigurationError('not the state of an optimizer: it needs "state" and "param_groups"') from error
    if len(saved) != len(groups):
        raise ConfigurationError(
            f"loaded state dict has a different number of parameter groups: {len(saved)} instead of {len(groups)}"
        )
    names = _match(saved, sizes, groups)
    found = {name: state[number] for number, name in names.items() if number in state}
    for name, values in found.items():
        if not isinstance(values, Mapping):
            raise ConfigurationError(f"not the state of an optimizer: that of parameter {name!r} is not a dict")
    return found, [copy.deepcopy(options_of(group)) for group in saved]


def _match(saved: Sequence[Any], sizes: Sequence[int], groups: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
    """Return the parameter for each number in a state dict."""
    numbers, own = list(chain.from_iterable(group["params"] for group in saved)), _names(groups)
    if all(len(group.get("param_names", ())) == size for group, size in zip(saved, sizes, strict=True)):
        theirs = _names(saved)
        if set(theirs) == set(own):
            return dict(zip(numbers, theirs, strict=True))
        if not (_are_numbers(theirs) or _are_numbers(own)):
            missing, unexpected = sorted(set(own) - set(theirs)), sorted(set(theirs) - set(own))
            raise ConfigurationError(f"the state is for other parameters: missing {missing}, unexpected {unexpected}")
    if sizes != [len(group["params"]) for group in groups]:
        raise ConfigurationError(
            "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
        )
    return dict(zip(numbers, own, strict=True))


def _names(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(chain.from_iterable(group["param_names"] for group in groups))


def _are_numbers(names: Sequence[str]) -> bool:
    """Return whether these parameters have no names from the user."""
    return list(names) == [str(number) for number in range(len(names))]


def options_of(group: Mapping[str, Any]) -> Options:
    return {key: value for key, value in group.items() if key not in RESERVED}


def copied(state: Mapping[str, Mapping[Any, Any]]) -> NamedState:
    """Return a copy of a state that shares no memory with it."""
    return {name: {key: _own(value) for key, value in found.items()} for name, found in state.items()}


def forms(state: Mapping[str, Mapping[Any, Any]]) -> dict[str, dict[str, Form]]:
    """Return the shapes and types that an owner needs to check whether a state fits."""
    return {name: {str(key): form_of(value) for key, value in found.items()} for name, found in state.items()}


class OptionLog:
    """The options that the owners last received for each group, by its number.

    Only options that the owners' groups have are sent: schedulers keep some of their own beside them.
    """

    def __init__(self) -> None:
        self._told: list[Options] = []

    def add(self, options: Options) -> None:
        """Note a group that the owners have created with these options."""
        self._told.append({key: _own(value) for key, value in options.items()})

    def changes(self, groups: Sequence[Options]) -> dict[int, Options]:
        """Return the options that the owners have not received yet, by group."""
        found: dict[int, Options] = {}
        for number, (group, told) in enumerate(zip(groups, self._told, strict=True)):
            for key, known in told.items():
                value = group.get(key, known)
                if value is not known and not _are_equal(value, known):
                    found.setdefault(number, {})[key] = _own(value)
        return found

    def note(self, changes: dict[int, Options]) -> None:
        for number, options in changes.items():
            self._told[number].update(options)

    def everything(self) -> dict[int, Options]:
        return {number: dict(told) for number, told in enumerate(self._told)}


def _own(value: Any) -> Any:
    """Return a copy of a tensor: schedulers and steps change them in place."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _are_equal(value: Any, known: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(known, torch.Tensor):
        return value.dtype == known.dtype and torch.equal(value, known)
    return type(value) is type(known) and bool(value == known)
