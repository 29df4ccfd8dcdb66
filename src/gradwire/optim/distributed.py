"""`DistributedOptimizer`: one optimizer for parameters that live on many workers.

    driver                                   each owner, side by side
    DistributedOptimizer(...)   -- make -->   LocalOptimizer: a torch optimizer for its parameters
    backward(ctx, loss)                       gradients gather in the context
    step(ctx)                   -- step -->   its torch optimizer steps with the context's gradients

A step is one message to each owner: ids, and the options that have changed. The class is a `torch.optim.Optimizer`, so
learning-rate schedulers work on it as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from gradwire.autograd import worker
from gradwire.errors import ConfigurationError, OptimizerError, OptimizerNotMade, OptimizerStepFailed
from gradwire.optim._options import OptionLog
from gradwire.optim.edits import Edit
from gradwire.optim.local import MAKE, LocalOptimizer, OwnedGroup
from gradwire.optim.owners import Answers, Owner, ask_all
from gradwire.optim.parameters import Group, GroupReader, Named, by_owner
from gradwire.rpc.options import UNSET_RPC_TIMEOUT
from gradwire.rref import RRef, remote

Contexts = int | Iterable[int]


class DistributedOptimizer(torch.optim.Optimizer):
    """Steps parameters on whatever workers they live, with the gradients of autograd contexts.

    Args:
        optimizer_class: A class of `torch.optim`, or one that behaves like those; not LBFGS.
        params_rref: References to parameters, remote or local modules, local parameters, ``(name, reference)`` pairs, or
            groups of these: ``{"params": [...], "lr": 0.1}``.
        args: More arguments for the class.
        kwargs: Its keyword arguments.

    Attributes:
        param_groups: Options of the groups, with references and names; what is changed here takes effect with the next step.
        is_functional_optim: Always False; for programs written for PyTorch.

    Raises:
        ConfigurationError: An argument is wrong.
        OptimizerNotMade: An owner could not make its part, or is gone.
    """

    is_functional_optim = False

    def __init__(self, optimizer_class: type[Any], params_rref: Any, *args: Any, **kwargs: Any) -> None:
        _check_class(optimizer_class)
        self._recipe = (_name_of(optimizer_class), args, kwargs)
        self._reader = GroupReader()
        self._log = OptionLog()
        self._owners: dict[str, Owner] = {}
        self._step_ids = itertools.count()
        self._unfinished: dict[tuple[int, ...], int] = {}  # steps that failed somewhere, by their contexts
        self._edits: dict[tuple[int, ...], list[Edit]] = {}
        groups = self._reader.read_all(params_rref)
        defaults, options = self._place(optimizer_class.__name__, groups, 0)
        self._is_made = False
        super().__init__([_as_dict(group, options[number]) for number, group in enumerate(groups)], defaults)
        self._is_made = True

    # -- owners --------------------------------------------------------------------------------------------------------

    @property
    def remote_optimizers(self) -> list[RRef[LocalOptimizer]]:
        """What the owners do for this optimizer, by reference."""
        return [owner.optimizer for owner in self._owners.values()]

    def named_parameters(self) -> list[Named]:
        """All parameters in order, by names of which no two are the same."""
        return [
            entry for group in self.param_groups for entry in zip(group["param_names"], group["params"], strict=True)
        ]

    def _place(self, what: str, groups: Sequence[Group], first: int) -> tuple[dict[str, Any], dict[int, Any]]:
        """Has the owners make their parts of new groups, side by side; all do or none does.

        Returns:
            The defaults, and the options of each group.
        """
        added: list[Owner] = []
        made: dict[str, Owner] = {}
        parts_by_owner = by_owner(groups)
        answers = Answers({}, {})
        owned = {
            name: [_owned_group(first + number, groups[number], entries) for number, entries in parts.items()]
            for name, parts in parts_by_owner.items()
        }
        with torch.no_grad():
            for name, parts in owned.items():
                if name in self._owners:
                    added.append(self._owners[name])
                    continue
                optimizer_class, args, kwargs = self._recipe
                try:
                    made[name] = Owner(name, remote(name, MAKE, (optimizer_class, parts, args, kwargs)))
                except Exception as error:
                    answers.failed[name] = error
        for asked in (
            ask_all(added, "add_groups", lambda owner: (owned[owner.name],), UNSET_RPC_TIMEOUT),
            ask_all(made.values(), "describe", lambda _: (), UNSET_RPC_TIMEOUT),
        ):
            answers.values.update(asked.values)
            answers.failed.update(asked.failed)
        if answers.failed:
            back = [owner for owner in added if owner.name in answers.values]
            ask_all(back, "remove_groups", lambda _: (first,), UNSET_RPC_TIMEOUT)
            text = f"{what} could not be made on every worker that owns parameters: {answers.explain()}"
            raise OptimizerNotMade(text, answers.failed) from next(iter(answers.failed.values()))
        self._owners.update(made)
        options: dict[int, dict[str, Any]] = {}
        for _, described in answers.values.values():
            for number, found in described.items():
                options.setdefault(number, found)
        for number, group in enumerate(groups, first):
            options.setdefault(number, dict(group.options))
        return next(iter(answers.values.values()))[0], options

    def _ask(self, operation: str, args_for: Callable[[Owner], Sequence[Any]], timeout: float) -> dict[str, Any]:
        """Asks all owners.

        Raises:
            OptimizerError: One or more failed.
        """
        answers = ask_all(self._owners.values(), operation, args_for, timeout)
        if answers.failed:
            text = f"{operation} failed on {len(answers.failed)} of {len(self._owners)} workers: {answers.explain()}"
            raise OptimizerError(text, answers.failed) from next(iter(answers.failed.values()))
        return answers.values

    # -- steps -----------------------------------------------------------------------------------------------------------

    def step(self, context_id: Contexts, *, timeout: float = UNSET_RPC_TIMEOUT) -> None:  # type: ignore[override]
        """Steps every parameter that has a gradient in a context, or in several: then gradients are added up.

        Parameters without a gradient there are untouched, and ``.grad`` is neither used nor changed. If it fails on some
        workers, the gradients are kept: call it again with the same contexts, and those that have stepped do not step again.

        Args:
            context_id: What `gradwire.autograd.context` gave, or several of these.
            timeout: Seconds that each owner may take.

        Raises:
            UnknownContext: A context was released, or never existed here.
            OptimizerStepFailed: Some owners did not step; says who did.
        """
        contexts = _check_contexts(context_id)
        step_id = self._unfinished.pop(contexts, None)
        if step_id is None:
            step_id = next(self._step_ids)
        args_for = self._step_args(step_id, contexts)
        self._remember(contexts, step_id)
        answers = ask_all(self._owners.values(), "step", args_for, timeout)
        for name in answers.values:
            self._owners[name].is_behind = False
        if answers.failed:
            raise _step_failed(answers)
        del self._unfinished[contexts]

    def _step_args(self, step_id: int, contexts: tuple[int, ...]) -> Callable[[Owner], Sequence[Any]]:
        """What each owner is told; until it has answered, it may have missed the changes."""
        changes = self._log.changes(self.param_groups)
        edits = self._edits.get(contexts, ())
        usual = (step_id, contexts, changes, edits)

        def args_for(owner: Owner) -> Sequence[Any]:
            args = (step_id, contexts, self._log.everything(), edits) if owner.is_behind else usual
            owner.is_behind = True
            return args

        return args_for

    def _remember(self, contexts: tuple[int, ...], step_id: int) -> None:
        container = worker.here().container
        for known in [key for key in self._unfinished if any(container.find(item) is None for item in key)]:
            del self._unfinished[known]
        self._unfinished[contexts] = step_id

    # -- groups ------------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, also of workers that had none so far.

        Args:
            param_group: ``{"params": [...], "lr": 0.1}``; parameters as in the constructor.

        Raises:
            ConfigurationError: It is no group, or something in it is no parameter.
            OptimizerNotMade: An owner could not add its part; nobody has.
        """
        if self._is_made:
            first = len(self.param_groups)
            group = self._reader.read(param_group)
            param_group = _as_dict(group, self._place("a parameter group", [group], first)[1][first])
        self._log.add({key: value for key, value in param_group.items() if key not in ("params", "param_names")})
        self.param_groups.append(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears ``.grad`` of all parameters, where they are. Gradients in contexts are kept: they end with the context.

        Raises:
            OptimizerError: Some owners did not.
        """
        self._ask("zero_grad", lambda _: (set_to_none,), UNSET_RPC_TIMEOUT)


def _check_class(optimizer_class: Any) -> None:
    if not isinstance(optimizer_class, type) or not callable(getattr(optimizer_class, "step", None)):
        raise ConfigurationError(f"expected a class of optimizers such as torch.optim.SGD, not {optimizer_class!r}")
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise ConfigurationError(
            "LBFGS sees all parameters as one vector and calls a closure many times in a step, so it cannot be split over "
            "workers; use it in one process, or choose another optimizer"
        )


def _name_of(optimizer_class: type[Any]) -> Any:
    """What others know it by; classes that are not torch's are sent themselves, which needs trust in code."""
    name = optimizer_class.__name__
    return name if getattr(torch.optim, name, None) is optimizer_class else optimizer_class


def _owned_group(number: int, group: Group, entries: Sequence[Named]) -> OwnedGroup:
    return number, [name for name, _ in entries], [rref for _, rref in entries], group.options


def _as_dict(group: Group, options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "params": [rref for _, rref in group.entries], "param_names": group.names}


def _check_contexts(contexts: Any) -> tuple[int, ...]:
    """The ids of contexts that are alive here.

    Raises:
        ConfigurationError: These are no ids, or one is there twice.
        UnknownContext: One was released, or never existed here.
    """
    found = (contexts,) if isinstance(contexts, int) else tuple(contexts) if isinstance(contexts, Iterable) else ()
    if not found or not all(isinstance(item, int) and not isinstance(item, bool) for item in found):
        raise ConfigurationError(
            f"step needs the id of a context, or several; not {contexts!r}: opt.step(ctx) with `context() as ctx`"
        )
    if len(set(found)) != len(found):
        raise ConfigurationError(f"a context is there twice: {found}; its gradients would be counted twice")
    container = worker.here().container
    return tuple(container.retrieve(item).context_id for item in found)


def _step_failed(answers: Answers) -> OptimizerStepFailed:
    stepped = tuple(answers.values)
    text = (
        f"the optimizer did not step on every worker. Stepped: {', '.join(stepped) or 'none'}. "
        f"Failed: {answers.explain()}. Call step again with the same contexts to repeat it for those that failed"
    )
    failure = OptimizerStepFailed(text, stepped, answers.failed)
    failure.__cause__ = next(iter(answers.failed.values()))
    return failure
