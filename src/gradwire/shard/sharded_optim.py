"""`ShardedOptimizer`: every rank of a process group steps its own shards, and its copies of what is not sharded.

Over RPC workers, `gradwire.optim.DistributedOptimizer` takes sharded parameters instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, overload

import torch
from torch import nn

from gradwire.errors import ConfigurationError, OptimizerError
from gradwire.shard import state_dict as optimizer_state
from gradwire.shard.state_dict import Parameter
from gradwire.shard.tensor import ShardedTensor
from gradwire.shard.torch_optimizer import is_torchs, load_state, make_optimizer, method_of, quick_step

NamedParameters = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
_WHOLE = tuple(
    getattr(torch.optim, name) for name in ("LBFGS", "Muon", "Adafactor") if hasattr(torch.optim, name)
)  # Muon and Adafactor are not in every version


def whole_matrix_problem(optimizer_class: type[Any]) -> str:
    """Why a class of optimizers cannot step parts of parameters; empty if it can."""
    if not issubclass(optimizer_class, _WHOLE):
        return ""
    return (
        f"{optimizer_class.__name__} looks at a parameter as a whole, so it cannot step parts of one on their own; use "
        f"it for parameters that are not sharded, and one that works element by element (SGD, AdamW) for those that are"
    )


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of a module, sharded ones included, also where these are plain attributes; each once.

    Args:
        module: The module.
        prefix: For all names.
        recurse: Whether parameters of modules inside of it count, too.

    Yields:
        Names and parameters.
    """
    modules = module.named_modules(prefix=prefix) if recurse else [(prefix, module)]
    seen: set[torch.Tensor] = set()
    for path, part in modules:
        attributes = [(name, value) for name, value in vars(part).items() if isinstance(value, ShardedTensor)]
        for name, value in [*part._parameters.items(), *attributes]:
            if value is not None and value not in seen:
                seen.add(value)
                yield f"{path}.{name}" if path else name, value


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps the shards that this rank has, and the parameters that are not sharded, with a class of `torch.optim`.

    Every rank makes one, with the same parameters. Steps need no messages; `state_dict` and `load_state_dict` concern
    everybody. Gradients of parameters that are not sharded must be the same on all ranks.

    Args:
        named_params: Parameters by name, such as ``dict(named_params_with_sharded_tensor(module))``; pairs; or groups:
            ``[{"params": pairs, "lr": 0.1}]``.
        optimizer_class: A class of `torch.optim` that works element by element.
        optimizer_args: More arguments for it.
        optimizer_kwargs: Its keyword arguments.

    Attributes:
        named_params: All parameters by name.
        param_groups: Options, and the tensors of this rank; those of a rank that has no shard are empty.
        state: Of the tensors of this rank.

    Raises:
        ConfigurationError: Something is no named parameter, is there twice, or cannot be stepped by that class.
    """

    def __init__(
        self, named_params: Any, optimizer_class: type[Any], *optimizer_args: Any, **optimizer_kwargs: Any
    ) -> None:
        self._optimizer_class = optimizer_class
        self._groups: list[list[Parameter]] = []
        self.named_params: dict[str, torch.Tensor] = {}
        groups = [self._read(group) for group in _as_groups(named_params)]
        self._optim = make_optimizer(optimizer_class, groups, optimizer_args, optimizer_kwargs)
        self._quick_step = quick_step(self._optim)
        self._is_made = False  # until then, `add_param_group` is called by the base class
        super().__init__(self._optim.param_groups, self._optim.defaults)
        self._is_made = True
        self._share()

    def _share(self) -> None:
        """Groups and state are those of the optimizer inside: schedulers change them here."""
        self.param_groups, self.state = self._optim.param_groups, self._optim.state

    def _read(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group for the optimizer inside, from one with names."""
        found = [Parameter.take(name, value) for name, value in _pairs(group["params"])]
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

    # -- steps -----------------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Steps everything that this rank has and that has a gradient.

        Args:
            closure: Computes the loss anew, and the gradients; every rank calls it.

        Returns:
            What the closure returned.

        Raises:
            OptimizerError: A parameter was resharded since the optimizer was made.
        """
        for item in self._parameters():
            if item.is_stale:
                raise OptimizerError(
                    f"parameter {item.name!r} was resharded, so this optimizer has tensors that are not in use any more; "
                    f"make another one, and load this one's state_dict() into it"
                )
        if not is_torchs(self._optimizer_class):
            return self._optim.step(closure)  # type: ignore[no-any-return]
        with torch.no_grad():
            return self._quick_step(closure)  # type: ignore[no-any-return]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all tensors of this rank."""
        method_of(self._optim, "zero_grad")(set_to_none)

    def _parameters(self) -> list[Parameter]:
        return [item for group in self._groups for item in group]

    # -- groups ----------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Adds parameters; on every rank the same.

        Args:
            param_group: ``{"params": ..., "lr": 0.1}`` with named parameters as in the constructor.

        Raises:
            ConfigurationError: It is no group, or something in it is no named parameter, or there already.
        """
        if not self._is_made:
            return
        known = dict(self.named_params)
        group = self._read(_as_group(param_group))
        try:
            method_of(self._optim, "add_param_group")(group)
        except BaseException:
            self._groups.pop()
            self.named_params = known
            raise

    # -- state -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State by the names of parameters; every rank must call it.

        What has the size of a sharded parameter is a `ShardedTensor`, divided like the parameter, and shares its memory
        with the optimizer. Everything else is a plain value, the same on every rank.

        Returns:
            ``{"state": {name: {...}}, "param_groups": [{"lr": 0.1, "params": [name, ...]}]}``
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": [item.name for item in items]}
            for group, items in zip(self.param_groups, self._groups, strict=True)
        ]
        packed = {"state": optimizer_state.collect(self._parameters(), self.state), "param_groups": groups}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            packed = post_hook(self, packed) or packed
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over a state that was saved; every rank must call it with the same.

        Sharded tensors in it may be divided in another way, and whole tensors are divided: states of one process load as
        well, by the names of parameters if it has any, and else by their order.

        Raises:
            ConfigurationError: It is the state of other parameters; nothing has changed.
        """
        loaded: dict[str, Any] = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = hook(self, loaded) or loaded
        found, options = optimizer_state.match(loaded, self._groups)
        state, names = {}, {}
        for item in self._parameters():
            values = optimizer_state.divide(item, found.get(item.name, {}))
            names.update(dict.fromkeys(item.parts, item.name))
            state.update({part: value for part, value in zip(item.parts, values, strict=True) if value})
        load_state(self._optim, state, names, options)
        self._share()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


def _as_groups(named_params: Any) -> list[dict[str, Any]]:
    if isinstance(named_params, Mapping):
        return [{"params": named_params}]
    items = list(named_params)
    if any(isinstance(item, Mapping) for item in items):
        return [_as_group(item) for item in items]
    return [{"params": items}]


def _as_group(group: Any) -> dict[str, Any]:
    if not isinstance(group, Mapping) or "params" not in group:
        raise ConfigurationError(f'a parameter group is a dict with "params", not {type(group).__name__}')
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
