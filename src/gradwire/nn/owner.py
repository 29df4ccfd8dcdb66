"""The owner's side of `RemoteModule`: what its handles ask for, by name and with plain data, at every trust level."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from gradwire.errors import ConfigurationError, LimitExceeded, NotExposed, RRefError
from gradwire.params import snapshots as sharing
from gradwire.rpc.functions import expose
from gradwire.rpc.peers import To
from gradwire.rref import RRef
from gradwire.rref import context as references
from gradwire.rref import owner as operations
from gradwire.rref.owner import find_value

_FORMS = '"<worker>", "<worker>/<device>", "rank:<rank>" or "rank:<rank>/<device>"'


def parse_placement(where: To) -> tuple[To, str]:
    """The worker, by name or rank, and the device there.

    Args:
        where: One of the four forms of text, or whatever names a worker in a call (the device is then ``cpu``).

    Raises:
        ConfigurationError: The text has none of the forms.
        RuntimeError: torch does not know the device.
    """
    if not isinstance(where, str):
        return where, "cpu"
    worker, slash, device = where.partition("/")
    if not worker or (slash and not device) or "/" in device:
        raise ConfigurationError(f"Could not parse remote_device: {where}. The valid format is {_FORMS}")
    if not slash and _is_device(worker):
        raise ConfigurationError(f"{where!r} names a device and no worker. The valid format is {_FORMS}")
    kind, _, number = worker.partition(":")
    to: To = int(number) if kind == "rank" and number.isdecimal() else worker
    return to, str(torch.device(device or "cpu"))


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def on_device(value: Any, device: torch.device) -> Any:
    """The value with all its tensors on a device; looks into tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)(on_device(item, device) for item in value)
    if type(value) is dict:
        return {key: on_device(item, device) for key, item in value.items()}
    return value


MAKE = "gradwire.nn.make"
FORWARD = sharing.announces_use("gradwire.nn.forward")
FORWARD_BY_NAME = sharing.announces_use("gradwire.nn.forward_by_name")
INVOKE = sharing.announces_use("gradwire.nn.invoke")
PARAMETERS = "gradwire.nn.parameters"
VALUES = "gradwire.nn.values"
SAVE = "gradwire.nn.save"
LOAD = "gradwire.nn.load"
COPY = "gradwire.nn.copy"
CHANGE = "gradwire.nn.change"
APPLY = "gradwire.nn.apply"
HOOK = "gradwire.nn.hook"
UNHOOK = "gradwire.nn.unhook"
HAS_METHOD = "gradwire.nn.has_method"

HookKind = Literal["forward_pre", "forward", "full_backward_pre", "full_backward"]
_HOOK_KINDS = {  # with the tables of `nn.Module` that they are in
    "forward_pre": "_forward_pre_hooks",
    "forward": "_forward_hooks",
    "full_backward_pre": "_backward_pre_hooks",
    "full_backward": "_backward_hooks",
}
_MOST_HOOKS = 1024  # of one kind on one module: each of them costs every call of the module
# What the parameters belong to. First comes what calls wait for their turn with; parameters that were guarded before, with
# other modules or by an optimizer, may belong to others.
_groups: weakref.WeakKeyDictionary[nn.Module, tuple[sharing.Group, ...]] = weakref.WeakKeyDictionary()
_devices: weakref.WeakKeyDictionary[nn.Module, torch.device] = weakref.WeakKeyDictionary()  # those not on the CPU
_CHANGES = ("train", "to", "type", "requires_grad_", "zero_grad")
_CHANGES_OF_GRAD = ("to", "type", "zero_grad")


@runtime_checkable
class _Handle(Protocol):
    """A part that lives on another worker: `RemoteModule`, which is above this."""

    def named_remote_parameters(self, recurse: bool) -> list[tuple[str, RRef[Any]]]: ...


def make(
    module_cls: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any], device: str, mode: sharing.Mode
) -> nn.Module:
    """Makes the module, on its owner.

    Raises:
        ValueError: What was called made no module.
        NotExposed: ``trust="data"``, and nothing is exposed under that name.
        TypeError: An argument is of the wrong type.
    """
    _check_types(MAKE, args=(args, tuple), kwargs=(kwargs, dict), device=(device, str), mode=(mode, str))
    sharing.check_mode(mode)
    module_cls = _find(MAKE, module_cls)
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but {module_cls!r} made a {type(module).__name__}"
        )
    module.to(device)
    _note_device(module)
    _guard(module, mode)
    return module


def _groups_of(module: nn.Module) -> tuple[sharing.Group, ...]:
    """How the module's parameters are shared; one that was not made here is found when it is first used."""
    return _groups.get(module) or _guard(module, "snapshot")


def _guard(module: nn.Module, mode: sharing.Mode) -> tuple[sharing.Group, ...]:
    first = sharing.guard(module.parameters(), mode)
    found = _groups[module] = (first, *(sharing.groups_of(module.parameters()) - {first}))
    return found


def _note_device(module: nn.Module) -> None:
    device = next((param.device for param in module.parameters()), torch.device("cpu"))
    if device.type == "cpu":
        _devices.pop(module, None)
    else:
        _devices[module] = device


def _module(rref_id: int, maker: Any) -> nn.Module:
    """
    Raises:
        RRefError: There is no such value here, or it is no module.
    """
    found = find_value(rref_id, maker)
    if not isinstance(found, nn.Module):
        raise RRefError(f"the reference of a RemoteModule must be one to a module, not to a {type(found).__name__}")
    return found


def _find(operation: str, function: Callable[..., Any] | str) -> Callable[..., Any]:
    """What a class or function that came means here.

    Where code is trusted, it may be the function itself or ``module:qualname``; else the name of something that the user has
    exposed. Operations of gradwire itself are not: they would be called with what is here instead of what their caller sent.

    Raises:
        NotExposed: There is none of that name.
        TypeError: It is not a name.
    """
    agent = references.here().agent
    if not isinstance(function, str):
        if agent.trust == "data":
            raise TypeError(
                f"{operation} needs the name of an exposed class or function, not {type(function).__name__}"
            )
        return function
    found = agent.codec.find(function)
    if found is None or (agent.trust == "data" and found.__module__.startswith("gradwire.")):
        raise NotExposed(f"{function!r} does not name a class or function for {operation} on this worker")
    return found


def _check_types(operation: str, **values: tuple[Any, type]) -> None:
    """
    Raises:
        TypeError: A value is not of its type.
    """
    for name, (value, kind) in values.items():
        if type(value) is not kind:
            raise TypeError(f"{operation}: {name} must be a {kind.__name__}, not {type(value).__name__}")


def forward(rref_id: int, maker: Any, *args: Any) -> Any:
    """Calls the module, with its hooks."""
    module = _module(rref_id, maker)
    with sharing.using(*_groups_of(module)):
        return module(*args) if module not in _devices else _call_on_device(module, args, {})


def forward_by_name(rref_id: int, maker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the module with keyword arguments."""
    _check_types(FORWARD_BY_NAME, args=(args, tuple), kwargs=(kwargs, dict))
    module = _module(rref_id, maker)
    with sharing.using(*_groups_of(module)):
        return module(*args, **kwargs) if module not in _devices else _call_on_device(module, args, kwargs)


def _call_on_device(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arguments go to the device, and results leave by the CPU: the caller need not have such a device."""
    device = _devices[module]
    return on_device(module(*on_device(args, device), **on_device(kwargs, device)), torch.device("cpu"))


def invoke(rref_id: int, maker: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a method of the module; see `gradwire.rref.owner.invoke`."""
    _check_types(INVOKE, name=(name, str), args=(args, tuple), kwargs=(kwargs, dict))
    with sharing.using(*_groups_of(_module(rref_id, maker))):
        return operations.invoke(rref_id, maker, name, args, kwargs)


def parameters(rref_id: int, maker: Any, recurse: bool) -> list[tuple[str, RRef[Any]]]:
    """References to the module's parameters, by name and in its order; also to those of parts on other workers."""
    _check_types(PARAMETERS, recurse=(recurse, bool))
    module = _module(rref_id, maker)
    seen: set[torch.Tensor] = set()
    found: list[tuple[str, RRef[Any]]] = []
    for path, part in module.named_modules() if recurse else [("", module)]:
        prefix = f"{path}." if path else ""
        if isinstance(part, _Handle):  # without this, an optimizer would leave them untrained and nobody would know
            found.extend((prefix + name, rref) for name, rref in part.named_remote_parameters(recurse))
            continue
        own = [(name, item) for name, item in part.named_parameters(recurse=False) if item not in seen]
        seen.update(item for _, item in own)
        found.extend((prefix + name, RRef(item)) for name, item in own)
    return found


def values(rref_id: int, maker: Any, kind: str, recurse: bool) -> list[tuple[str, torch.Tensor]]:
    """Copies of parameters or buffers, of one moment between steps, by name.

    Raises:
        ConfigurationError: There are no values of that kind.
    """
    _check_types(VALUES, kind=(kind, str), recurse=(recurse, bool))
    if kind not in ("parameters", "buffers"):
        raise ConfigurationError(f'{VALUES}: kind must be "parameters" or "buffers", not {kind[:100]!r}')
    module = _module(rref_id, maker)
    named = module.named_buffers if kind == "buffers" else module.named_parameters
    with sharing.standing_still(module.parameters()):
        return [(name, item.detach().clone()) for name, item in named(recurse=recurse)]


def save(rref_id: int, maker: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The module's state dict, of one moment between steps, and the versions of its parts."""
    module = _module(rref_id, maker)
    with sharing.standing_still(module.parameters()):
        state = module.state_dict()
        copies = {name: item.clone() if isinstance(item, torch.Tensor) else item for name, item in state.items()}
    return copies, dict(getattr(state, "_metadata", {}))


def load(
    rref_id: int, maker: Any, state: dict[str, Any], metadata: Mapping[str, Any], assign: bool
) -> tuple[list[str], list[str], str]:
    """Loads a state dict; returns the keys that are missing, those nobody wants, and what does not fit.

    Raises:
        TypeError: It is not a state dict.
    """
    _check_types(LOAD, state=(state, dict), metadata=(metadata, dict), assign=(assign, bool))
    for key, item in metadata.items():
        _check_types(LOAD, **{"a name in the metadata": (key, str), "an item of the metadata": (item, dict)})
    for key in state:
        _check_types(LOAD, **{"a name in the state dict": (key, str)})
    module = _module(rref_id, maker)
    given = OrderedDict(state)
    given._metadata = dict(metadata)  # type: ignore[attr-defined]
    with sharing.stepping(module.parameters(), ()):
        try:
            missing, unexpected = module.load_state_dict(given, strict=False, assign=assign)
        except RuntimeError as error:
            return [], [], str(error)
    if assign:  # these are new parameters
        _guard(module, _groups_of(module)[0].mode)
    return missing, unexpected, ""


def copy_module(rref_id: int, maker: Any) -> RRef[nn.Module]:
    """Copy the module, as it is at one moment between steps; parts of it that are on other workers are copied there.

    Returns:
        A reference to the copy, whose parameters are shared by contexts as those of the module are.
    """
    module = _module(rref_id, maker)
    with sharing.standing_still(module.parameters()):
        made = copy.deepcopy(module)
    _note_device(made)
    _guard(made, _groups_of(module)[0].mode)
    return RRef(made)


def change(rref_id: int, maker: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Calls a method of `nn.Module` that changes the module and returns it.

    Raises:
        NotExposed: It is not one of those that may be called like that.
    """
    _check_types(CHANGE, name=(name, str), args=(args, tuple), kwargs=(kwargs, dict))
    module = _module(rref_id, maker)
    if name not in _CHANGES:
        raise NotExposed(f"{name!r} is no method that handles may call without a mark")
    # A step lends parameters its gradients, which these would clear or convert. The others leave `.grad` alone.
    with sharing.lending_grads(module.parameters()) if name in _CHANGES_OF_GRAD else contextlib.nullcontext():
        getattr(module, name)(*args, **kwargs)
    _note_device(module)
    sharing.guard(module.parameters(), _groups_of(module)[0].mode)  # their memory may be elsewhere now


def apply(rref_id: int, maker: Any, function: Callable[[nn.Module], Any] | str) -> None:
    """Calls a function with every part of the module."""
    module, function = _module(rref_id, maker), _find(APPLY, function)
    with sharing.stepping(module.parameters(), ()):  # it may change what others have seen
        module.apply(function)


def hook(rref_id: int, maker: Any, kind: HookKind, function: Callable[..., Any] | str, options: dict[str, Any]) -> Any:
    """Registers a hook of the module here; returns a reference to its handle.

    Raises:
        ConfigurationError: There is no such kind of hook.
        LimitExceeded: The module has too many.
    """
    _check_types(HOOK, kind=(kind, str), options=(options, dict))
    if kind not in _HOOK_KINDS:
        raise ConfigurationError(f"no hooks of kind {kind!r}; there are {', '.join(_HOOK_KINDS)}")
    module = _module(rref_id, maker)
    chosen = _find(HOOK, function)
    if len(getattr(module, _HOOK_KINDS[kind])) >= _MOST_HOOKS:
        raise LimitExceeded(f"the module has {_MOST_HOOKS} {kind} hooks; remove those that are no longer needed")
    return RRef(getattr(module, f"register_{kind}_hook")(chosen, **options))


def unhook(rref_id: int, maker: Any) -> None:
    """Removes a hook."""
    handle = find_value(rref_id, maker)
    if not isinstance(handle, torch.utils.hooks.RemovableHandle):
        raise ConfigurationError("not the handle of a hook")
    handle.remove()


def has_method(rref_id: int, maker: Any, name: str) -> bool:
    """Whether the module has a method of that name."""
    _check_types(HAS_METHOD, name=(name, str))
    return callable(getattr(type(_module(rref_id, maker)), name, None))


for _name, _function in {
    MAKE: make,
    FORWARD: forward,
    FORWARD_BY_NAME: forward_by_name,
    INVOKE: invoke,
    PARAMETERS: parameters,
    VALUES: values,
    SAVE: save,
    LOAD: load,
    COPY: copy_module,
    CHANGE: change,
    APPLY: apply,
    HOOK: hook,
    UNHOOK: unhook,
    HAS_METHOD: has_method,
}.items():
    expose(_function, name=_name)
