"""`DistributedOptimizer`: one optimizer for parameters that live on many workers.

    driver                                   each owner, in parallel
    DistributedOptimizer(...)   -- make -->   LocalOptimizer: a torch optimizer for its parameters
    backward(ctx, loss)                       gradients accumulate in the context
    step(ctx)                   -- step -->   its torch optimizer steps with the context's gradients

A step is one message to each owner: ids, and the options that have changed. The class is a `torch.optim.Optimizer`, so
learning-rate schedulers work with it unchanged.
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
from gradwire.observe import events
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
from gradwire.types import is_class

Contexts = int | Iterable[int]

_SHOWN_PROBLEMS = 10  # in an error
_PUBLIC_NAMES = {  # of the operations that owners perform, for errors
    "named_state": "state_dict",
    "state_problems": "load_state_dict",
    "load_named_state": "load_state_dict",
    "norms": "clip_grad_norm_",
    "is_finite": "unscale_",
}


class DistributedOptimizer(torch.optim.Optimizer):
    """Steps parameters on the workers that own them, with the gradients of autograd contexts.

    Args:
        optimizer_class: A class of `torch.optim`, or one with the same interface; not LBFGS.
        params_rref: References to parameters, remote or local modules, local parameters, ``(name, reference)`` pairs, or
            groups of these: ``{"params": [...], "lr": 0.1}``. Sharded tensors of RPC workers are
            parameters, too: each shard is stepped by its owner.
        args: More arguments for the class.
        kwargs: Keyword arguments for the class.

    Attributes:
        param_groups: Options of the groups, with references and names; changes take effect with the next step.
        is_functional_optim: Always False; for compatibility with PyTorch.

    Raises:
        ConfigurationError: An argument is wrong.
        OptimizerNotMade: An owner could not create its part, or is lost.
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
        self._parts: dict[str, PartOf] = {}  # the sharded parameter of each shard, by name
        self._is_made = False  # until then, the base class calls `add_param_group`
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
        """References to the owners' parts of this optimizer."""
        return [owner.optimizer for owner in self._owners.values()]

    def named_parameters(self) -> list[Named]:
        """Return all parameters in order, with unique names; for sharded ones, their shards."""
        return [
            entry for group in self.param_groups for entry in zip(group["param_names"], group["params"], strict=True)
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, which may be on new workers.

        Args:
            param_group: ``{"params": [...], "lr": 0.1}``; parameters as in the constructor.

        Raises:
            ConfigurationError: It is not a group, or contains something that is not a parameter.
            OptimizerNotMade: An owner could not add its part; nothing was added on any owner.
        """
        if self._is_made:
            reader = self._reader.copy()
            (param_group,), _ = self._place([reader.read(param_group)], len(self.param_groups))
            self._reader = reader  # only now, so that names of a group that failed stay free
        self._log.add(options_of(param_group))
        self.param_groups.append(param_group)

    def _place(self, groups: Sequence[Group], first: int) -> tuple[list[dict[str, Any]], Options]:
        """Let all owners create their parts of new groups in parallel; group numbers start at ``first``.

        Returns:
            The groups in the form of `torch.optim.Optimizer`, and the defaults of the owners' optimizers.
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
        # Torch's classes are sent by name; others are pickled, which needs trust="code".
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
            if self._is_made:
                text = (
                    f"the parameter group could not be added on every worker that owns parameters: "
                    f"{answers.explain()}; nothing was added"
                )
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
            called = _PUBLIC_NAMES.get(operation, operation)
            text = f"{called} failed on {len(answers.failed)} of {len(self._owners)} workers: {answers.explain()}"
            raise OptimizerError(text, answers.failed) from answers.first_failure
        return answers.values

    # -- steps ---------------------------------------------------------------------------------------------------------

    @interruptible  # user hooks run in torch's wrapper; `_step` itself must not be interrupted
    def step(self, context_id: Contexts, *, timeout: float = UNSET_RPC_TIMEOUT) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient in a context; gradients of several contexts are added up.

        Parameters without a gradient do not change, and ``.grad`` is neither used nor changed; if no parameter has a
        gradient, there is a warning. If the step fails on some workers, the gradients are kept: call it again with the
        same contexts, and workers that have stepped do not step again.

        Args:
            context_id: The id that `gradwire.autograd.context` returned, or a list of such ids.
            timeout: Seconds each owner has to step.

        Raises:
            ConfigurationError: `context_id` is not a context id or a list of different ones.
            UnknownContext: A context was released, or never existed here.
            OptimizerStepFailed: Some owners did not step; the error lists those that did.
            OptimizerError: A sharded parameter was resharded since the optimizer was created.
        """
        # In a subclass that overrides step and calls this one, torch has wrapped the override.
        if type(self).step is DistributedOptimizer.step and is_watched(self):
            self._step_watched(context_id, **({} if timeout == UNSET_RPC_TIMEOUT else {"timeout": timeout}))
        else:
            self._step(context_id, timeout=timeout)

    step.hooked = True  # type: ignore[attr-defined]  # torch need not wrap it: see `_step_watched`

    def _step(self, context_id: Contexts, *, timeout: float = UNSET_RPC_TIMEOUT) -> None:
        contexts = check_contexts(context_id)
        with events.Span(
            "optimizer_step",
            self._optimizer_class.__name__,
            lambda: current_engine().worker,
            contexts[0],
            lambda: {"role": "asks", "num_owners": len(self._owners)},
        ):
            self._step_owners(contexts, timeout)

    def _step_owners(self, contexts: tuple[int, ...], timeout: float) -> None:
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
            if not waiting <= told:  # some may not know of the commit
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
        self._edits.drop(contexts)  # only now: a repeated step needs them
        if not any(answers.values.values()):
            self._warn_of_no_gradients(len(contexts))

    _step_watched = torch.optim.Optimizer.profile_hook_step(_step)

    def _step_args(
        self, step_id: int, contexts: tuple[int, ...], edits: Sequence[Edit], pass_id: int, ranks: Collection[int]
    ) -> ArgsFor:
        """Return the arguments for each owner; until it has answered, it may have missed the changes."""
        changes = self._log.changes(self.param_groups)
        behind = [owner.name for owner in self._owners.values() if owner.is_behind]
        if changes:
            for owner in self._owners.values():
                owner.is_behind = True  # before the changes are noted: if the step fails, they are sent again
            self._log.note(changes)

        def args_for(owner: Owner) -> Sequence[Any]:
            options = self._log.everything() if owner.name in behind else changes
            args = [step_id, contexts, pass_id if pass_id and owner.rank in ranks else 0, options, edits]
            while not args[-1]:  # empty arguments need not be sent
                args.pop()
            return args

        return args_for

    def _warn_of_no_gradients(self, num_contexts: int) -> None:
        """Warn of a step without gradients, which is rarely intended and shows only as a loss that does not change.

        The text has no context id, so that Python shows it once in a loop and not in every step.
        """
        where = "the context" if num_contexts == 1 else f"any of the {num_contexts} contexts"
        warn_user(
            f"step changed nothing: of the {len(self.named_parameters())} parameters (on {', '.join(self._owners)}), "
            f"none has a gradient in {where}. Check that backward was called with this context (not loss.backward()), "
            f"that the forward calls were made inside it, and that the loss depends on these parameters",
            sys._getframe(1),
        )

    def _forget_unfinished(self) -> None:
        for known in list(self._unfinished):  # other threads step with their own contexts meanwhile
            if any(is_over(item) for item in known):
                self._unfinished.pop(known, None)

    def follow_backward(self, context_id: int) -> None:
        """Step for ``backward(..., optimizer=self)``."""
        self.step(context_id)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``.grad`` of all parameters on their owners. Gradients in contexts are kept until the context ends.

        Raises:
            OptimizerError: The operation failed on some owners.
        """
        self._ask("zero_grad", lambda _: (bool(set_to_none),))

    def clip_grad_norm_(
        self, context_id: Contexts, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients of contexts so that their total norm, over all owners, is at most `max_norm`.

        It takes one round trip for the norms; the scaling itself is part of the next step with the same contexts.

        Args:
            context_id: As for `step`; gradients of several contexts are added up first.
            max_norm: Upper limit of the norm.
            norm_type: 2 for the Euclidean norm; ``inf`` for the largest magnitude.
            error_if_nonfinite: Raise if the norm is infinite or NaN; nothing is scaled then.

        Returns:
            The norm before clipping.

        Raises:
            ConfigurationError, UnknownContext: As for `step`.
            OptimizerError: The norm is not finite and `error_if_nonfinite` is set, or an owner did not answer.
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
        """Clamp the gradients of contexts to ``[-clip_value, clip_value]`` in the next step with the same contexts.

        Raises:
            ConfigurationError, UnknownContext: As for `step`.
        """
        self._edits.add(check_contexts(context_id), (CLAMP, float(clip_value)))

    def _are_finite(self, contexts: tuple[int, ...]) -> bool:
        """Return whether all gradients on all owners are finite."""
        edits = self._edits.of(contexts)
        return all(self._ask("is_finite", lambda _: (contexts, edits)).values())

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Gather the state of all parameters here, in torch's form, with the parameters' names.

        The state of a sharded parameter is that of the whole tensor, independent of its sharding.

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
        """Load a saved state, including one saved by a single process or with different owners.

        Raises:
            ConfigurationError: The state is for other parameters, or does not fit them; nothing was loaded.
            OptimizerError: An owner could not load its part.
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
    if not (is_class(optimizer_class) and callable(getattr(optimizer_class, "step", None))):
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
                f"context_id must be a context id or a list of them, not {contexts!r}; pass the ctx of `with "
                f"gradwire.autograd.context() as ctx`"
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
    is_here: bool = field(init=False)  # whether it is this worker

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
        """Wait for an answer; an invalid one counts as a failure."""
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
    """Call all owners in parallel, and wait for all of them.

    The last one is called synchronously, which is faster than a future; this worker itself, if it is an owner, comes last.
    """
    answers = Answers() if answers is None else answers
    *others, last = sorted(owners, key=attrgetter("is_here")) or (None,)
    if last is None:
        return answers
    started: list[tuple[str, CallFuture[Any]]] = []
    was_enabled = torch.is_grad_enabled()
    set_grad_mode(False)  # these calls are not part of any graph; torch.no_grad() costs ten times as much
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
