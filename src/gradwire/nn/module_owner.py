"""The owner's side of `RemoteModule`: operations that handles call by name with plain data, at every trust level."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import typing
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any, Final, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from gradwire.errors import ConfigurationError, LimitExceeded, NotExposed, RRefError
from gradwire.params import snapshots
from gradwire.rpc.functions import expose
from gradwire.rpc.peers import To
from gradwire.rref import RRef
from gradwire.rref import context as rref_context
from gradwire.rref import owner as rref_owner
from gradwire.rref.owner import find_value
from gradwire.wire.devices import CPU, move_all

PREFIX: Final = "gradwire.nn."
"""Prefix of the names of all operations; the rest is the name of a function of this module."""
MAKE: Final = f"{PREFIX}make"
FORWARD: Final = snapshots.announces_use(f"{PREFIX}forward")
FORWARD_BY_NAME: Final = snapshots.announces_use(f"{PREFIX}forward_by_name")
INVOKE: Final = snapshots.announces_use(f"{PREFIX}invoke")

Named = tuple[str, Any]
NamedParameters = Callable[[nn.Module], Iterable[tuple[str, torch.Tensor]]]
HookKind = Literal["forward_pre", "forward", "full_backward_pre", "full_backward"]
_HOOK_TABLES = {  # by kind, the attribute of `nn.Module` that holds such hooks
    "forward_pre": "_forward_pre_hooks",
    "forward": "_forward_hooks",
    "full_backward_pre": "_backward_pre_hooks",
    "full_backward": "_backward_hooks",
}
_MOST_HOOKS = 1024  # of one kind on one module: each of them costs every call of the module
_CHANGES = ("train", "to", "type", "requires_grad_", "zero_grad")
_CHANGES_OF_GRAD = ("to", "type", "zero_grad")
_CHECKED_KINDS = (bool, dict, str, tuple)
_FORMS = '"<worker>", "<worker>/<device>", "rank:<rank>" or "rank:<rank>/<device>"'

# The groups of the parameters. First comes the group that calls wait for their turn with; parameters that were guarded
# before, with other modules or by an optimizer, may belong to other groups.
_groups: weakref.WeakKeyDictionary[nn.Module, tuple[snapshots.Group, ...]] = weakref.WeakKeyDictionary()
_devices: weakref.WeakKeyDictionary[nn.Module, torch.device] = weakref.WeakKeyDictionary()  # those not on the CPU


def parse_placement(where: To) -> tuple[To, str]:
    """Return the worker, by name or rank, and the device there; no name of one if `where` does not have it."""
    if not isinstance(where, str):
        return where, ""
    worker, slash, device = where.partition("/")
    if not worker or (slash and not device) or "/" in device:
        raise ConfigurationError(f"Could not parse remote_device: {where}. The valid format is {_FORMS}")
    if not slash and _is_device(worker):
        raise ConfigurationError(f"{where!r} names a device but no worker. The valid format is {_FORMS}")
    kind, _, number = worker.partition(":")
    to: To = int(number) if kind == "rank" and number.isdecimal() else worker
    return to, str(torch.device(device)) if device else ""


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


# -- dispatch of operations ------------------------------------------------------------------------------------------------


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check arguments, which come from other workers, against annotations: a plain type must match exactly."""
    hints = typing.get_type_hints(function)
    kinds = [(name, _kind_of(hints[name])) for name in inspect.signature(function).parameters]
    if not any(kind in _CHECKED_KINDS for _, kind in kinds):
        return function

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        for (name, kind), value in zip(kinds, args, strict=False):  # the function itself refuses another number of them
            if kind in _CHECKED_KINDS:
                _check_kind(value, kind, function.__name__, name)
        return function(*args)

    return call


def _check_kind(value: Any, kind: type, operation: str, what: str) -> None:
    if type(value) is not kind:
        raise TypeError(f"{PREFIX}{operation}: {what} must be a {kind.__name__}, not {type(value).__name__}")


def _kind_of(hint: Any) -> Any:
    origin = typing.get_origin(hint) or hint
    return str if origin is Literal else origin


def _operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Expose a function of a module; other workers name the module by the id and the maker of a reference."""
    checked = _checked(function)

    @functools.wraps(function)
    def operate(rref_id: int, maker: Any, *args: Any) -> Any:
        return checked(_find_module(rref_id, maker), *args)

    ids, arguments = inspect.signature(_find_module), inspect.signature(function)
    operate.__signature__ = arguments.replace(  # type: ignore[attr-defined]
        parameters=[*ids.parameters.values(), *list(arguments.parameters.values())[1:]]
    )
    expose(operate, name=PREFIX + function.__name__)
    return operate


def _find_module(rref_id: int, maker: Any) -> nn.Module:
    found = find_value(rref_id, maker)
    if not isinstance(found, nn.Module):
        raise RRefError(f"a RemoteModule needs a reference to a module, not to a {type(found).__name__}")
    return found


def _resolve(operation: str, function: Callable[..., Any] | str) -> Callable[..., Any]:
    """Resolve a class or function that another worker sent.

    With ``trust="code"``, it may be the function itself or ``module:qualname``; otherwise the name of something that
    the user has exposed. Operations of gradwire itself are refused: they would be called with objects of this worker as
    arguments.
    """
    agent = rref_context.here().agent
    if not isinstance(function, str):
        if agent.trust == "data":
            raise TypeError(
                f"{PREFIX}{operation} needs the name of an exposed class or function, not {type(function).__name__}"
            )
        return function
    found = agent.codec.find(function)
    if found is None or (agent.trust == "data" and found.__module__.startswith("gradwire.")):
        where = f"on worker {agent.info.name}"
        raise NotExposed(f"{function!r} does not name a class or function for {PREFIX}{operation} {where}")
    return found


# -- creating and calling --------------------------------------------------------------------------------------------------


@_checked
def make(
    module_cls: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str,
    mode: snapshots.Mode,
) -> nn.Module:
    snapshots.check_mode(mode)
    module_cls = _resolve("make", module_cls)
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but {module_cls!r} returned a {type(module).__name__}"
        )
    if device:  # otherwise it stays where it was made, which may be on several of them
        module.to(device)
    _note_device(module, torch.device(device or "cpu"))
    _guard(module, mode)
    return module


@_operation
def forward(module: nn.Module, *args: Any) -> Any:
    return _call(module, args, {})


@_operation
def forward_by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], is_mapped: bool) -> Any:
    return _call(module, args, kwargs, is_mapped)


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], is_mapped: bool = False) -> Any:
    with snapshots.using(*_groups_of(module)):
        return _on_its_device(module, module, args, kwargs, is_mapped)


def _on_its_device(
    module: nn.Module,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_mapped: bool,
) -> Any:
    """Call a function with its arguments on the module's device.

    Results are sent from the CPU, because the caller may not have such a device; unless the caller has a device map, which
    then determines where they arrive.
    """
    device = _devices.get(module)
    if device is None:
        return function(*args, **kwargs)
    found = function(*move_all(args, device), **move_all(kwargs, device))
    return found if is_mapped else move_all(found, CPU)


@_checked
def invoke(rref_id: int, maker: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], is_mapped: bool) -> Any:
    """Call a method of the module; see `gradwire.rref.owner.invoke`."""
    module = _find_module(rref_id, maker)

    def call(*args: Any, **kwargs: Any) -> Any:
        return rref_owner.invoke(rref_id, maker, name, args, kwargs)

    with snapshots.using(*_groups_of(module)):
        return _on_its_device(module, call, args, kwargs, is_mapped)


@_operation
def device(module: nn.Module) -> str:
    """Return the name of the device that arguments are moved to."""
    _groups_of(module)
    return str(_devices.get(module, CPU))


@_operation
def has_method(module: nn.Module, name: str) -> bool:
    return callable(getattr(type(module), name, None))


def _groups_of(module: nn.Module) -> tuple[snapshots.Group, ...]:
    """Return the groups of the module's parameters; a module that was not created here is added on first use."""
    found = _groups.get(module)
    if found is None:
        _note_device(module)
        found = _guard(module, "snapshot")
    return found


def _guard(module: nn.Module, mode: snapshots.Mode) -> tuple[snapshots.Group, ...]:
    first = snapshots.guard(module.parameters(), mode)
    found = _groups[module] = (first, *(snapshots.groups_of(module.parameters()) - {first}))
    return found


def _note_device(module: nn.Module, placed_on: torch.device | None = None) -> str:
    """Remember where a module computes, and return the device's name.

    That is where its first parameter or buffer is. Without any, it is where the module was placed last.
    """
    tensors = itertools.chain(module.parameters(), module.buffers())
    device = next((item.device for item in tensors), placed_on or _devices.get(module, CPU))
    if device.type == "cpu":
        _devices.pop(module, None)
    else:
        _devices[module] = device
    return str(device)


# -- parameters and state --------------------------------------------------------------------------------------------------


@runtime_checkable
class HasRemoteParameters(Protocol):
    """A module that lives on another worker: a `RemoteModule`."""

    def named_remote_parameters(self, recurse: bool = True) -> list[tuple[str, RRef[Any]]]:
        """Return references to its parameters, by name."""


def walk_parameters(module: nn.Module, recurse: bool = True, own: NamedParameters | None = None) -> Iterator[Named]:
    """Yield all parameters of a module, each under the first of its names, as torch does.

    For submodules on other workers it yields references; without this, an optimizer would silently leave them
    untrained. `own` returns the tensors of a single submodule, by name; by default its parameters.
    """
    if isinstance(module, HasRemoteParameters):
        yield from module.named_remote_parameters(recurse)
        return
    seen: set[torch.Tensor] = set()
    for path, part in module.named_modules() if recurse else [("", module)]:
        prefix = f"{path}." if path else ""
        if isinstance(part, HasRemoteParameters):
            yield from ((prefix + name, rref) for name, rref in part.named_remote_parameters(recurse))
            continue
        for name, parameter in own(part) if own is not None else part.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                yield prefix + name, parameter


@_operation
def parameters(module: nn.Module, recurse: bool) -> list[tuple[str, RRef[Any]]]:
    """Return references to the module's parameters, by name and in its order; also of submodules on other workers."""
    found = walk_parameters(module, recurse)
    return [(name, item if isinstance(item, RRef) else RRef(item)) for name, item in found]


@_operation
def values(module: nn.Module, kind: str, recurse: bool) -> list[tuple[str, torch.Tensor]]:
    """Return copies of parameters or buffers, taken at one moment between steps, by name."""
    if kind not in ("parameters", "buffers"):
        raise ConfigurationError(f'{PREFIX}values: kind must be "parameters" or "buffers", not {kind[:100]!r}')
    named = module.named_buffers if kind == "buffers" else module.named_parameters
    with snapshots.standing_still(module.parameters()):
        return [(name, _copy_out(item.detach())) for name, item in named(recurse=recurse)]


def _copy_out(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that any worker can receive: one in the CPU's memory of what is on a device."""
    return tensor.clone() if tensor.device.type in ("cpu", "meta") else tensor.cpu()


@_operation
def save(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the module's state dict, taken at one moment between steps, and the versions of its submodules."""
    with snapshots.standing_still(module.parameters()):
        state = module.state_dict()
        copies = {name: _copy_out(item) if isinstance(item, torch.Tensor) else item for name, item in state.items()}
    return copies, dict(getattr(state, "_metadata", {}))


@_operation
def load(
    module: nn.Module, state: dict[str, Any], metadata: dict[str, Any], assign: bool
) -> tuple[list[str], list[str], str]:
    """Load a state dict; return the missing keys, the unexpected keys, and the errors."""
    for name in state:
        _check_kind(name, str, "load", "a name in the state dict")
    for name, item in metadata.items():
        _check_kind(name, str, "load", "a name in the metadata")
        _check_kind(item, dict, "load", "an item of the metadata")
    given = OrderedDict(state)
    given._metadata = dict(metadata)  # type: ignore[attr-defined]
    with snapshots.stepping(module.parameters(), ()):
        try:
            missing, unexpected = module.load_state_dict(given, strict=False, assign=assign)
        except RuntimeError as error:
            return [], [], str(error)
    if assign:  # these are new parameters, and may be on another device
        _note_device(module)
        _guard(module, _groups_of(module)[0].mode)
    return missing, unexpected, ""


@_operation
def copy(module: nn.Module) -> RRef[nn.Module]:
    """Copy the module, as it is at one moment between steps; submodules on other workers are copied there.

    Contexts share the parameters of the copy as they share those of the module.
    """
    with snapshots.standing_still(module.parameters()):
        made = deepcopy(module)
    _note_device(made, _devices.get(module))
    _guard(made, _groups_of(module)[0].mode)
    return RRef(made)


# -- changes and hooks -----------------------------------------------------------------------------------------------------


@_operation
def change(module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Call a method of `nn.Module` that changes the module and returns it. Return the name of its device."""
    if name not in _CHANGES:
        raise NotExposed(
            f"{name!r} is not a method that a RemoteModule may call by name; those are {', '.join(_CHANGES)}"
        )
    # A step lends parameters its gradients, which these would clear or convert. The others do not use `.grad`.
    with snapshots.lending_grads(module.parameters()) if name in _CHANGES_OF_GRAD else contextlib.nullcontext():
        getattr(module, name)(*args, **kwargs)
    placed_on = None
    if name == "to":  # a module without parameters does not show it
        kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
        placed_on = torch.empty(0, device=_devices.get(module, CPU)).to(*args, **kwargs).device
    device = _note_device(module, placed_on)
    snapshots.guard(module.parameters(), _groups_of(module)[0].mode)  # their memory may have moved
    return device


@_operation
def apply(module: nn.Module, function: Callable[[nn.Module], Any] | str) -> None:
    resolved = _resolve("apply", function)
    with snapshots.stepping(module.parameters(), ()):  # it may change values that contexts have seen
        module.apply(resolved)
    _note_device(module)


@_operation
def hook(module: nn.Module, kind: HookKind, function: Callable[..., Any] | str, options: dict[str, Any]) -> Any:
    """Register a hook of the module here; return a reference to its handle."""
    if kind not in _HOOK_TABLES:
        raise ConfigurationError(f"unknown kind of hook {kind!r}; use one of {', '.join(_HOOK_TABLES)}")
    resolved = _resolve("hook", function)
    if len(getattr(module, _HOOK_TABLES[kind])) >= _MOST_HOOKS:
        raise LimitExceeded(f"the module has {_MOST_HOOKS} {kind} hooks; remove those that are no longer needed")
    return RRef(getattr(module, f"register_{kind}_hook")(resolved, **options))


def unhook(rref_id: int, maker: Any) -> None:
    handle = find_value(rref_id, maker)
    if not isinstance(handle, torch.utils.hooks.RemovableHandle):
        raise ConfigurationError(f"expected the handle of a hook, not a {type(handle).__name__}")
    handle.remove()


for _function in (make, invoke, unhook):
    expose(_function, name=PREFIX + _function.__name__)
