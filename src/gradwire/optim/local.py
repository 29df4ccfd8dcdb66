"""The owner's side: one torch optimizer for the parameters of a distributed one that live on this worker."""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import torch

from gradwire.autograd.api import current_engine
from gradwire.autograd.messages import CommitPass
from gradwire.errors import CallCancelled, ConfigurationError, DecodeError, NotExposed, OptimizerError, UnknownContext
from gradwire.optim.grad_transforms import Edit, edited
from gradwire.optim.state_dict import RESERVED, NamedState, copied
from gradwire.params import snapshots as sharing
from gradwire.params.grads import GradientTable, add_gradient, are_finite, norm_of
from gradwire.rpc.connection import current_request
from gradwire.rpc.functions import expose
from gradwire.rref import RRef
from gradwire.rref.owner import find_value
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
from gradwire.wire.messages import read_plain

MEMORY = 64
"""Steps that are remembered. Whoever repeats one has waited for it, so it is among the last few."""


class StepMemory:
    """The outcomes of the last steps, by id. Ids rise.

    Args:
        size: How many are remembered.
    """

    def __init__(self, size: int = MEMORY) -> None:
        self._size = size
        self._done: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._forgotten = -1  # the highest id that was dropped

    def find(self, step_id: int) -> int | None:
        """What came of a step; None if it is new.

        Raises:
            OptimizerError: It is so old that nobody knows.
        """
        found = self._done.get(step_id)
        if found is None and step_id <= self._forgotten:
            raise OptimizerError(f"step {step_id} was asked for so long ago that it cannot be told whether it was done")
        return found

    def add(self, step_id: int, outcome: int) -> None:
        """A step was done."""
        self._done[step_id] = outcome
        while len(self._done) > self._size:
            self._forgotten = max(self._forgotten, self._done.popitem(last=False)[0])


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
    container = current_engine().container
    context = container.find(context_id)
    if context is not None:
        return context.wait_gradients(sharing.time_left())
    where = container.where_released(context_id)
    if where is not None:
        raise UnknownContext(f"Could not find autograd context with id: {context_id}. It was released {where}")
    return {}


def _take_commit(context_id: int, pass_id: int) -> None:
    request = current_request()
    if request is not None:
        current_engine().on_commit(request.source.info, CommitPass(context_id, pass_id))


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in RESERVED}


MAKE: Final = "gradwire.optim.make"
OPERATE: Final = "gradwire.optim.operate"

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Id = Annotated[int, msgspec.Meta(ge=0)]
_ContextIds = Annotated[tuple[_Id, ...], msgspec.Meta(min_length=1)]
_Edits = Annotated[tuple[Edit, ...], msgspec.Meta(max_length=64)]
_Options = dict[str, Any]
_Groups = Annotated[list[tuple[_Number, list[str], list[Any], _Options]], msgspec.Meta(min_length=1)]
_Sizes = Annotated[tuple[_Number, ...], msgspec.Meta(max_length=64)]


class _Order(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The arguments of an operation, in order."""

    def __post_init__(self) -> None:
        ids = (*getattr(self, "context_ids", ()), getattr(self, "pass_id", 0))
        if max(ids) >> 64:  # msgspec cannot say it
            raise ValueError("an id of more than 64 bits")


class _Nothing(_Order):
    pass


class _AddGroups(_Order):
    groups: _Groups


class _RemoveGroups(_Order):
    first: _Number


class _Step(_Order):
    step_id: _Number
    context_ids: _ContextIds
    pass_id: _Id = 0
    options: dict[int, _Options] | None = None
    edits: _Edits = ()


class _IsFinite(_Order):
    context_ids: _ContextIds
    edits: _Edits


class _Norms(_Order):
    context_ids: _ContextIds
    edits: _Edits
    norm_type: float


class _ZeroGrad(_Order):
    set_to_none: bool


class _NamedState(_Order):
    is_copied: bool = False


class _StateProblems(_Order):
    forms: dict[str, dict[str, tuple[_Sizes, bool] | str]]


class _LoadNamedState(_Order):
    state: dict[str, dict[Any, Any]]


class _Make(_Order):
    optimizer_class: Any
    groups: _Groups
    args: tuple[Any, ...]
    kwargs: _Options


ORDERS: Final[Mapping[str, type[_Order]]] = {
    "add_groups": _AddGroups,
    "describe": _Nothing,
    "is_finite": _IsFinite,
    "load_named_state": _LoadNamedState,
    "named_state": _NamedState,
    "norms": _Norms,
    "remove_groups": _RemoveGroups,
    "state_problems": _StateProblems,
    "step": _Step,
    "zero_grad": _ZeroGrad,
}
"""Operations of `LocalOptimizer`, and their arguments."""

_ANSWERS: Final[Mapping[str, Any]] = {
    "add_groups": tuple[_Options, dict[int, _Options]],
    "describe": tuple[_Options, dict[int, _Options]],
    "is_finite": bool,
    "load_named_state": None,
    "named_state": dict[str, dict[Any, Any]],
    "norms": list[tuple[list[str], Any]],
    "remove_groups": None,
    "state_problems": list[str],
    "step": int,
    "zero_grad": None,
}


def read_answer(operation: str, answer: Any) -> Any:
    """Return what an owner has answered, if it is an answer to that operation.

    Raises:
        DecodeError: It is something else.
    """
    return read_plain(answer, _ANSWERS[operation], f"not the answer to {operation!r}")


def _make(optimizer_class: Any, groups: Any, args: Any, kwargs: Any) -> LocalOptimizer:
    """Makes an owner's part; a class of torch is called by its name."""
    order = read_plain((optimizer_class, groups, args, kwargs), _Make, "not an order to make an optimizer")
    found = order.optimizer_class
    if isinstance(found, str):
        found = getattr(torch.optim, found, None)
        if not isinstance(found, type) or not is_torchs(found) or found is torch.optim.LBFGS:
            raise ConfigurationError(
                f"torch.optim has no optimizer of that name here that works on several workers: {order.optimizer_class!r}"
            )
    if not isinstance(found, type):
        raise ConfigurationError(f"not a class of optimizers: {found!r}")
    return LocalOptimizer(found, _groups(order.groups), order.args, order.kwargs)


def _operate(rref_id: Any, maker: Any, operation: Any, *args: Any) -> Any:
    """Has an owner do one of the above."""
    kind = ORDERS.get(operation) if isinstance(operation, str) else None
    if kind is None:
        raise NotExposed(f"{operation!r} is nothing that optimizers do")
    order = read_plain(args, kind, f"not the arguments of {operation!r}")
    if isinstance(order, _AddGroups):
        _groups(order.groups)
    optimizer = find_value(rref_id, maker)
    if not isinstance(optimizer, LocalOptimizer):
        raise NotExposed(f"{operation!r} is nothing that optimizers do")
    return getattr(optimizer, operation)(*(getattr(order, field) for field in order.__struct_fields__))


def _groups(groups: Sequence[Any]) -> list[OwnedGroup]:
    """Looks at what types alone cannot say.

    Raises:
        DecodeError: There are not as many names as references, or a reference is none.
    """
    for _, names, rrefs, _ in groups:
        if len(names) != len(rrefs) or not all(isinstance(rref, RRef) for rref in rrefs):
            raise DecodeError("a group of parameters needs a name and a reference for each")
    return list(groups)


for _function, _name in ((_make, MAKE), (_operate, OPERATE)):
    expose(_function, name=_name)
