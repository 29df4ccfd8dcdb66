"""`RemoteModule`: a module on another worker, used like a local one.

    here                                            owner
    RemoteModule.forward(x)  -- gradwire.nn.forward(id, x) -->  module(x)
                             <------------- result -----------

A handle holds only a reference (`RRef`) to its module, so any number of workers may have handles on one module.
It is an `nn.Module` without parameters of its own: hooks registered on it run here, and everything that belongs to the
module itself (parameters, buffers, mode, hooks registered with `register_owner_hook`) is asked of the owner.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import nn

from gradwire.autograd.current_context import current_context_id
from gradwire.errors import ConfigurationError, RRefError
from gradwire.nn import module_owner
from gradwire.params import snapshots
from gradwire.rpc import codec
from gradwire.rpc.functions import exposed_name
from gradwire.rpc.futures import CallFuture
from gradwire.rpc.options import UNSET_RPC_TIMEOUT
from gradwire.rpc.peers import To
from gradwire.rref import RRef, remote
from gradwire.rref import context as rref_context
from gradwire.rref.api import Proxy
from gradwire.wire.devices import read_name
from gradwire.wire.exceptions import clean
from gradwire.wire.serialization import register_plain_type

F = TypeVar("F", bound=Callable[..., Any])
Self = TypeVar("Self", bound="RemoteModule")

_LABEL_BYTES = 256


def _unsupported(name: str) -> Any:
    def method(self: RemoteModule, *args: Any, **kwargs: Any) -> Any:
        raise ConfigurationError(
            f"Method ``{name}`` not supported for RemoteModule. Call it inside a function that runs on the owner"
        )

    method.__doc__ = "Raise `ConfigurationError`: a handle has no parameters, buffers or parts of its own."
    return method


class RemoteModule(nn.Module):
    """Create a module on another worker, where it stays; calling the handle runs the module there.

    Args:
        remote_device: ``"worker"``, ``"worker/cuda:0"``, ``"rank:1"``, ``"rank:1/cpu"``, a rank or a `WorkerInfo`. The
            module is moved to the device; without one it stays where `module_cls` creates it. Tensors in arguments are
            moved to its device. Tensors in results follow the caller's device map for that worker, or arrive on the CPU
            if there is none.
        module_cls: The class, or any function that returns a module; with ``trust="data"`` an exposed one or its name.
        args: Arguments of `module_cls`.
        kwargs: Keyword arguments of `module_cls`.
        concurrency: How contexts share the parameters (see :doc:`Modules </guides/modules>`). ``"snapshot"``: each
            context gets exact gradients for the weights that it saw. ``"serialize"``: one context at a time.
            ``"hogwild"``: not exact.

    Attributes:
        on: The owner's name, or rank if it was given by rank.
        device: Device of the module's first parameter on the owner, as of when this handle was created, first asked for
            it, or last moved it.
        is_device_map_set: Whether this worker has a device map for the owner.
        module_rref: The reference to the module.

    Raises:
        ConfigurationError: `remote_device` or `concurrency` is not valid.
        RuntimeError: The device is not a valid torch device.
        NotInitialized: This process is not a worker.
        CannotSend, LimitExceeded: `module_cls` or an argument cannot be sent.
        RpcTimeout: The module was not created within the default timeout of calls.
        UnknownWorker, WorkerLost: There is no such worker, or it cannot be reached.
        Exception: The exception that `module_cls` raised on the owner.
    """

    is_scriptable = False

    on: str | int
    is_device_map_set: bool
    module_rref: RRef[nn.Module]

    def __init__(
        self,
        remote_device: To,
        module_cls: Callable[..., Any] | str,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        concurrency: snapshots.Mode = "snapshot",
    ) -> None:
        snapshots.check_mode(concurrency)
        to, device = module_owner.parse_placement(remote_device)
        sent = _sendable(module_cls)
        with torch.no_grad():  # creating it is not part of any graph
            rref = remote(to, module_owner.MAKE, (sent, tuple(args or ()), dict(kwargs or {}), device, concurrency))
        # Wait for it: errors of its constructor are raised here, and two constructors do not share the random state.
        self._attach(to, _ask_device(rref), rref, getattr(module_cls, "__name__", str(module_cls)))

    def _attach(self, to: To, device: str, rref: RRef[Any], label: str) -> None:
        super().__init__()
        self.on = to if isinstance(to, str | int) else rref.owner_name()
        self._device = device
        self.module_rref = rref
        self.is_device_map_set = rref.owner_name() in rref_context.here().agent.device_maps
        self._label = label
        self._methods: dict[str, bool] = {}  # whether the module has methods of these names
        self._parameters = _NoParameters(self._title())

    @staticmethod
    def init_from_module_rref(remote_device: To, module_rref: RRef[Any]) -> RemoteModule:
        """Return another handle on the module of a reference.

        Args:
            remote_device: Placement of the module, as in the constructor; worker and device are taken from the reference.
            module_rref: The reference.

        Raises:
            ConfigurationError: `remote_device` is not valid.
            RuntimeError: The device is not a valid torch device.
        """
        module_owner.parse_placement(remote_device)
        made = RemoteModule.__new__(RemoteModule)
        made._attach(module_rref.owner_name(), "", module_rref, "")
        return made

    @property
    def device(self) -> str:
        """The module's device on its owner."""
        if not self._device:  # a handle on the module of a reference, which may not be made yet
            self._device = _ask_device(self.module_rref)
        return self._device

    def _ask(self, operation: str, *args: Any) -> Any:
        """Call an operation of the owner that is not part of any graph."""
        with torch.no_grad():
            return self.module_rref._ask(module_owner.PREFIX + operation, args, UNSET_RPC_TIMEOUT)

    # -- calling ------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on its owner and return the result.

        Raises:
            OwnerLost: The owner is gone.
            RpcTimeout: The call timed out.
            Exception: The exception that the module raised.
        """
        return self._call(*self._forward_call(args, kwargs))

    def forward_async(self, *args: Any, **kwargs: Any) -> CallFuture[Any]:
        """Start the module on its owner and return a future for the result.

        Raises:
            CannotSend: An argument cannot be sent.
            OwnerLost: The owner is gone.
        """
        return self._start(*self._forward_call(args, kwargs))

    def _forward_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, tuple[Any, ...]]:
        """Return the operation and its arguments, as flat as possible: packing them is most of the cost."""
        if kwargs or self.is_device_map_set:
            return module_owner.FORWARD_BY_NAME, (args, kwargs, self.is_device_map_set)
        return module_owner.FORWARD, args

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy: ``module.rpc_sync().method(*args)`` calls a method on the owner and returns the result."""
        return Proxy(lambda *call: self._call(module_owner.INVOKE, (*call, self.is_device_map_set), timeout))

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy: ``module.rpc_async().method(*args)`` calls a method on the owner and returns a future."""
        return Proxy(lambda *call: self._start(module_owner.INVOKE, (*call, self.is_device_map_set), timeout))

    def _call(self, function: str, args: Sequence[Any], timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        result = self.module_rref._ask(function, args, timeout)
        return _warn_when_differentiated(result, self._title()) if _is_unrecorded() else result

    def _start(self, function: str, args: Sequence[Any], timeout: float = UNSET_RPC_TIMEOUT) -> CallFuture[Any]:
        future = self.module_rref._submit(function, args, timeout)
        if _is_unrecorded():
            title = self._title()
            future.add_done_callback(lambda done: _watch_result(done, title))
        return future

    def _title(self) -> str:
        return f"{self._label or 'a RemoteModule'} on {self.module_rref.owner_name()}"

    def __getattr__(self, name: str) -> Any:
        """Return a function that calls a method of the module, which `nn.Module` does not have, on the owner."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "module_rref" not in self.__dict__ or not self._has_method(name):
                raise
        return functools.partial(_call_method, self, name)

    def _has_method(self, name: str) -> bool:
        if name not in self._methods:
            self._methods[name] = bool(self._ask("has_method", name))
        return self._methods[name]

    # -- the module's parameters --------------------------------------------------------------------------------------

    def get_module_rref(self) -> RRef[nn.Module]:
        """Return the reference to the module."""
        return self.module_rref

    def named_remote_parameters(self, recurse: bool = True) -> list[tuple[str, RRef[nn.Parameter]]]:
        """Return references to the parameters with their names, in the module's order.

        Args:
            recurse: Include the parameters of submodules, including those that are remote modules.
        """
        found: list[tuple[str, RRef[nn.Parameter]]] = self._ask("parameters", recurse)
        return found

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Return references to the parameters, in the module's order, for an optimizer.

        Args:
            recurse: Include the parameters of submodules, including those that are remote modules.
        """
        return [rref for _, rref in self.named_remote_parameters(recurse)]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Raise `ConfigurationError`, which is a `ValueError`: an optimizer on copies would train nothing."""
        raise ConfigurationError(
            "Method ``parameters`` not supported for RemoteModule. Please use ``remote_parameters`` instead, or pass "
            "the module itself: DistributedOptimizer(torch.optim.SGD, [module], lr=0.1). named_parameters() returns "
            "copies"
        )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return copies of the parameters: changing them does not change those on the owner."""
        return iter(self._values("parameters", prefix, recurse))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return copies of the buffers."""
        return iter(self._values("buffers", prefix, recurse))

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """Return copies of the buffers."""
        return (value for _, value in self._values("buffers", "", recurse))

    def _values(self, kind: str, prefix: str, recurse: bool) -> list[tuple[str, Any]]:
        start = f"{prefix}." if prefix else ""
        return [(start + name, value) for name, value in self._ask("values", kind, recurse)]

    register_buffer = _unsupported("register_buffer")
    register_parameter = _unsupported("register_parameter")
    add_module = _unsupported("add_module")
    share_memory = _unsupported("share_memory")

    # -- state --------------------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Add the module's state; called by `state_dict`, also that of an outer module."""
        state, metadata = self._ask("save")
        destination.update((prefix + name, value) for name, value in state.items())
        known = getattr(destination, "_metadata", None)
        if known is not None:
            known.update(((prefix + name).rstrip("."), value) for name, value in metadata.items())

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Send the module its part of a state; called by `load_state_dict`, also that of an outer module."""
        mine = {name[len(prefix) :]: value for name, value in state_dict.items() if name.startswith(prefix)}
        metadata = getattr(state_dict, "_metadata", None) if not prefix else None
        versions = metadata or {"": {"version": local_metadata.get("version")}}
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        missing, unexpected, error = self._ask("load", mine, dict(versions), assign)
        missing_keys.extend(prefix + name for name in missing)
        if strict:
            unexpected_keys.extend(prefix + name for name in unexpected)
        if error:
            error_msgs.append(f"on worker {self.module_rref.owner_name()}: {error}")

    # -- changes ------------------------------------------------------------------------------------------------------

    def train(self: Self, mode: bool = True) -> Self:
        """Set the mode of the module and of this handle; `eval` and an outer module's `train` call this, too."""
        self._change("train", mode)
        self.training = mode
        return self

    def to(self: Self, *args: Any, **kwargs: Any) -> Self:
        """Move or convert the module on its owner. Arguments as for `nn.Module.to`; the device is a device of the owner."""
        return self._change("to", *args, **kwargs)

    def cpu(self: Self) -> Self:
        """Call ``to("cpu")``."""
        return self.to("cpu")

    def cuda(self: Self, device: Any = None) -> Self:
        """Call ``to("cuda")``."""
        return self.to(
            "cuda" if device is None else torch.device("cuda", device) if isinstance(device, int) else device
        )

    def type(self: Self, dst_type: Any) -> Self:
        """Convert all parameters and buffers."""
        return self._change("type", dst_type)

    def float(self: Self) -> Self:
        """Call ``to(torch.float32)``."""
        return self.to(torch.float32)

    def double(self: Self) -> Self:
        """Call ``to(torch.float64)``."""
        return self.to(torch.float64)

    def half(self: Self) -> Self:
        """Call ``to(torch.float16)``."""
        return self.to(torch.float16)

    def bfloat16(self: Self) -> Self:
        """Call ``to(torch.bfloat16)``."""
        return self.to(torch.bfloat16)

    def requires_grad_(self: Self, requires_grad: bool = True) -> Self:
        """Set ``requires_grad`` of all parameters."""
        return self._change("requires_grad_", requires_grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``.grad`` of the parameters. Gradients in contexts are kept."""
        self._change("zero_grad", set_to_none)

    def apply(self: Self, fn: Callable[[nn.Module], Any] | str) -> Self:
        """Call a function on the owner with every submodule and then the module itself.

        Args:
            fn: The function; with ``trust="data"`` an exposed one, or its exposed name.
        """
        self._ask("apply", _sendable(fn))
        return self

    def register_owner_hook(
        self, kind: module_owner.HookKind, hook: Callable[..., Any] | str, **options: Any
    ) -> OwnerHook:
        """Register a hook that runs on the owner, for calls from any worker.

        The usual methods (`register_forward_hook`...) register hooks that run here, for calls of this handle.

        Args:
            kind: ``"forward_pre"``, ``"forward"``, ``"full_backward_pre"`` or ``"full_backward"``.
            hook: A hook as for `nn.Module`, which is sent to the owner. With ``trust="data"``, an exposed one or its name.
            **options: Options of `nn.Module`'s method, for example ``prepend=True``.

        Raises:
            ConfigurationError: `kind` is not one of these, or with ``trust="data"`` the function is not exposed here.
            NotExposed: With ``trust="data"``, the hook is not exposed on the owner.
            LimitExceeded: The module has too many hooks of that kind.
            OwnerLost: The owner is lost.
        """
        return OwnerHook(self._ask("hook", kind, _sendable(hook), options))

    def _change(self: Self, name: str, *args: Any, **kwargs: Any) -> Self:
        self._device = read_name(self._ask("change", name, args, kwargs))
        return self

    def _apply(self: Self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Do nothing: an outer module's `to` and `double` call this, but the module is on another worker."""
        return self

    # -- repr, copies and pickling ------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"RemoteModule({self.extra_repr()})"

    def extra_repr(self) -> str:
        """Return the class, the worker and the reference as text."""
        label, mode = self._label or "module", "training" if self.training else "eval"
        where = "/".join(filter(None, (self.module_rref.owner_name(), self._device)))
        return f"{label} on {where}, {mode}, {self.module_rref!r}"

    def __copy__(self: Self) -> Self:
        """Return another handle on the same module, which shares the local hooks, as copies of modules do."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self: Self, memo: dict[Any, Any]) -> Self:
        """Copy the module on its owner, and return a handle on the copy, with copies of the local hooks.

        Handles on the same module that are copied together become handles on the same copy.
        """
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        key = RemoteModule, self.module_rref._state.rref_id
        if key not in memo:
            memo[key] = self._ask("copy")
        made._attach(self.on, self._device, memo[key], self._label)
        here = {name: value for name, value in self.__dict__.items() if name not in ("module_rref", "_parameters")}
        made.__dict__.update(deepcopy(here, memo))
        return made

    def __reduce__(self) -> Any:
        transfer = codec.transfers.outgoing
        if transfer is None or transfer.tracker is None:
            raise RRefError(
                "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC: pass "
                "it in the arguments of a call. Its state_dict() can be saved, and init_from_module_rref creates "
                "another handle"
            )
        return _rebuild, (self._pack(),)

    def _pack(self) -> tuple[Any, ...]:
        return self.on, self._device, self.module_rref, self._label, self.training


def _ask_device(module_rref: RRef[Any]) -> str:
    with torch.no_grad():
        return read_name(module_rref._ask(f"{module_owner.PREFIX}device", (), UNSET_RPC_TIMEOUT))


def _rebuild(fields: Sequence[Any]) -> RemoteModule:
    on, device, rref, label, training = fields
    kinds = [type(on) in (str, int), type(device) is str, type(label) is str, type(training) is bool]
    if not (isinstance(rref, RRef) and all(kinds)):
        raise ValueError("not the fields of a RemoteModule")
    made = RemoteModule.__new__(RemoteModule)
    made._attach(on, read_name(device) if device else "", rref, clean(label, _LABEL_BYTES))
    made.training = training
    return made


register_plain_type(RemoteModule, "gradwire.RemoteModule", RemoteModule._pack, _rebuild)


class OwnerHook:
    """A hook on the owner of a module; like torch's handles, it can be removed and used in a ``with`` block.

    Args:
        handle: Reference to the handle on the owner.
    """

    def __init__(self, handle: RRef[Any]) -> None:
        self._handle: RRef[Any] | None = handle

    def __repr__(self) -> str:
        return f"<OwnerHook {'removed' if self._handle is None else f'on {self._handle.owner_name()}'}>"

    def remove(self) -> None:
        """Remove the hook. May be called again."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with torch.no_grad():
                handle._ask(f"{module_owner.PREFIX}unhook", (), UNSET_RPC_TIMEOUT)

    def __enter__(self) -> OwnerHook:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _call_method(module: RemoteModule, name: str, /, *args: Any, **kwargs: Any) -> Any:
    return module._call(module_owner.INVOKE, (name, args, kwargs, module.is_device_map_set))


def _sendable(function: Callable[..., Any] | str) -> Callable[..., Any] | str:
    """Return a function or class in a form that can be sent: with ``trust="data"``, its exposed name."""
    if isinstance(function, str) or rref_context.here().agent.trust == "code":
        return function
    name = exposed_name(function)
    if name is None:
        raise ConfigurationError(
            f'trust="data": {function!r} cannot be sent; mark it with @gradwire.rpc.expose on both workers, or pass its name'
        )
    return name


# -- warnings: the user trains something without the parameters on the owner
# ----------------------------------------------------------------------

_PACKAGES = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(__file__)))
_takers: set[CodeType] = set()  # functions that read parameters for an optimizer


def takes_parameters(function: F) -> F:
    _takers.add(inspect.unwrap(function).__code__)
    return function


takes_parameters(torch.optim.Optimizer.__init__)
takes_parameters(torch.optim.Optimizer.add_param_group)


class _NoParameters(dict[str, Any]):
    """The empty parameter table of a handle, which warns if an optimizer reads it."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self._module = module

    def items(self) -> Any:
        """Return no items; called by `parameters` of an outer module."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code not in _takers:
            frame = frame.f_back
        if frame is not None:
            warn_user(
                f"the parameters of {self._module} will not be trained: they live on that worker, and an outer "
                f"module's parameters() does not include them. Pass the outer module itself to an optimizer that finds "
                f"them on every worker: gradwire.optim.DistributedOptimizer(torch.optim.SGD, [outer], lr=...). If this "
                f"optimizer should not train them, pass it only the parameters of the other submodules",
                frame,
            )
        return super().items()


def _is_unrecorded() -> bool:
    """Return whether a call made now is not recorded although grad mode is on."""
    return torch.is_grad_enabled() and not current_context_id()


def _warn_when_differentiated(result: Any, module: str) -> Any:
    """Make tensors that a module returned outside a context warn when a backward pass stops at them."""
    if isinstance(result, torch.Tensor):
        if result.requires_grad and result.is_leaf:
            result.register_hook(functools.partial(_on_end_of_backward, module))  # type: ignore[no-untyped-call]
    elif isinstance(result, tuple | list | dict):
        for item in result.values() if isinstance(result, dict) else result:
            _warn_when_differentiated(item, module)
    return result


def _watch_result(done: torch.futures.Future[Any], title: str) -> None:
    with contextlib.suppress(Exception):  # the call has failed, and the caller that waits for it is told
        _warn_when_differentiated(done.value(), title)


def _on_end_of_backward(module: str, gradient: torch.Tensor) -> None:
    warn_user(
        f"backward stops at the result of {module}, which was called outside a context: no gradient reaches that "
        f"worker, and its parameters are not trained. Call the module inside `with gradwire.autograd.context() as "
        f"ctx:`, and call ctx.backward(loss) there instead of loss.backward(). If it should not be trained, detach() "
        f"its result",
        sys._getframe(1),
    )


def warn_user(text: str, frame: FrameType | None) -> None:
    """Warn at a line of the user's code: the innermost one outside torch and gradwire that led to the frame."""
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    if frame is None:  # in a thread of torch's engine
        warnings.warn(text, stacklevel=1)
        return
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    name = frame.f_globals.get("__name__", "<unknown>")
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno, name, registry)
