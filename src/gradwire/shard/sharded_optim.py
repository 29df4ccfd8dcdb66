"""`ShardedOptimizer`: every rank of a process group steps its own shards, and its copies of other parameters.

Its state dict has states as sharded tensors, by the names of parameters. Over RPC workers,
`gradwire.optim.DistributedOptimizer` takes sharded parameters instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import nn

from gradwire._interrupts import interruptible
from gradwire._torch import optimizer_hooks
from gradwire.errors import ConfigurationError, OptimizerError
from gradwire.shard.backend import Backend
from gradwire.shard.group_backend import GroupBackend
from gradwire.shard.layout import whole
from gradwire.shard.tensor import ShardedTensor
from gradwire.shard.torch_optimizer import is_torchs, load_state, make_optimizer, method_of, quick_step

Values = dict[str, Any]
"""State of one parameter, or of one of its parts."""

_WHOLE = tuple(
    getattr(torch.optim, name) for name in ("LBFGS", "Muon", "Adafactor") if hasattr(torch.optim, name)
)  # Muon and Adafactor are not in every version


def whole_matrix_problem(optimizer_class: type[Any]) -> str:
    """Return why a class of optimizers cannot step parts of parameters; empty if it can."""
    if not issubclass(optimizer_class, _WHOLE):
        return ""
    return (
        f"{optimizer_class.__name__} needs whole parameters, so it cannot step single shards; use it for parameters "
        f"that are not sharded, and an element-wise optimizer (SGD, AdamW) for those that are"
    )


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and parameters of a module, each once; sharded ones also where they are plain attributes.

    Args:
        module: The module.
        prefix: For all names.
        recurse: Whether to include the parameters of submodules.
    """
    modules = module.named_modules(prefix=prefix) if recurse else [(prefix, module)]
    seen: set[torch.Tensor] = set()
    for path, part in modules:
        attributes = [(name, value) for name, value in vars(part).items() if isinstance(value, ShardedTensor)]
        for name, value in [*nn.Module.named_parameters(part, recurse=False), *attributes]:
            if value not in seen:
                seen.add(value)
                yield f"{path}.{name}" if path else name, value


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps the shards of this rank, and the parameters that are not sharded, with a class of `torch.optim`.

    Every rank creates one with the same parameters. Steps need no messages; `state_dict` and `load_state_dict` are
    collective. Gradients of parameters that are not sharded must be the same on all ranks.

    Args:
        named_params: Parameters by name, such as ``dict(named_params_with_sharded_tensor(module))``; pairs; or groups:
            ``[{"params": pairs, "lr": 0.1}]``.
        optimizer_class: A class of `torch.optim` that works element by element.
        optimizer_args: More arguments for the class.
        optimizer_kwargs: Keyword arguments for the class.

    Attributes:
        named_params: All parameters by name.
        param_groups: Options, and the tensors of this rank; those of a rank that has no shard are empty.
        state: State of the tensors of this rank.

    Raises:
        ConfigurationError: An item is not a named parameter, is listed twice, or cannot be stepped by that class.
    """

    def __init__(
        self, named_params: Any, optimizer_class: type[Any], *optimizer_args: Any, **optimizer_kwargs: Any
    ) -> None:
        self._optimizer_class = optimizer_class
        self._groups: list[list[_Parameter]] = []
        self.named_params: dict[str, torch.Tensor] = {}
        groups = [self._read(group) for group in _as_groups(named_params)]
        self._optim = make_optimizer(optimizer_class, groups, optimizer_args, optimizer_kwargs)
        self._quick_step = quick_step(self._optim)
        self._is_made = False  # until then, `add_param_group` is called by the base class
        super().__init__(self._optim.param_groups, self._optim.defaults)
        self._is_made = True
        self._share()

    def _share(self) -> None:
        # Groups and state are those of the optimizer inside: schedulers change them here.
        self.param_groups, self.state = self._optim.param_groups, self._optim.state

    def _read(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Make a group for the optimizer inside, from one with names."""
        found = [_take_parameter(name, value) for name, value in _pairs(group["params"])]
        if not found:
            raise ConfigurationError("optimizer got an empty parameter list")
        names = [*self.named_params, *(item.name for item in found)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigurationError(f"two parameters have the same name: {', '.join(twice)}; give each its own")
        problem = whole_matrix_problem(self._optimizer_class)
        if problem and any(item.is_sharded for item in found):
            raise ConfigurationError(problem)
        self._groups.append(found)
        self.named_params.update({item.name: item.value for item in found})
        return {**group, "params": [part for item in found for part in item.parts]}

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step all tensors of this rank that have a gradient.

        Args:
            closure: Computes the loss and the gradients again; every rank calls it.

        Returns:
            The result of the closure.

        Raises:
            OptimizerError: A parameter was resharded since the optimizer was created.
        """
        for item in self._parameters():
            if item.is_stale:
                raise OptimizerError(
                    f"parameter {item.name!r} was resharded, so this optimizer holds tensors that are no longer in "
                    f"use; create another one, and load this one's state_dict() into it"
                )
        if closure is not None:
            closure = functools.partial(_call_user, closure)
        if not is_torchs(self._optimizer_class):
            return self._optim.step(closure)  # type: ignore[no-any-return]
        with torch.no_grad():
            return self._quick_step(closure)  # type: ignore[no-any-return]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all tensors of this rank."""
        method_of(self._optim, "zero_grad")(set_to_none)

    def _parameters(self) -> list[_Parameter]:
        return [item for group in self._groups for item in group]

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Add a group of parameters, the same on every rank.

        Args:
            param_group: ``{"params": ..., "lr": 0.1}`` with named parameters as in the constructor.

        Raises:
            ConfigurationError: It is not a group, or an item is not a named parameter or was added before.
        """
        if not self._is_made:
            return
        known = dict(self.named_params)
        group = self._read(_as_group(param_group))
        try:
            method_of(self._optim, "add_param_group")(group)
        except Exception:
            self._groups.pop()
            self.named_params = known
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the state by the names of parameters; every rank must call it.

        State of the size of a sharded parameter is a `ShardedTensor` with the same sharding, which shares its memory
        with the optimizer. Everything else is a plain value, the same on every rank.

        Returns:
            ``{"state": {name: {...}}, "param_groups": [{"lr": 0.1, "params": [name, ...]}]}``
        """
        for hook in optimizer_hooks(self, "state_dict_pre"):
            _call_user(hook, self)
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": [item.name for item in items]}
            for group, items in zip(self.param_groups, self._groups, strict=True)
        ]
        packed = {"state": _collect(self._parameters(), self.state), "param_groups": groups}
        for hook in optimizer_hooks(self, "state_dict_post"):
            packed = _call_user(hook, self, packed) or packed
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a saved state; every rank must call it with the same state.

        Sharded tensors may have another sharding, and whole tensors are sharded: states of a single process can be
        loaded, by the names of parameters if there are any, otherwise by their order.

        Raises:
            ConfigurationError: The state is for other parameters; nothing was changed.
        """
        loaded: dict[str, Any] = dict(state_dict)
        for hook in optimizer_hooks(self, "load_state_dict_pre"):
            loaded = _call_user(hook, self, loaded) or loaded
        found, options = _match(loaded, self._groups)
        state, names = {}, {}
        for item in self._parameters():
            values = _divide(item, found.get(item.name, {}))
            names.update(dict.fromkeys(item.parts, item.name))
            state.update({part: value for part, value in zip(item.parts, values, strict=True) if value})
        load_state(self._optim, state, names, options)
        self._share()
        for hook in optimizer_hooks(self, "load_state_dict_post"):
            _call_user(hook, self)


@interruptible
def _call_user(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


@dataclass(frozen=True, slots=True)
class _Parameter:
    name: str
    value: torch.Tensor
    parts: tuple[torch.Tensor, ...]  # what this rank has of it: its shards, or the whole parameter

    @property
    def is_sharded(self) -> bool:
        return isinstance(self.value, ShardedTensor)

    @property
    def is_stale(self) -> bool:
        now = self.value._parts if isinstance(self.value, ShardedTensor) else self.parts
        return [id(part) for part in now] != [id(part) for part in self.parts]


def _take_parameter(name: str, value: Any) -> _Parameter:
    if not isinstance(value, torch.Tensor):
        raise ConfigurationError(f"parameter {name!r} is not a tensor, but of type {type(value).__name__}")
    if not isinstance(value, ShardedTensor):
        return _Parameter(name, value, (value,))
    if not isinstance(value._backend, GroupBackend):
        raise ConfigurationError(
            f"parameter {name!r} is sharded over RPC workers; use gradwire.optim.DistributedOptimizer for it"
        )
    return _Parameter(name, value, tuple(part for part in value._parts if isinstance(part, torch.Tensor)))


def _as_groups(named_params: Any) -> list[dict[str, Any]]:
    if isinstance(named_params, Mapping):
        return [{"params": named_params}]
    items = list(named_params)
    if any(isinstance(item, Mapping) for item in items):
        return [_as_group(item) for item in items]
    return [{"params": items}]


def _as_group(group: Any) -> dict[str, Any]:
    if not isinstance(group, Mapping) or "params" not in group:
        found = f"one with the keys {list(group)!r:.100}" if isinstance(group, Mapping) else type(group).__name__
        raise ConfigurationError(f'a parameter group is a dict with the key "params", not {found}')
    return dict(group)


def _pairs(params: Any) -> list[tuple[str, torch.Tensor]]:
    found = list(params.items()) if isinstance(params, Mapping) else list(params)
    for item in found:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
            raise ConfigurationError(
                f"expected parameters with names, a dict or (name, parameter) pairs, not {type(item).__name__}; see "
                f"named_params_with_sharded_tensor(module)"
            )
    return found


_Described = tuple[dict[str, torch.dtype], Values]
"""What a rank has of the state of one parameter: dtypes of what has the size of the parts, and the rest itself."""


def _collect(parameters: Sequence[_Parameter], state: Mapping[torch.Tensor, Values]) -> dict[str, Values]:
    """Return the state by the names of parameters, from that of this rank's tensors. Every rank must call it."""
    by_backend: dict[Backend, dict[str, _Described]] = {}
    for parameter in parameters:
        if isinstance(parameter.value, ShardedTensor):
            by_backend.setdefault(parameter.value._backend, {})[parameter.name] = _describe(parameter, state)
    described: dict[str, list[_Described]] = {}
    for backend, own in by_backend.items():  # one message for each group
        gathered = backend.gather_objects(own)
        described.update({name: [each[name] for each in gathered] for name in own})
    found = {
        item.name: _join(item, state, described[item.name]) if item.is_sharded else dict(state.get(item.value, {}))
        for item in parameters
    }
    return {name: values for name, values in found.items() if values}


def _describe(parameter: _Parameter, state: Mapping[torch.Tensor, Values]) -> _Described:
    sharded: dict[str, torch.dtype] = {}
    plain: Values = {}
    for part in parameter.parts:
        for key, value in state.get(part, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == part.shape:
                sharded[key] = value.dtype
            else:
                plain.setdefault(key, value)
    return sharded, plain


def _join(parameter: _Parameter, state: Mapping[torch.Tensor, Values], described: Sequence[_Described]) -> Values:
    """Make one state of what all ranks have of it. Parts that never had a gradient have none; zeros stand for it."""
    assert isinstance(parameter.value, ShardedTensor)
    found = {key: value for _, plain in reversed(described) for key, value in plain.items()}
    dtypes = {key: dtype for sharded, _ in described for key, dtype in sharded.items() if key not in found}
    for key, dtype in dtypes.items():
        own = [(part, state.get(part, {}).get(key)) for part in parameter.parts]
        parts = [
            torch.zeros_like(part, dtype=dtype, requires_grad=False) if value is None else value.to_dense()
            for part, value in own
        ]
        with torch.no_grad():
            found[key] = parameter.value._with_parts(parts, dtype)
    return found


def _match(
    state_dict: Mapping[str, Any], groups: Sequence[Sequence[_Parameter]]
) -> tuple[dict[str, Values], list[dict[str, Any]]]:
    """Return the state by the names of parameters, and the options of each group."""
    try:
        state, saved = state_dict["state"], list(state_dict["param_groups"])
        keys = [key for group in saved for key in group["params"]]
    except (KeyError, TypeError) as error:
        raise ConfigurationError('not the state of an optimizer: it needs "state" and "param_groups"') from error
    if len(saved) != len(groups):
        raise ConfigurationError(
            f"loaded state dict has a different number of parameter groups: {len(saved)} instead of {len(groups)}"
        )
    theirs = [name for group in saved for name in group.get("param_names") or group["params"]]
    names = _names(theirs, [len(group["params"]) for group in saved], groups)
    found = {name: state[key] for key, name in zip(keys, names, strict=True) if key in state}
    return found, [
        {key: value for key, value in group.items() if key not in ("params", "param_names")} for group in saved
    ]


def _names(theirs: list[Any], sizes: list[int], groups: Sequence[Sequence[_Parameter]]) -> list[str]:
    """Return the parameter that each entry of a state dict means."""
    own = [item.name for group in groups for item in group]
    if sorted(own) == sorted(str(name) for name in theirs):
        return [str(name) for name in theirs]
    if any(isinstance(name, str) for name in theirs):
        missing, unexpected = sorted(set(own) - set(theirs)), sorted(set(theirs) - set(own))
        raise ConfigurationError(f"the state is for other parameters: missing {missing}, unexpected {unexpected}")
    if sizes != [len(group) for group in groups]:
        raise ConfigurationError(
            "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
        )
    return own


def _divide(parameter: _Parameter, values: Mapping[str, Any]) -> list[Values]:
    """Return the state of each of this rank's parts, with memory of its own. Every rank must call it."""
    found: list[Values] = [{} for _ in parameter.parts]
    for key in sorted(values):  # on every rank in the same order, since tensors may have to move
        for part, value in zip(found, _divided(parameter, key, values[key]), strict=True):
            part[key] = value
    return found


def _divided(parameter: _Parameter, key: str, value: Any) -> list[Any]:
    target = parameter.value
    if isinstance(value, ShardedTensor):
        if value.size() != target.size():
            raise ConfigurationError(
                f"{key!r} of parameter {parameter.name!r} has size {list(value.size())}, the parameter "
                f"{list(target.size())}"
            )
        with torch.no_grad():
            if not isinstance(target, ShardedTensor):
                return [value.full_tensor()]
            if value._backend != target._backend:
                raise ConfigurationError("the state is sharded over other workers than the parameter; gather it first")
            moved = value._backend.move(value._parts, value._layout, target._layout, value._like)
            return [part.detach().clone() if isinstance(part, torch.Tensor) else part for part in moved]
    if not isinstance(value, torch.Tensor):
        return [value for _ in parameter.parts]
    if isinstance(target, ShardedTensor) and value.shape == target.size():
        outer = whole(target.size())
        return [value.detach()[box.slices_in(outer)].clone() for box in target._boxes()]
    return [value.detach().clone() for _ in parameter.parts]
