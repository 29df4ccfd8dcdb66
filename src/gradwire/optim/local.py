"""The owner's side: one torch optimizer for the parameters of a distributed one that live on this worker."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradwire.autograd import sharing, worker
from gradwire.autograd.gradients import GradientTable, add_gradient
from gradwire.autograd.messages import CommitPass
from gradwire.autograd.norms import are_finite, norm_of
from gradwire.errors import CallCancelled, ConfigurationError, UnknownContext
from gradwire.optim._once import StepMemory
from gradwire.optim._options import RESERVED
from gradwire.optim.edits import Edit, edited
from gradwire.optim.states import NamedState, copied
from gradwire.rpc.incoming import current_request
from gradwire.rref import RRef
from gradwire.shard.tensor import ShardedTensor
from gradwire.shard.torch_optimizer import (
    Form,
    is_option,
    is_torchs,
    laid_out_like,
    load_state,
    make_optimizer,
    method_of,
    quick_step,
    state_problem,
)

OwnedGroup = tuple[int, list[str], list[RRef[Any]], dict[str, Any]]
"""The number of a group, and what of it a worker has: names, references, options."""
Norms = tuple[list[str], torch.Tensor]
"""Names of parameters, and the norms of their gradients."""


class LocalOptimizer:
    """What one worker does for a distributed optimizer.

    Args:
        optimizer_class: A class of optimizers.
        groups: The groups that this worker has a part in.
        args: More arguments for the class.
        kwargs: Its keyword arguments.

    Raises:
        ConfigurationError: A parameter is there twice.
        Exception: What the class raises.
    """

    def __init__(
        self, optimizer_class: type[Any], groups: Sequence[OwnedGroup], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        # Guards everything below: one operation at a time.
        self._alone = sharing.Held(threading.Lock(), "this optimizer has been busy")
        self._names: dict[torch.Tensor, str] = {}
        self._numbers: list[int] = []
        self._memory = StepMemory()
        self._is_torchs = is_torchs(optimizer_class)
        self._check_options({**dict(enumerate(args)), **kwargs})
        found = [self._take(group) for group in groups]
        is_plain = len(found) == 1 and set(found[0]) == {"params"}  # some classes know no groups
        self._optimizer = make_optimizer(optimizer_class, found[0]["params"] if is_plain else found, args, kwargs)
        self._torch_step = quick_step(self._optimizer) if self._is_torchs else self._optimizer.step

    def __repr__(self) -> str:
        return f"<LocalOptimizer: {type(self._optimizer).__name__} of {len(self._names)} parameters>"

    def _take(self, group: OwnedGroup) -> dict[str, Any]:
        number, names, rrefs, options = group
        if self._numbers and number <= self._numbers[-1]:
            raise ConfigurationError(f"group {number} is here already, or comes too late")
        self._check_options(options)
        params = [rref.local_value() for rref in rrefs]
        known = set(self._names.values())
        for name, parameter in zip(names, params, strict=True):
            if not isinstance(parameter, torch.Tensor):
                raise ConfigurationError(f"parameter {name!r} is no tensor, but of type {type(parameter).__name__}")
            if isinstance(parameter, ShardedTensor):
                raise ConfigurationError(
                    f"parameter {name!r} is a reference to a sharded tensor; pass the sharded tensor itself, not a reference"
                )
            if parameter in self._names:
                raise ConfigurationError(
                    f"some parameters appear more than once: {name!r} and {self._names[parameter]!r} are the same"
                )
            if name in known:
                raise ConfigurationError(f"two parameters have the name {name!r}; give each its own")
            known.add(name)
            self._names[parameter] = name
        self._numbers.append(number)
        sharing.guard(params, "snapshot")  # before they are used: a step must find out who still needs their old values
        return {"params": params, **options}

    def describe(self) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
        """The defaults of the optimizer, and the options of its groups by number."""
        return dict(self._optimizer.defaults), {
            number: _options_of(group)
            for number, group in zip(self._numbers, self._optimizer.param_groups, strict=True)
        }

    def add_groups(self, groups: Sequence[OwnedGroup]) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
        """More groups; returns what `describe` does."""
        with self._alone:
            num_before = len(self._optimizer.param_groups)
            try:
                for group in groups:
                    method_of(self._optimizer, "add_param_group")(self._take(group))
            except BaseException:
                self._keep_groups(num_before)
                raise
            return self.describe()

    def remove_groups(self, first: int) -> None:
        """Groups from that number on are not wanted: another worker could not add its part of them."""
        with self._alone:
            self._keep_groups(sum(number < first for number in self._numbers))

    def _keep_groups(self, keep: int) -> None:
        del self._numbers[keep:]
        del self._optimizer.param_groups[keep:]
        kept = {parameter for group in self._optimizer.param_groups for parameter in group["params"]}
        self._names = {parameter: name for parameter, name in self._names.items() if parameter in kept}

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(
        self,
        step_id: int,
        context_ids: Sequence[int],
        pass_id: int = 0,
        options: dict[int, dict[str, Any]] | None = None,
        edits: Sequence[Edit] = (),
    ) -> int:
        """Steps with the gradients of some contexts, unless that was done already.

        Args:
            step_id: Rises from step to step.
            context_ids: Their gradients are added up.
            pass_id: A pass in the first context that is committed hereby, if it is not 0.
            options: What has changed, by group.
            edits: What is done to the gradients first.

        Returns:
            How many parameters had a gradient.
        """
        if pass_id:
            _take_commit(context_ids[0], pass_id)
        with self._alone:
            if options:  # first: whoever repeats a step may have more to say
                self._set_options(options)
            done = self._memory.find(step_id)
            if done is not None:
                return done
            if (request := current_request()) is not None and request.is_dropped:
                raise CallCancelled("the step was given up while it waited; nothing has changed")
            table = self._gather(context_ids, edits)
            if not edits and not self._is_torchs:  # it may change them; edited ones are nobody else's
                table = {leaf: gradient.clone() for leaf, gradient in table.items()}
            self._step(table, context_ids)
            self._memory.add(step_id, len(table))
            return len(table)

    def _step(self, table: GradientTable, context_ids: Sequence[int]) -> None:
        with sharing.stepping(table, context_ids), sharing.lending_grads(self._names):
            before = [(parameter, parameter.grad) for parameter in self._names]
            if any(group.get("fused") for group in self._optimizer.param_groups):
                table = {parameter: laid_out_like(parameter, gradient) for parameter, gradient in table.items()}
            try:
                for parameter in self._names:
                    parameter.grad = table.get(parameter)
                self._torch_step()
            finally:
                for parameter, gradient in before:
                    parameter.grad = gradient

    def _set_options(self, options: dict[int, dict[str, Any]]) -> None:
        groups = dict(zip(self._numbers, self._optimizer.param_groups, strict=True))
        for number in groups.keys() & options.keys():
            unknown = options[number].keys() - _options_of(groups[number]).keys()
            if unknown:
                raise ConfigurationError(f"group {number} has no options {sorted(unknown)}; nothing has changed")
            self._check_options(options[number])
        for number in groups.keys() & options.keys():
            groups[number].update(options[number])

    def _check_options(self, options: Mapping[Any, Any]) -> None:
        """Classes of torch's know numbers, flags, texts, and tuples of these; others may know more.

        Raises:
            ConfigurationError: Something else is among the options.
        """
        for key, value in options.items():
            if key in RESERVED or (self._is_torchs and not is_option(value)):
                raise ConfigurationError(
                    f"option {key!r} cannot be a {type(value).__name__} such as this: {value!r:.100}"
                )

    def _gather(self, context_ids: Sequence[int], edits: Sequence[Edit]) -> GradientTable:
        """The gradients of this optimizer's parameters in some contexts, added up and edited."""
        table: GradientTable = {}
        for context_id in context_ids:
            for leaf, gradient in _gradients_of(context_id).items():
                if leaf in self._names:
                    add_gradient(table, leaf, gradient.detach() if gradient.requires_grad else gradient)
        return edited(table, edits) if edits else table

    # -- gradients -------------------------------------------------------------------------------------------------------

    def norms(self, context_ids: Sequence[int], edits: Sequence[Edit], norm_type: float) -> list[Norms]:
        """The norms of all gradients, with the names of the parameters; one tensor for each dtype."""
        with self._alone:
            found: dict[torch.dtype, tuple[list[str], list[torch.Tensor]]] = {}
            for leaf, gradient in self._gather(context_ids, edits).items():
                norm = norm_of(gradient, norm_type)
                names, norms = found.setdefault(norm.dtype, ([], []))
                names.append(self._names[leaf])
                norms.append(norm)
            return [(names, torch.stack(norms)) for names, norms in found.values()]

    def is_finite(self, context_ids: Sequence[int], edits: Sequence[Edit]) -> bool:
        """Whether all gradients are finite."""
        with self._alone:
            return are_finite(self._gather(context_ids, edits).values())

    def zero_grad(self, set_to_none: bool) -> None:
        """Clears ``.grad`` of the parameters; contexts are left alone."""
        with self._alone, sharing.lending_grads(self._names):  # another trainer's step may have lent them its gradients
            method_of(self._optimizer, "zero_grad")(set_to_none)

    # -- state -----------------------------------------------------------------------------------------------------------

    def named_state(self, is_copied: bool = False) -> NamedState:
        """State of the parameters that have any, by their names: tensors and plain values.

        Args:
            is_copied: Whether it shall stay as it is when the next step is made, at the price of its memory.
        """
        with self._alone:
            state = self._optimizer.state
            found = {name: dict(state[leaf]) for leaf, name in self._names.items() if state.get(leaf)}
            return copied(found) if is_copied else found

    def state_problems(self, forms: Mapping[str, Mapping[str, Form]]) -> list[str]:
        """Return why a state cannot be loaded, one line each; empty if it can.

        Args:
            forms: What `gradwire.shard.torch_optimizer.form_of` says of each value, by parameter and key.
        """
        with self._alone:
            parameters = {name: parameter for parameter, name in self._names.items()}
            kind = type(self._optimizer)
            found = [f"no parameter here is called {name!r}" for name in forms if name not in parameters]
            for name in parameters.keys() & forms.keys():
                for key, form in forms[name].items():
                    problem = state_problem(kind, parameters[name], key, form)
                    found += [f"state {key!r} of parameter {name!r} {problem}"] if problem else []
            return found

    def load_named_state(self, state: NamedState) -> None:
        """Replaces the state of all parameters; those that are not named have none afterwards.

        Raises:
            ConfigurationError: There is no parameter of such a name here, or the state of one does not fit it; nothing has
                changed.
        """
        unknown = sorted(set(state) - set(self._names.values()))
        if unknown:
            raise ConfigurationError(
                f"no parameter here is called {', '.join(unknown)}; there are {list(self._names.values())}"
            )
        with self._alone:
            found = {leaf: state[name] for leaf, name in self._names.items() if name in state}
            load_state(self._optimizer, found, self._names)


def _gradients_of(context_id: int) -> GradientTable:
    """What a context has gathered on this worker; nothing if this worker has no part in it.

    Raises:
        UnknownContext: It was released.
    """
    here = worker.here()
    context = here.container.find(context_id)
    if context is not None:
        return here.gradients_of(context, sharing.time_left())
    where = here.container.where_released(context_id)
    if where is not None:
        raise UnknownContext(f"Could not find autograd context with id: {context_id}. It was released {where}")
    return {}


def _take_commit(context_id: int, pass_id: int) -> None:
    request = current_request()
    if request is not None:
        worker.here().engine.take_commit(request.source.info, CommitPass(context_id, pass_id))


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in RESERVED}
