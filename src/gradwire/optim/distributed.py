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
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from gradwire._interrupts import interruptible
from gradwire._torch import set_grad_mode
from gradwire.autograd.api import current_engine
from gradwire.errors import ConfigurationError, OptimizerError, OptimizerNotMade, OptimizerStepFailed
from gradwire.nn.remote_module import warn_user
from gradwire.optim import state_dict as optimizer_state
from gradwire.optim.grad_transforms import CLAMP, SCALE, Edit, EditLog
from gradwire.optim.local import MAKE, OPERATE, LocalOptimizer, read_answer
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
)
from gradwire.optim.state_dict import RESERVED, NamedState, OptionLog, Options, options_of
from gradwire.params.grads import clip_factor, total_norm
from gradwire.rpc.futures import CallFuture
from gradwire.rpc.options import UNSET_RPC_TIMEOUT
from gradwire.rref import RRef, remote
from gradwire.shard.sharded_optim import whole_matrix_problem
from gradwire.shard.torch_optimizer import is_watched

Contexts = int | Iterable[int]

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
        _check_class(optimizer_class)
        self._optimizer_class, self._args, self._kwargs = optimizer_class, args, kwargs
        self._owners: dict[str, Owner] = {}
        self._reader = GroupReader()
        self._log = OptionLog()
        self._step_ids = itertools.count()
        self._unfinished: dict[tuple[int, ...], int] = {}  # steps that failed somewhere, by their contexts
        self._edits = EditLog(is_over)
        self._sharded: list[ShardedParameter] = []
        self._parts: dict[str, PartOf] = {}  # what parameters are parts of, by name
        self._is_made = False  # until then, `add_param_group` is called by the base class
        super().__init__(*self._place(self._reader.read_all(params_rref), 0))
        self._is_made = True

    def __reduce__(self) -> Any:
        raise OptimizerError(
            "a DistributedOptimizer cannot leave the worker that created it. To step elsewhere, send the modules or "
            "references and create another one there; to save it, use state_dict()"
        )

    # -- owners and groups ---------------------------------------------------------------------------------------------

    @property
    def remote_optimizers(self) -> list[RRef[LocalOptimizer]]:
        """What the owners do for this optimizer, by reference."""
        return [owner.optimizer for owner in self._owners.values()]

    def named_parameters(self) -> list[Named]:
        """Return all parameters in order, by names of which no two are the same; of sharded ones, the parts."""
        return [
            entry for group in self.param_groups for entry in zip(group["param_names"], group["params"], strict=True)
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, also of workers that had none so far.

        Args:
            param_group: ``{"params": [...], "lr": 0.1}``; parameters as in the constructor.

        Raises:
            ConfigurationError: It is not a group, or something in it is not a parameter.
            OptimizerNotMade: An owner could not add its part; no owner has.
        """
        if self._is_made:
            reader = self._reader.copy()
            (param_group,), _ = self._place([reader.read(param_group)], len(self.param_groups))
            self._reader = reader  # only now: names of a group that could not be added are free again
        self._log.add(options_of(param_group))
        self.param_groups.append(param_group)

    def _place(self, groups: Sequence[Group], first: int) -> tuple[list[dict[str, Any]], Options]:
        """Have all owners make their parts of new groups, whose numbers begin with ``first``, side by side.

        Return the groups as `torch.optim.Optimizer` has them, and the defaults of the owners' optimizers.
        """
        problem = whole_matrix_problem(self._optimizer_class) if any(group.parts for group in groups) else None
        if problem:
            raise ConfigurationError(problem)
        parts: dict[str, list[Any]] = {
            name: [
                (first + number, [name for name, _ in found], [rref for _, rref in found], groups[number].options)
                for number, found in owned.items()
            ]
            for name, owned in by_owner(groups).items()
        }
        # Torch's classes go by name; others are sent themselves, which needs trust in code.
        name, found = self._optimizer_class.__name__, self._optimizer_class
        sent = name if getattr(torch.optim, name, None) is found else found
        made: dict[str, Owner] = {}
        answers = Answers()
        with torch.no_grad():
            for worker_name in [item for item in parts if item not in self._owners]:
                try:
                    rref = remote(worker_name, MAKE, (sent, parts[worker_name], self._args, self._kwargs))
                    made[worker_name] = Owner(worker_name, rref)
                except Exception as error:
                    answers.failed[worker_name] = error
        old = [owner for owner in self._owners.values() if owner.name in parts]
        ask_all(old, "add_groups", lambda owner: (parts[owner.name],), UNSET_RPC_TIMEOUT, answers)
        ask_all(made.values(), "describe", lambda _: (), UNSET_RPC_TIMEOUT, answers)
        if answers.failed:
            grown = [owner for owner in old if owner.name in answers.values]
            ask_all(grown, "remove_groups", lambda _: (first,), UNSET_RPC_TIMEOUT)
            text = f"{name} could not be created on every worker that owns parameters: {answers.explain()}"
            raise OptimizerNotMade(text, answers.failed) from answers.first_failure
        self._owners.update(made)
        defaults: Options = {}
        options: dict[int, Options] = {}
        for own_defaults, own_options in answers.values.values():
            defaults.update(own_defaults)
            options.update(own_options)
        for group in groups:
            self._sharded += group.sharded
            self._parts.update(group.parts)
        return [
            {**options[number], "params": [rref for _, rref in group.entries], "param_names": group.names}
            for number, group in enumerate(groups, first)
        ], defaults

    def _ask(self, operation: str, args_for: ArgsFor, timeout: float = UNSET_RPC_TIMEOUT) -> dict[str, Any]:
        answers = ask_all(self._owners.values(), operation, args_for, timeout)
        if answers.failed:
            text = f"{operation} failed on {len(answers.failed)} of {len(self._owners)} workers: {answers.explain()}"
            raise OptimizerError(text, answers.failed) from answers.first_failure
        return answers.values

    # -- steps ---------------------------------------------------------------------------------------------------------

    @interruptible  # hooks of the user run in torch's wrapper; `_step` itself is not to be interrupted
    def step(self, context_id: Contexts, *, timeout: float = UNSET_RPC_TIMEOUT) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient in a context, or in several: then gradients are added up.

        Parameters without a gradient there are untouched, and ``.grad`` is neither used nor changed; if none has one, there
        is a warning. If it fails on some workers, the gradients are kept: call it again with the same contexts, and those
        that have stepped do not step again.

        Args:
            context_id: What `gradwire.autograd.context` gave, or several of these.
            timeout: Seconds that each owner may take.

        Raises:
            UnknownContext: A context was released, or never existed here.
            OptimizerStepFailed: Some owners did not step; it lists those that did.
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
        for parameter in self._sharded:
            parameter.prepare_step()
        step_id = self._unfinished.get(contexts)
        if step_id is None:
            step_id = next(self._step_ids)
        edits = self._edits.of(contexts)
        if self._unfinished:
            self._forget_unfinished()
        self._unfinished[contexts] = step_id
        engine, told = current_engine(), set[int]()
        owners = [owner.rank for owner in self._owners.values() if not owner.is_here]
        pass_id, waiting = engine.take_due(contexts[0], owners)
        try:
            args_for = self._step_args(step_id, contexts, edits, pass_id, waiting)
            answers = ask_all(self._owners.values(), "step", args_for, timeout)
            for name in answers.values:
                self._owners[name].is_behind = False
                told.add(self._owners[name].rank)
        finally:
            if not waiting <= told:  # some may not have heard of the commit
                engine.owe_commit(contexts[0], pass_id, waiting - told)
        if answers.failed:
            stepped = tuple(answers.values)
            text = (
                f"the optimizer did not step on every worker. Stepped: {', '.join(stepped) or 'none'}. "
                f"Failed: {answers.explain()}. Call step again with the same contexts to repeat it for those that "
                f"failed"
            )
            raise OptimizerStepFailed(text, stepped, answers.failed) from answers.first_failure
        self._unfinished.pop(contexts, None)
        self._edits.drop(contexts)  # not before: a repeated step needs them
        if not any(answers.values.values()):
            self._warn_of_no_gradients(len(contexts))

    _step_watched = torch.optim.Optimizer.profile_hook_step(_step)

    def _step_args(
        self, step_id: int, contexts: tuple[int, ...], edits: Sequence[Edit], pass_id: int, ranks: Collection[int]
    ) -> ArgsFor:
        """What each owner is told; until it has answered, it may have missed the changes."""
        changes = self._log.changes(self.param_groups)
        behind = [owner.name for owner in self._owners.values() if owner.is_behind]
        if changes:
            for owner in self._owners.values():
                owner.is_behind = True  # before the changes count as told: however the step ends, they are told again
            self._log.note(changes)

        def args_for(owner: Owner) -> Sequence[Any]:
            options = self._log.everything() if owner.name in behind else changes
            args = [step_id, contexts, pass_id if pass_id and owner.rank in ranks else 0, options, edits]
            while not args[-1]:  # what is not there need not be told
                args.pop()
            return args

        return args_for

    def _warn_of_no_gradients(self, num_contexts: int) -> None:
        """A step that changes nothing is rarely what was meant, and shows only as a loss that stays as it is.

        The text has no number of a context, so that Python shows it once for a loop and not with every step.
        """
        where = "the context" if num_contexts == 1 else f"any of the {num_contexts} contexts"
        warn_user(
            f"step changed nothing: of the {len(self.named_parameters())} parameters (on {', '.join(self._owners)}), "
            f"none has a gradient in {where}. Check that backward was called with this context (not loss.backward()), "
            f"that the forward calls were made inside it, and that the loss depends on these parameters",
            sys._getframe(1),
        )

    def _forget_unfinished(self) -> None:
        for known in list(self._unfinished):  # other threads step with contexts of theirs meanwhile
            if any(is_over(item) for item in known):
                self._unfinished.pop(known, None)

    def follow_backward(self, context_id: int) -> None:
        """Step for ``backward(..., optimizer=self)``."""
        self.step(context_id)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``.grad`` of all parameters, where they are. Gradients in contexts are kept: they end with the context.

        Raises:
            OptimizerError: Some owners did not.
        """
        self._ask("zero_grad", lambda _: (bool(set_to_none),))

    def clip_grad_norm_(
        self, context_id: Contexts, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients of contexts so that the norm of all of them together, on all owners, is at most that.

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
        found: dict[str, torch.Tensor] = {}
        for parts in self._ask("norms", lambda _: (contexts, edits, norm_type)).values():
            for names, norms in parts:
                found.update(zip(names, norms, strict=True))
        ordered = [found[name] for name, _ in self.named_parameters() if name in found]
        total = total_norm(ordered, norm_type, error_if_nonfinite)
        self._edits.add(contexts, (SCALE, clip_factor(total, float(max_norm))))
        return total

    def clip_grad_value_(self, context_id: Contexts, clip_value: float) -> None:
        """Clamp the gradients of contexts between that value and its negative, for the next step of the same contexts."""
        self._edits.add(check_contexts(context_id), (CLAMP, float(clip_value)))

    def _are_finite(self, contexts: tuple[int, ...]) -> bool:
        """Whether all gradients on all owners are."""
        edits = self._edits.of(contexts)
        return all(self._ask("is_finite", lambda _: (contexts, edits)).values())

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, gathered here, in torch's form, with the parameters' names.

        Of a sharded parameter it is that of the whole, however it is divided.

        Raises:
            OptimizerError: An owner did not answer.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            _run_hook(hook, self)
        state: NamedState = {}
        for part in self._ask("named_state", lambda _: (True,)).values():
            state.update(part)
        groups = fold_groups(self.param_groups, self._parts)
        packed = optimizer_state.pack(groups, join_states(state, self._parts))
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            packed = _run_hook(post_hook, self, packed) or packed
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state that was saved, here or in one process, wherever the parameters lived then.

        Raises:
            ConfigurationError: It is the state of other parameters, or does not fit them; nothing was loaded.
            OptimizerError: An owner could not take its part.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = _run_hook(hook, self, state_dict) or state_dict
        groups = fold_groups(self.param_groups, self._parts)
        saved_state, options = optimizer_state.unpack(state_dict, groups)
        found = divide_states(saved_state, self._parts)
        parts: dict[str, NamedState] = {name: {} for name in self._owners}
        for name, rref in self.named_parameters():
            if name in found:
                parts[rref.owner_name()][name] = found[name]

        def part_of(owner: Owner) -> Sequence[Any]:
            part = parts[owner.name]
            return (optimizer_state.copied(part) if owner.is_here else part,)

        told = self._ask("state_problems", lambda owner: (optimizer_state.forms(parts[owner.name]),))
        problems = [f"on {name}, {problem}" for name, lines in told.items() for problem in lines]
        if problems:
            more = f"; and {len(problems) - _SHOWN_PROBLEMS} more" if len(problems) > _SHOWN_PROBLEMS else ""
            raise ConfigurationError(
                f"the state does not fit the parameters of this optimizer; nothing was loaded: "
                f"{'; '.join(problems[:_SHOWN_PROBLEMS])}{more}"
            )
        self._ask("load_named_state", part_of)
        self._set_options(options)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            _run_hook(post_hook, self)

    def _set_options(self, options: Iterable[Options]) -> None:
        for group, saved in zip(self.param_groups, options, strict=True):
            kept = {key: group[key] for key in RESERVED}
            group.clear()
            group.update({**self.defaults, **saved, **kept})


def _check_class(optimizer_class: Any) -> None:
    if not (isinstance(optimizer_class, type) and callable(getattr(optimizer_class, "step", None))):
        raise ConfigurationError(f"expected an optimizer class such as torch.optim.SGD, not {optimizer_class!r}")
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise ConfigurationError(
            "LBFGS sees all parameters as one vector and calls a closure many times in a step, so it cannot be split "
            "over workers; use it in one process, or choose another optimizer"
        )


@interruptible
def _run_hook(hook: Callable[..., Any], *args: Any) -> Any:
    return hook(*args)


def check_contexts(contexts: Any) -> tuple[int, ...]:
    """Return the ids of contexts that are alive here."""
    found = (contexts,) if isinstance(contexts, int) else tuple(contexts) if isinstance(contexts, Iterable) else ()
    for item in found or (None,):
        if not isinstance(item, int) or isinstance(item, bool):
            raise ConfigurationError(
                f"step needs a context id or a list of them, not {contexts!r}; call opt.step(ctx) inside `with "
                f"context() as ctx`"
            )
    if len(set(found)) != len(found):
        raise ConfigurationError(f"a context is listed twice: {found}; its gradients would be counted twice")
    retrieve = current_engine().container.retrieve
    return tuple([retrieve(item).context_id for item in found])


def is_over(context_id: int) -> bool:
    return current_engine().container.find(context_id) is None


# -- asking the owners --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Owner:
    name: str
    optimizer: RRef[LocalOptimizer]
    is_behind: bool = False  # whether it may have missed a change of options
    rank: int = field(init=False)
    is_here: bool = field(init=False)  # whether that is the worker that runs this

    def __post_init__(self) -> None:
        self.rank, self.is_here = self.optimizer.owner().id, self.optimizer.is_owner()

    def run(self, operation: str, args: Sequence[Any], timeout_s: float) -> Any:
        if self.is_here:
            return getattr(self.optimizer.local_value(), operation)(*args)
        return self.optimizer._ask(OPERATE, (operation, *args), timeout_s)


ArgsFor = Callable[[Owner], Sequence[Any]]


@dataclass(slots=True)
class Answers:
    values: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, Exception] = field(default_factory=dict)

    def take(self, name: str, operation: str, wait: Callable[[], Any]) -> None:
        """Wait for an answer; one of another form is a failure."""
        try:
            self.values[name] = read_answer(operation, wait())
        except Exception as error:
            self.failed[name] = error

    @property
    def first_failure(self) -> Exception | None:
        return next(iter(self.failed.values()), None)

    def explain(self) -> str:
        return "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in self.failed.items())


def ask_all(
    owners: Iterable[Owner], operation: str, args_for: ArgsFor, timeout_s: float, answers: Answers | None = None
) -> Answers:
    """Ask all owners at the same time, and wait for all.

    The last one is called and waited for in one go, which is quicker than a future; this worker itself, if it is one of
    them, comes last.
    """
    answers = Answers() if answers is None else answers
    *others, last = sorted(owners, key=attrgetter("is_here")) or (None,)
    if last is None:
        return answers
    started: list[tuple[str, CallFuture[Any]]] = []
    was_enabled = torch.is_grad_enabled()
    set_grad_mode(False)  # these calls have no part in any graph; torch.no_grad() costs ten times as much
    try:
        for owner in others:
            try:
                args = (operation, *args_for(owner))
                started.append((owner.name, owner.optimizer._submit(OPERATE, args, timeout_s)))
            except Exception as error:
                answers.failed[owner.name] = error
        answers.take(last.name, operation, lambda: last.run(operation, args_for(last), timeout_s))
        for name, future in started:
            answers.take(name, operation, future.wait)
    finally:
        set_grad_mode(was_enabled)
    return answers
