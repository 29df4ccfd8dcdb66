"""The owner's side: one torch optimizer for the parameters of a distributed one that live on this worker.

Its operations are called by name, with plain data. The annotations of the methods define the accepted types: arguments and
answers that do not match are refused before anything is done.
"""

from __future__ import annotations

import collections
import inspect
import threading
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, cast

import msgspec
import torch
from msgspec import Meta

from gradwire._interrupts import interruptible
from gradwire.autograd.api import current_engine
from gradwire.autograd.messages import CommitPass
from gradwire.errors import CallCancelled, ConfigurationError, NotExposed, OptimizerError, UnknownContext
from gradwire.observe import events
from gradwire.optim.grad_transforms import Edit, edited
from gradwire.optim.state_dict import RESERVED, NamedState, copied, options_of
from gradwire.params import snapshots
from gradwire.params.grads import GradientTable, add_gradient, are_finite, norm_of
from gradwire.rpc.connection import current_request
from gradwire.rpc.functions import expose
from gradwire.rref import RRef
from gradwire.rref.owner import find_value
from gradwire.shard.tensor import ShardedTensor
from gradwire.shard.torch_optimizer import (
    beside,
    is_option,
    is_torchs,
    laid_out_like,
    load_state,
    make_optimizer,
    method_of,
    quick_step,
    state_problem,
)
from gradwire.types import is_class
from gradwire.wire.devices import CPU, move_all
from gradwire.wire.messages import read_plain

MAKE: Final = "gradwire.optim.make"
OPERATE: Final = "gradwire.optim.operate"

Uint63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Uint64 = Annotated[int, Meta(ge=0)]  # msgspec cannot express the upper limit; `_Arguments` checks it
ContextIds = Annotated[tuple[Uint64, ...], Meta(min_length=1)]
Edits = Annotated[tuple[Edit, ...], Meta(max_length=64)]
Options = dict[str, Any]
Groups = Annotated[list[tuple[Uint63, list[str], list[RRef[Any]], Options]], Meta(min_length=1)]
"""A worker's part of each group: the number of the group, names, references, options."""
Description = tuple[Options, dict[int, Options]]
"""The defaults of an optimizer, and the options of its groups by number."""
Norms = list[tuple[list[str], torch.Tensor]]
"""Names of parameters, and the norms of their gradients; one tensor for each dtype and device."""
Forms = dict[str, dict[str, tuple[Annotated[tuple[Uint63, ...], Meta(max_length=64)], bool] | str]]
"""What `gradwire.shard.torch_optimizer.form_of` says of each value, by parameter and key."""


class LocalOptimizer:
    """One worker's part of a distributed optimizer.

    Args:
        optimizer_class: An optimizer class.
        groups: This worker's parts of the groups.
        args: More arguments for the class.
        kwargs: Keyword arguments for the class.

    Raises:
        ConfigurationError: A parameter is listed twice.
        Exception: The exception that the class raised.
    """

    def __init__(self, optimizer_class: type[Any], groups: Groups, args: Sequence[Any], kwargs: Options) -> None:
        # Guards everything below: one operation at a time.
        self._alone = snapshots.Held(threading.Lock(), "another operation is using this optimizer")
        self._names: dict[torch.Tensor, str] = {}
        self._numbers: list[int] = []
        self._memory = StepMemory()
        self._is_torchs = is_torchs(optimizer_class)
        self._check_options({**dict(enumerate(args)), **kwargs})
        found = [self._take(*group) for group in groups]
        is_plain = len(found) == 1 and set(found[0]) == {"params"}  # some classes know no groups
        self._optimizer = make_optimizer(optimizer_class, found[0]["params"] if is_plain else found, args, kwargs)
        self._torch_step = quick_step(self._optimizer) if self._is_torchs else _users_step(self._optimizer)

    def __repr__(self) -> str:
        return f"<LocalOptimizer: {type(self._optimizer).__name__} of {len(self._names)} parameters>"

    # -- groups --------------------------------------------------------------------------------------------------------

    def describe(self) -> Description:
        """Return the defaults of the optimizer, and the options of its groups by number."""
        groups = zip(self._numbers, self._optimizer.param_groups, strict=True)
        return dict(self._optimizer.defaults), {number: options_of(group) for number, group in groups}

    def add_groups(self, groups: Groups) -> Description:
        """Add groups; return the same as `describe`."""
        with self._alone:
            num_before = len(self._optimizer.param_groups)
            try:
                for group in groups:
                    method_of(self._optimizer, "add_param_group")(self._take(*group))
            except Exception:
                self._keep_groups(num_before)
                raise
            return self.describe()

    def remove_groups(self, first: Uint63) -> None:
        """Remove the groups from that number on, because another worker could not add its part of them."""
        with self._alone:
            self._keep_groups(sum(number < first for number in self._numbers))

    def _take(self, number: int, names: list[str], rrefs: list[RRef[Any]], options: Options) -> dict[str, Any]:
        """Return a group as torch takes it, with its parameters noted and guarded."""
        if self._numbers and number <= self._numbers[-1]:
            raise ConfigurationError(f"group {number} was added before, or arrived out of order")
        self._check_options(options)
        params = [rref.local_value() for rref in rrefs]
        known = set(self._names.values())
        for name, parameter in zip(names, params, strict=True):
            if not isinstance(parameter, torch.Tensor):
                raise ConfigurationError(f"parameter {name!r} is not a tensor, but a {type(parameter).__name__}")
            if isinstance(parameter, ShardedTensor):
                raise ConfigurationError(
                    f"parameter {name!r} is a reference to a sharded tensor; pass the sharded tensor itself, not a "
                    f"reference"
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
        snapshots.guard(
            params, "snapshot"
        )  # before they are used: a step must know which contexts still need their old values
        return {"params": params, **options}

    def _keep_groups(self, keep: int) -> None:
        del self._numbers[keep:]
        del self._optimizer.param_groups[keep:]
        kept = {parameter for group in self._optimizer.param_groups for parameter in group["params"]}
        self._names = {parameter: name for parameter, name in self._names.items() if parameter in kept}

    def _set_options(self, options: Mapping[int, Options]) -> None:
        groups = dict(zip(self._numbers, self._optimizer.param_groups, strict=True))
        for number in groups.keys() & options.keys():
            unknown = options[number].keys() - options_of(groups[number]).keys()
            if unknown:
                raise ConfigurationError(f"group {number} has no options {sorted(unknown)}; nothing was changed")
            self._check_options(options[number])
        for number in groups.keys() & options.keys():
            groups[number].update(options[number])

    def _check_options(self, options: Mapping[Any, Any]) -> None:
        """Check the types of options: torch's classes take numbers, flags, strings and tuples of these; others any."""
        for key, value in options.items():
            if key in RESERVED or (self._is_torchs and not is_option(value)):
                raise ConfigurationError(
                    f"option {key!r} cannot have a value of type {type(value).__name__}: {value!r:.100}"
                )

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(
        self,
        step_id: Uint63,
        context_ids: ContextIds,
        pass_id: Uint64 = 0,
        options: dict[int, Options] | None = None,
        edits: Edits = (),
    ) -> int:
        """Step with the gradients of some contexts, unless the same step was done before.

        Args:
            step_id: Increases from step to step.
            context_ids: Contexts whose gradients are added up.
            pass_id: A pass of the first context that this call commits; 0 for none.
            options: Changed options, by group.
            edits: Edits to apply to the gradients first.

        Returns:
            Number of parameters that had a gradient.
        """
        request = current_request()
        if pass_id and request is not None:
            current_engine().on_commit(request.source.info, CommitPass(context_ids[0], pass_id))
        with self._alone:
            if options:  # first: a repeated request may bring new options
                self._set_options(options)
            done = self._memory.find(step_id)
            if done is not None:
                return done
            if request is not None and request.is_dropped:
                raise CallCancelled("the step was cancelled while it was waiting; nothing was changed")
            table = self._gather(context_ids, edits)
            if not edits and not self._is_torchs:  # the class may change them; edited ones are copies already
                table = {leaf: gradient.clone() for leaf, gradient in table.items()}
            name = type(self._optimizer).__name__
            with events.Span(
                "optimizer_step",
                name,
                lambda: current_engine().worker,
                context_ids[0],
                lambda: {"role": "owner", "num_parameters": len(table)},
            ):
                self._step(table, context_ids)
            self._memory.add(step_id, len(table))
            return len(table)

    def _step(self, table: GradientTable, context_ids: ContextIds) -> None:
        with snapshots.stepping(table, context_ids), snapshots.lending_grads(self._names):
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

    def _gather(self, context_ids: ContextIds, edits: Edits) -> GradientTable:
        """Return the gradients of this optimizer's parameters in some contexts, added up and edited."""
        table: GradientTable = {}
        for context_id in context_ids:
            for leaf, gradient in _gradients_of(context_id).items():
                if leaf in self._names:
                    add_gradient(table, leaf, gradient.detach() if gradient.requires_grad else gradient)
        return edited(table, edits) if edits else table

    # -- gradients -----------------------------------------------------------------------------------------------------

    def norms(self, context_ids: ContextIds, edits: Edits, norm_type: float) -> Norms:
        """Return the norms of all gradients, with the names of the parameters."""
        with self._alone:
            found: dict[tuple[torch.dtype, torch.device], tuple[list[str], list[torch.Tensor]]] = {}
            for leaf, gradient in self._gather(context_ids, edits).items():
                norm = norm_of(gradient, norm_type)
                names, norms = found.setdefault((norm.dtype, norm.device), ([], []))
                names.append(self._names[leaf])
                norms.append(norm)
            return [(names, torch.stack(norms)) for names, norms in found.values()]

    def is_finite(self, context_ids: ContextIds, edits: Edits) -> bool:
        """Return whether all gradients are finite."""
        with self._alone:
            return are_finite(self._gather(context_ids, edits).values())

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear ``.grad`` of the parameters; gradients in contexts are kept."""
        with self._alone, snapshots.lending_grads(self._names):  # another trainer's step may have lent its gradients
            method_of(self._optimizer, "zero_grad")(set_to_none)

    # -- state ---------------------------------------------------------------------------------------------------------

    def named_state(self, is_copied: bool = False) -> NamedState:
        """Return the state of the parameters that have any, by their names: tensors and plain values.

        Args:
            is_copied: Whether to copy it, so that the next step does not change it.
        """
        with self._alone:
            state = self._optimizer.state
            found = {name: dict(state[leaf]) for leaf, name in self._names.items() if state.get(leaf)}
            return copied(found) if is_copied else found

    def state_problems(self, forms: Forms) -> list[str]:
        """Return why a state cannot be loaded, one line each; empty if it can."""
        with self._alone:
            parameters = {name: parameter for parameter, name in self._names.items()}
            kind = type(self._optimizer)
            found = [f"no parameter is called {name!r}" for name in forms if name not in parameters]
            for name in parameters.keys() & forms.keys():
                for key, form in forms[name].items():
                    problem = state_problem(kind, parameters[name], key, form)
                    found += [f"state {key!r} of parameter {name!r} {problem}"] if problem else []
            return found

    def placed(self, name: str, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the state of one parameter on its device; as it is if there is no parameter of that name."""
        found = next((parameter for parameter, known in self._names.items() if known == name), None)
        return dict(values) if found is None else beside(found, values)

    def load_named_state(self, state: NamedState) -> None:
        """Replace the state of all parameters; those that are not named have none afterwards.

        Raises:
            ConfigurationError: A name is unknown here, or a state does not fit its parameter; nothing was changed.
        """
        unknown = sorted(set(state) - set(self._names.values()))
        if unknown:
            raise ConfigurationError(
                f"no parameter on worker {current_engine().worker} is called {', '.join(unknown)}; there are "
                f"{list(self._names.values())}"
            )
        with self._alone:
            found = {leaf: state[name] for leaf, name in self._names.items() if name in state}
            load_state(self._optimizer, found, self._names)


class StepMemory:
    """The outcomes of the last `size` steps, by id, so that a repeated request does not step again. Ids increase.

    A step is repeated only after its caller has waited for it, so it is among the last few.
    """

    def __init__(self, size: int = 64) -> None:
        self._size = size
        self._done: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._forgotten = -1  # the highest id that was dropped

    def find(self, step_id: int) -> int | None:
        """Return the outcome of a step; None if it is new."""
        found = self._done.get(step_id)
        if found is None and step_id <= self._forgotten:
            raise OptimizerError(f"step {step_id} is too old: its owner no longer knows whether it was done")
        return found

    def add(self, step_id: int, outcome: int) -> None:
        self._done[step_id] = outcome
        while len(self._done) > self._size:
            self._forgotten = max(self._forgotten, self._done.popitem(last=False)[0])


def _users_step(optimizer: Any) -> Callable[[], Any]:
    @interruptible
    def step() -> Any:
        return optimizer.step()

    return step


def _gradients_of(context_id: int) -> GradientTable:
    """Return the gradients of a context on this worker; none if this worker does not take part in it."""
    container = current_engine().container
    context = container.find(context_id)
    if context is not None:
        return context.wait_gradients(snapshots.time_left())
    where = container.where_released(context_id)
    if where is not None:
        raise UnknownContext(f"Could not find autograd context with id: {context_id}. It was released {where}")
    return {}


# -- operations for other workers ---------------------------------------------------------------------------------------


class _Arguments(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    def __post_init__(self) -> None:
        ids = (*getattr(self, "context_ids", ()), getattr(self, "pass_id", 0))
        if max(ids) >> 64:
            raise ValueError("an id has more than 64 bits")
        if any(len(names) != len(rrefs) for _, names, rrefs, _ in getattr(self, "groups", ())):
            raise ValueError("a group of parameters needs a name for each reference")


def _arguments_of(function: Callable[..., Any], parameters: Iterable[inspect.Parameter]) -> type[_Arguments]:
    hints = typing.get_type_hints(function, include_extras=True)
    fields: list[Any] = [
        (item.name, hints[item.name], *(() if item.default is item.empty else (item.default,))) for item in parameters
    ]
    return cast(type[_Arguments], msgspec.defstruct(function.__name__, fields, bases=(_Arguments,)))


def _make(optimizer_class: Any, groups: Groups, args: tuple[Any, ...], kwargs: Options) -> LocalOptimizer:
    """Create an owner's part; a class of torch is given by its name."""
    sent = read_plain((optimizer_class, groups, args, kwargs), _MAKE, "invalid arguments for creating an optimizer")
    found = sent.optimizer_class
    if isinstance(found, str):
        found = getattr(torch.optim, found, None)
        if not is_class(found) or not is_torchs(found) or found is torch.optim.LBFGS:
            raise ConfigurationError(
                f"torch.optim on worker {current_engine().worker} has no optimizer {sent.optimizer_class!r} that can be "
                "split over workers"
            )
    if not is_class(found):
        raise ConfigurationError(f"expected an optimizer class, not {found!r}")
    return LocalOptimizer(found, sent.groups, sent.args, sent.kwargs)


def _operate(rref_id: Any, maker: Any, operation: Any, *args: Any) -> Any:
    kind = OPERATIONS.get(operation) if isinstance(operation, str) else None
    if kind is None:
        raise NotExposed(f"unknown optimizer operation {operation!r}")
    sent = read_plain(args, kind, f"invalid arguments for {operation!r}")
    optimizer = find_value(rref_id, maker)
    if not isinstance(optimizer, LocalOptimizer):
        raise NotExposed(f"{operation!r} needs a reference to an optimizer, not to a {type(optimizer).__name__}")
    found = getattr(optimizer, operation)(*(getattr(sent, field) for field in sent.__struct_fields__))
    return move_all(found, CPU)  # the calling worker may not have the devices of the parameters


def read_answer(operation: str, answer: Any) -> Any:
    return read_plain(answer, _ANSWERS[operation], f"invalid answer to {operation!r}")


_METHODS: Final = (
    LocalOptimizer.add_groups,
    LocalOptimizer.describe,
    LocalOptimizer.is_finite,
    LocalOptimizer.load_named_state,
    LocalOptimizer.named_state,
    LocalOptimizer.norms,
    LocalOptimizer.remove_groups,
    LocalOptimizer.state_problems,
    LocalOptimizer.step,
    LocalOptimizer.zero_grad,
)
OPERATIONS: Final[Mapping[str, type[_Arguments]]] = {
    method.__name__: _arguments_of(method, list(inspect.signature(method).parameters.values())[1:])
    for method in _METHODS
}
"""Operations of `LocalOptimizer`, with their arguments."""
_ANSWERS: Final = {method.__name__: typing.get_type_hints(method)["return"] for method in _METHODS}
_MAKE: Final = _arguments_of(_make, inspect.signature(_make).parameters.values())

for _function, _name in ((_make, MAKE), (_operate, OPERATE)):
    expose(_function, name=_name)
