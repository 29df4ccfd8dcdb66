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
import sys
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import torch

from gradwire.autograd.api import current_engine
from gradwire.autograd.backward_pass import FollowUp
from gradwire.autograd.messages import CommitPass
from gradwire.errors import ConfigurationError, DecodeError, OptimizerError, OptimizerNotMade, OptimizerStepFailed
from gradwire.nn.remote_module import warn_user
from gradwire.optim import state_dict as states
from gradwire.optim.grad_transforms import CLAMP, SCALE, Edit, EditLog
from gradwire.optim.local import MAKE, OPERATE, LocalOptimizer, OwnedGroup, read_answer
from gradwire.optim.parameters import (
    Group,
    GroupReader,
    Named,
    PartOf,
    ShardedParameter,
    by_owner,
    divide_states,
    fold_groups,
    join_states,
    prepare_step,
)
from gradwire.optim.state_dict import RESERVED, OptionLog
from gradwire.params.grads import clip_factor, total_norm
from gradwire.rpc.futures import CallFuture
from gradwire.rpc.options import UNSET_RPC_TIMEOUT
from gradwire.rref import RRef, remote
from gradwire.shard.sharded_optim import whole_matrix_problem
from gradwire.shard.torch_optimizer import is_watched


@dataclass(slots=True)
class Owner:
    """One worker that has parameters.

    Attributes:
        name: Its name.
        optimizer: What it does for the optimizer.
        is_behind: Whether it may have missed a change of options.
        rank: Its rank.
        is_here: Whether that is the worker that runs this.
    """

    name: str
    optimizer: RRef[LocalOptimizer]
    is_behind: bool = False
    rank: int = field(init=False)
    is_here: bool = field(init=False)

    def __post_init__(self) -> None:
        self.rank, self.is_here = self.optimizer.owner().id, self.optimizer.is_owner()

    def start(self, operation: str, args: Sequence[Any], timeout_s: float) -> CallFuture[Any]:
        """Begins an operation on another worker."""
        return self.optimizer._submit(OPERATE, (operation, *args), timeout_s)

    def run(self, operation: str, args: Sequence[Any], timeout_s: float) -> Any:
        """Does an operation, here or there, and waits for it."""
        if self.is_here:
            return getattr(self.optimizer.local_value(), operation)(*args)
        return self.optimizer._ask(OPERATE, (operation, *args), timeout_s)


@dataclass(frozen=True, slots=True)
class Answers:
    """What came back, by the worker's name."""

    values: dict[str, Any]
    failed: dict[str, Exception]

    def add(self, others: Answers) -> None:
        """Takes in what others have answered."""
        self.values.update(others.values)
        self.failed.update(others.failed)

    def take(self, name: str, future: CallFuture[Any]) -> None:
        """Waits for an answer."""
        try:
            self.values[name] = future.wait()
        except Exception as error:
            self.failed[name] = error

    def read(self, operation: str) -> None:
        """Counts owners that have answered something else as failed."""
        for name, answer in list(self.values.items()):
            try:
                self.values[name] = read_answer(operation, answer)
            except DecodeError as error:
                del self.values[name]
                self.failed[name] = error

    def explain(self) -> str:
        """One line for each failure."""
        return "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in self.failed.items())


def ask_all(
    owners: Iterable[Owner], operation: str, args_for: Callable[[Owner], Sequence[Any]], timeout_s: float
) -> Answers:
    """Asks all owners at the same time, and waits for all.

    The last one is called and waited for in one go, which is quicker than a future; this worker itself, if it is one of
    them, comes last.
    """
    answers = Answers({}, {})
    *others, last = sorted(owners, key=attrgetter("is_here")) or (None,)
    if last is None:
        return answers
    started: list[tuple[Owner, CallFuture[Any]]] = []
    was_enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # these calls have no part in any graph; torch.no_grad() costs ten times as much
    try:
        for owner in others:
            try:
                started.append((owner, owner.start(operation, args_for(owner), timeout_s)))
            except Exception as error:
                answers.failed[owner.name] = error
        try:
            answers.values[last.name] = last.run(operation, args_for(last), timeout_s)
        except Exception as error:
            answers.failed[last.name] = error
        for owner, future in started:
            answers.take(owner.name, future)
        answers.read(operation)
    finally:
        torch._C._set_grad_enabled(was_enabled)
    return answers


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


Contexts = int | Iterable[int]


def check_contexts(contexts: Any) -> tuple[int, ...]:
    """The ids of contexts that are alive here.

    Raises:
        ConfigurationError: These are no ids, or one is there twice.
        UnknownContext: One was released, or never existed here.
    """
    found = (contexts,) if isinstance(contexts, int) else tuple(contexts) if isinstance(contexts, Iterable) else ()
    for item in found or (None,):
        if not isinstance(item, int) or isinstance(item, bool):
            raise ConfigurationError(
                f"step needs the id of a context, or several; not {contexts!r}: opt.step(ctx) with `context() as ctx`"
            )
    if len(set(found)) != len(found):
        raise ConfigurationError(f"a context is there twice: {found}; its gradients would be counted twice")
    retrieve = current_engine().container.retrieve
    return tuple([retrieve(item).context_id for item in found])


def is_over(context_id: int) -> bool:
    """Whether a context was released."""
    return current_engine().container.find(context_id) is None


_SHOWN_PROBLEMS = 10  # in an error


class DistributedOptimizer(torch.optim.Optimizer):
    """Steps parameters on whatever workers they live, with the gradients of autograd contexts.

    Args:
        optimizer_class: A class of `torch.optim`, or one that behaves like those; not LBFGS.
        params_rref: References to parameters, remote or local modules, local parameters, ``(name, reference)`` pairs, or
            groups of these: ``{"params": [...], "lr": 0.1}``. Sharded tensors of RPC workers are parameters, too: each of
            their parts is stepped by its owner.
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
        self._recipe = Recipe(optimizer_class, args, kwargs)
        self._reader = GroupReader()
        self._log = OptionLog()
        self._step_ids = itertools.count()
        self._unfinished: dict[tuple[int, ...], int] = {}  # steps that failed somewhere, by their contexts
        self._edits = EditLog(is_over)
        self._commits: dict[tuple[int, ...], tuple[int, Set[int]]] = {}  # passes that the next step tells owners of
        self._sharded: list[ShardedParameter] = []
        self._parts: dict[str, PartOf] = {}  # what parameters are parts of, by name
        groups = self._reader.read_all(params_rref)
        placed = place(self._recipe, {}, groups, 0)
        self._owners = placed.made
        for group in groups:
            self._note_sharded(group)
        self._is_made = False  # until then, `add_param_group` is called by the base class
        super().__init__(
            [_as_dict(group, placed.options[number]) for number, group in enumerate(groups)], placed.defaults
        )
        self._is_made = True

    # -- owners --------------------------------------------------------------------------------------------------------

    @property
    def remote_optimizers(self) -> list[RRef[LocalOptimizer]]:
        """What the owners do for this optimizer, by reference."""
        return [owner.optimizer for owner in self._owners.values()]

    def named_parameters(self) -> list[Named]:
        """All parameters in order, by names of which no two are the same; of sharded ones, the parts."""
        return [
            entry for group in self.param_groups for entry in zip(group["param_names"], group["params"], strict=True)
        ]

    def _note_sharded(self, group: Group) -> None:
        self._sharded += group.sharded
        self._parts.update(group.parts)

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

        Parameters without a gradient there are untouched, and ``.grad`` is neither used nor changed; if none has one, there
        is a warning. If it fails on some workers, the gradients are kept: call it again with the same contexts, and those
        that have stepped do not step again.

        Args:
            context_id: What `gradwire.autograd.context` gave, or several of these.
            timeout: Seconds that each owner may take.

        Raises:
            UnknownContext: A context was released, or never existed here.
            OptimizerStepFailed: Some owners did not step; says who did.
            OptimizerError: A sharded parameter was resharded since the optimizer was made.
        """
        # In a class that has a step of its own, and calls this one, torch has put its wrapper around that.
        if type(self).step is DistributedOptimizer.step and is_watched(self):
            self._step_watched(context_id, **({} if timeout == UNSET_RPC_TIMEOUT else {"timeout": timeout}))
        else:
            self._step(context_id, timeout=timeout)

    step.hooked = True  # type: ignore[attr-defined]  # torch need not put its wrapper around it: see `_step_watched`

    def _step(self, context_id: Contexts, *, timeout: float = UNSET_RPC_TIMEOUT) -> None:
        contexts = check_contexts(context_id)
        if self._sharded:
            prepare_step(self._sharded)
        step_id = self._unfinished.get(contexts)
        if step_id is None:
            step_id = next(self._step_ids)
        edits = self._edits.of(contexts)
        if self._unfinished:
            self._forget_unfinished()
        self._unfinished[contexts] = step_id
        args_for = self._step_args(step_id, contexts, edits, *self._commits.pop(contexts, (0, ())))
        answers = ask_all(self._owners.values(), "step", args_for, timeout)
        for name in answers.values:
            self._owners[name].is_behind = False
        if answers.failed:
            raise _step_failed(answers)
        self._unfinished.pop(contexts, None)
        self._edits.drop(contexts)  # not before: a repeated step needs them
        if not any(answers.values.values()):
            self._warn_of_no_gradients(len(contexts))

    def _warn_of_no_gradients(self, num_contexts: int) -> None:
        """A step that changes nothing is rarely what was meant, and shows only as a loss that stays as it is.

        The text has no number of a context, so that Python shows it once for a loop and not with every step.
        """
        where = "the context" if num_contexts == 1 else f"any of the {num_contexts} contexts"
        warn_user(
            f"step changed nothing: of the {len(self.named_parameters())} parameters (on {', '.join(self._owners)}), none "
            f"has a gradient in {where}. Check that backward was called with this context (not loss.backward()), "
            f"that the forward calls were made inside of it, and that the loss depends on these parameters",
            sys._getframe(1),
        )

    _step_watched = torch.optim.Optimizer.profile_hook_step(_step)

    def _step_args(
        self, step_id: int, contexts: tuple[int, ...], edits: Sequence[Edit], pass_id: int, ranks: Collection[int]
    ) -> Callable[[Owner], Sequence[Any]]:
        """What each owner is told; until it has answered, it may have missed the changes."""
        changes = self._log.changes(self.param_groups)
        behind = [owner.name for owner in self._owners.values() if owner.is_behind]
        if changes:
            for owner in self._owners.values():
                owner.is_behind = True  # before the log says they were told: whatever ends the step, they hear it
            self._log.note(changes)

        def args_for(owner: Owner) -> Sequence[Any]:
            options = self._log.everything() if owner.name in behind else changes
            args = [step_id, contexts, pass_id if pass_id and owner.rank in ranks else 0, options, edits]
            while not args[-1]:  # what is not there need not be told
                args.pop()
            return args

        return args_for

    def follow_backward(self, context_id: int) -> FollowUp:
        """For ``backward(..., optimizer=self)``: the step of a context, which tells owners that the pass is committed."""
        return _StepAfterBackward(self, check_contexts(context_id))

    def _forget_unfinished(self) -> None:
        for known in list(self._unfinished):  # other threads step with contexts of theirs meanwhile
            if any(is_over(item) for item in known):
                self._unfinished.pop(known, None)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def clip_grad_norm_(
        self, context_id: Contexts, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scales the gradients of contexts so that the norm of all of them together, on all owners, is at most that.

        One round trip for the norms; the scaling goes along with the next step of the same contexts, and ends with it.

        Args:
            context_id: As for `step`; gradients of several contexts are added up first.
            max_norm: The limit.
            norm_type: 2 for the Euclidean norm; ``inf`` for the largest magnitude.
            error_if_nonfinite: Raise if the norm is infinite or not a number; nothing is scaled then.

        Returns:
            The norm before.

        Raises:
            OptimizerError: The norm is not finite, and that is an error; or an owner did not answer.
        """
        contexts, norm_type = check_contexts(context_id), float(norm_type)
        edits = self._edits.of(contexts)
        answers = self._ask("norms", lambda _: (contexts, edits, norm_type), UNSET_RPC_TIMEOUT)
        found = {
            name: norm
            for parts in answers.values()
            for names, norms in parts
            for name, norm in zip(names, norms, strict=True)
        }
        ordered = [found[name] for name, _ in self.named_parameters() if name in found]
        total = total_norm(ordered, norm_type, error_if_nonfinite)
        self._edit(contexts, SCALE, clip_factor(total, float(max_norm)))
        return total

    def clip_grad_value_(self, context_id: Contexts, clip_value: float) -> None:
        """Clamps the gradients of contexts between that value and its negative, for the next step of the same contexts."""
        self._edit(check_contexts(context_id), CLAMP, float(clip_value))

    def _edit(self, contexts: tuple[int, ...], kind: Literal["scale", "clamp"], number: float) -> None:
        if (kind, number) != (SCALE, 1.0):
            self._edits.add(contexts, (kind, number))

    def _are_finite(self, contexts: tuple[int, ...]) -> bool:
        """Whether all gradients on all owners are."""
        edits = self._edits.of(contexts)
        return all(self._ask("is_finite", lambda _: (contexts, edits), UNSET_RPC_TIMEOUT).values())

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
            reader, first = self._reader.copy(), len(self.param_groups)
            group = reader.read(param_group)
            placed = place(self._recipe, self._owners, [group], first)
            self._owners.update(placed.made)
            self._note_sharded(group)
            self._reader = reader  # only now: names of a group that could not be added are free again
            param_group = _as_dict(group, placed.options[first])
        self._log.add({key: value for key, value in param_group.items() if key not in RESERVED})
        self.param_groups.append(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears ``.grad`` of all parameters, where they are. Gradients in contexts are kept: they end with the context.

        Raises:
            OptimizerError: Some owners did not.
        """
        self._ask("zero_grad", lambda _: (bool(set_to_none),), UNSET_RPC_TIMEOUT)

    def __reduce__(self) -> Any:
        raise OptimizerError(
            "a DistributedOptimizer stays on the worker that made it, which alone knows what the owners were told. To step "
            "elsewhere, send the modules or references and make another one there; to save it, use state_dict()"
        )

    # -- state ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of all parameters, gathered here, in torch's form, with the parameters' names.

        Of a sharded parameter it is that of the whole, however it is divided.

        Raises:
            OptimizerError: An owner did not answer.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        answers = self._ask("named_state", lambda _: (True,), UNSET_RPC_TIMEOUT)
        merged: states.NamedState = {}
        for part in answers.values():
            merged.update(part)
        packed = states.pack(fold_groups(self.param_groups, self._parts), join_states(merged, self._parts))
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            packed = post_hook(self, packed) or packed
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state that was saved, here or in one process, wherever the parameters lived then.

        Raises:
            ConfigurationError: It is the state of other parameters, or does not fit them; nothing was loaded.
            OptimizerError: An owner could not take its part.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        saved_state, options = states.unpack(state_dict, fold_groups(self.param_groups, self._parts))
        found = divide_states(saved_state, self._parts)
        parts: dict[str, states.NamedState] = {name: {} for name in self._owners}
        for name, rref in self.named_parameters():
            if name in found:
                parts[rref.owner_name()][name] = found[name]

        def part_of(owner: Owner) -> Sequence[Any]:
            part = parts[owner.name]
            return (states.copied(part) if owner.is_here else part,)

        told = self._ask("state_problems", lambda owner: (states.forms(parts[owner.name]),), UNSET_RPC_TIMEOUT)
        problems = [f"on {name}, {problem}" for name, lines in told.items() for problem in lines]
        if problems:
            more = f"; and {len(problems) - _SHOWN_PROBLEMS} more" if len(problems) > _SHOWN_PROBLEMS else ""
            raise ConfigurationError(
                f"the state does not fit the parameters of this optimizer; nothing was loaded: "
                f"{'; '.join(problems[:_SHOWN_PROBLEMS])}{more}"
            )
        self._ask("load_named_state", part_of, UNSET_RPC_TIMEOUT)
        for group, saved in zip(self.param_groups, options, strict=True):
            kept = {key: group[key] for key in RESERVED}
            group.clear()
            group.update({**self.defaults, **saved, **kept})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


class _StepAfterBackward:
    """The step that follows a backward pass."""

    def __init__(self, optimizer: DistributedOptimizer, contexts: tuple[int, ...]) -> None:
        self._optimizer, self._contexts = optimizer, contexts
        self.ranks = frozenset(owner.rank for owner in optimizer._owners.values() if not owner.is_here)

    def run(self, commit: CommitPass, ranks: Set[int]) -> None:
        """Steps; those owners that took part in the pass hear of its commit with the request."""
        self._optimizer._commits[self._contexts] = (commit.pass_id, ranks)
        try:
            self._optimizer.step(self._contexts)
        finally:
            self._optimizer._commits.pop(self._contexts, None)  # a hook may have raised before


def _as_dict(group: Group, options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "params": [rref for _, rref in group.entries], "param_names": group.names}


def _step_failed(answers: Answers) -> OptimizerStepFailed:
    stepped = tuple(answers.values)
    text = (
        f"the optimizer did not step on every worker. Stepped: {', '.join(stepped) or 'none'}. "
        f"Failed: {answers.explain()}. Call step again with the same contexts to repeat it for those that failed"
    )
    failure = OptimizerStepFailed(text, stepped, answers.failed)
    failure.__cause__ = next(iter(answers.failed.values()))
    return failure
