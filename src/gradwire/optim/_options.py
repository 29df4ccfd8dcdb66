"""Options of parameter groups that people and schedulers change on the driver, and what of them the owners must hear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Options = dict[str, Any]
RESERVED = ("params", "param_names")


class OptionLog:
    """What the owners were last told of each group, by its number.

    Only options that the owners' groups have are told: schedulers keep some of their own beside them.
    """

    def __init__(self) -> None:
        self._told: list[Options] = []

    def add(self, options: Options) -> None:
        """A group that the owners have made, with these options."""
        self._told.append({key: _kept(value) for key, value in options.items()})

    def changes(self, groups: Sequence[Options]) -> dict[int, Options]:
        """What the owners have not been told yet, by group."""
        found: dict[int, Options] = {}
        for number, (group, told) in enumerate(zip(groups, self._told, strict=True)):
            for key, known in told.items():
                value = group.get(key, known)
                if value is not known and not _are_equal(value, known):
                    found.setdefault(number, {})[key] = _kept(value)
        return found

    def note(self, changes: dict[int, Options]) -> None:
        """The owners are being told that."""
        for number, options in changes.items():
            self._told[number].update(options)

    def everything(self) -> dict[int, Options]:
        """All options, for an owner that may have missed changes."""
        return {number: dict(told) for number, told in enumerate(self._told)}


def _kept(value: Any) -> Any:
    """A tensor is changed in place by schedulers, so the log needs its own."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _are_equal(value: Any, known: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(known, torch.Tensor):
        return (
            isinstance(value, torch.Tensor)
            and isinstance(known, torch.Tensor)
            and value.dtype == known.dtype
            and torch.equal(value, known)
        )
    return type(value) is type(known) and bool(value == known)
