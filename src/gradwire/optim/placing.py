"""Making the owners' parts of new groups: everywhere or nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradwire.errors import ConfigurationError, OptimizerNotMade
from gradwire.optim.local import OwnedGroup
from gradwire.optim.operations import MAKE
from gradwire.optim.owners import Answers, Owner, ask_all
from gradwire.optim.parameters import Group, Named, by_owner
from gradwire.rpc.options import UNSET_RPC_TIMEOUT
from gradwire.rref import remote
from gradwire.shard.sharded_optim import whole_matrix_problem


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an optimizer is made.

    Attributes:
        optimizer_class: Its class.
        args: More arguments for it.
        kwargs: Its keyword arguments.

    Raises:
        ConfigurationError: It is no class of optimizers, or one that cannot be split over workers.
    """

    optimizer_class: type[Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        found: Any = self.optimizer_class
        if not (isinstance(found, type) and callable(getattr(found, "step", None))):
            raise ConfigurationError(f"expected a class of optimizers such as torch.optim.SGD, not {found!r}")
        if issubclass(self.optimizer_class, torch.optim.LBFGS):
            raise ConfigurationError(
                "LBFGS sees all parameters as one vector and calls a closure many times in a step, so it cannot be split "
                "over workers; use it in one process, or choose another optimizer"
            )

    def check_sharded(self) -> None:
        """Looks whether the class may step parts of parameters.

        Raises:
            ConfigurationError: It may not.
        """
        problem = whole_matrix_problem(self.optimizer_class)
        if problem:
            raise ConfigurationError(problem)

    def call(self, groups: list[OwnedGroup]) -> tuple[Any, ...]:
        """What a new owner is sent. Torch's classes go by name; others are sent themselves, which needs trust in code."""
        name = self.optimizer_class.__name__
        is_known = getattr(torch.optim, name, None) is self.optimizer_class
        return name if is_known else self.optimizer_class, groups, self.args, self.kwargs


@dataclass(frozen=True, slots=True)
class Placed:
    """What the owners have made.

    Attributes:
        made: Owners that are new.
        defaults: Of their optimizers.
        options: Of the new groups, by number.
    """

    made: dict[str, Owner]
    defaults: dict[str, Any] = field(default_factory=dict)
    options: dict[int, dict[str, Any]] = field(default_factory=dict)


def place(recipe: Recipe, owners: dict[str, Owner], groups: Sequence[Group], first: int) -> Placed:
    """Has all owners make their parts of new groups, side by side.

    Args:
        recipe: For workers that own no parameters so far.
        owners: Those that do.
        groups: The new groups.
        first: The number of the first of them.

    Raises:
        ConfigurationError: The class cannot step parts of parameters, and some are sharded.
        OptimizerNotMade: One or more could not, and nobody has.
    """
    if any(group.parts for group in groups):
        recipe.check_sharded()
    parts = {
        name: [_owned(first + number, groups[number], entries) for number, entries in found.items()]
        for name, found in by_owner(groups).items()
    }
    placed, answers = Placed({}), Answers({}, {})
    with torch.no_grad():
        for name in [name for name in parts if name not in owners]:
            try:
                placed.made[name] = Owner(name, remote(name, MAKE, recipe.call(parts[name])))
            except Exception as error:
                answers.failed[name] = error
    old = [owners[name] for name in parts if name in owners]
    answers.add(ask_all(old, "add_groups", lambda owner: (parts[owner.name],), UNSET_RPC_TIMEOUT))
    answers.add(ask_all(placed.made.values(), "describe", lambda _: (), UNSET_RPC_TIMEOUT))
    if answers.failed:
        grown = [owner for owner in old if owner.name in answers.values]
        ask_all(grown, "remove_groups", lambda _: (first,), UNSET_RPC_TIMEOUT)
        what = recipe.optimizer_class.__name__
        text = f"{what} could not be made on every worker that owns parameters: {answers.explain()}"
        raise OptimizerNotMade(text, answers.failed) from next(iter(answers.failed.values()))
    for defaults, options in answers.values.values():
        placed.defaults.update(defaults)
        placed.options.update({number: found for number, found in options.items() if number >= first})
    return placed


def _owned(number: int, group: Group, entries: Sequence[Named]) -> OwnedGroup:
    return number, [name for name, _ in entries], [rref for _, rref in entries], group.options
