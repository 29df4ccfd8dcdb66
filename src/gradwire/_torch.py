"""The private names of torch that gradwire uses, each with the behaviour it relies on. No other module uses any.

A torch release that changes one of them breaks only this file and the test for that name in ``tests/unit/test_torch.py``.
"""

from __future__ import annotations

import ctypes
import importlib
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import CodeType
from typing import Any, Generic, TypeVar

import torch
from torch.distributed import remote_device as _remote_devices
from torch.optim import optimizer as _optimizers  # torch.optim deletes the name

T = TypeVar("T")

# -- used by autograd, params, optim and compat ----------------------------------------------------------------------------

run_backward: Any = torch.autograd.Variable._execution_engine.run_backward
"""Run the engine like `torch.autograd.grad`, but without its checks, which take longer than a small graph."""

local_backward_code: CodeType = torch.autograd.graph._engine_run_backward.__code__
"""Code of the function with which `torch.autograd.backward` and ``grad`` call the engine, which then calls nodes."""

is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on in this thread for any device."""

private_backend_name: Callable[[], str] = torch._C._get_privateuse1_backend_name
"""Returns the name of the type of device that a backend from outside torch has; ``privateuseone`` until it gives one."""

set_grad_mode: Callable[[bool], None] = torch._C._set_grad_enabled
"""Set the grad mode of this thread, without an object that restores it."""


def function_apply(kind: type[torch.autograd.Function]) -> Any:
    """Return the C implementation of a function's ``apply``.

    The one in `torch.autograd.Function` first checks for functorch transforms, which are not used here, at twice the cost.
    """
    return super(torch.autograd.Function, kind).apply  # type: ignore[misc]


def backward_class(kind: type[torch.autograd.Function]) -> Any:
    """Return the class of a function's nodes, ``_backward_cls``; a subclass may replace it."""
    return kind._backward_cls


def set_backward_class(kind: type[torch.autograd.Function], node: Any) -> None:
    """Set the class of a function's nodes to a subclass of the current one; the engine calls its ``apply``."""
    kind._backward_cls = node


def sequence_number(node: Any) -> int:
    """Return the number by which the engine orders ready nodes, highest first."""
    return node._sequence_nr()  # type: ignore[no-any-return]


def set_sequence_number(node: Any, number: int) -> None:
    node._set_sequence_nr(number)


uses_device_threads: Callable[[], bool] = torch._C._is_multithreading_enabled
"""Whether runs of the engine that this thread begins leave nodes of accelerators to threads of these."""

set_uses_device_threads: Callable[[bool], None] = torch._C._set_multithreading_enabled
"""Set that for this thread, and for hooks and nested runs; `torch.autograd.set_multithreading_enabled` as a function."""


hook_mixin: Any = torch.autograd.function._HookMixin
"""Its ``_register_hook`` is called for every hook that Python registers on a node of a function."""


leaf_hooks: Callable[[torch.Tensor], Any] = operator.attrgetter("_backward_hooks")
"""Return the hooks that see the gradient of a leaf before it is accumulated; None or empty if there are none."""


def post_accumulate_hooks(leaf: torch.Tensor) -> Any:
    """Return the hooks that see a leaf after its gradient is accumulated; None or empty if there are none."""
    return getattr(leaf, "_post_accumulate_grad_hooks", None)


# Store objects in the thread-local state that torch propagates to the threads of its engine.
_stash: Any = torch._C._stash_obj_in_tls
_find: Any = torch._C._get_obj_in_tls
_has: Any = torch._C._is_key_in_tls
_remove: Any = getattr(torch._C, "_remove_obj_from_tls", None)  # not in older releases


def _steals_reference() -> bool:
    """Return whether storing an object takes over a reference to it, as in older releases, instead of adding one."""
    stored = object()
    before = sys.getrefcount(stored)
    _stash("gradwire.probe", stored)
    is_stolen = sys.getrefcount(stored) == before
    if is_stolen:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(stored))
    _stash("gradwire.probe", None)
    if _remove is not None:
        _remove("gradwire.probe")
    return is_stolen


def _stash_with_reference(name: str, value: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))  # the one that torch takes over
    _stash(name, value)


_keep: Any = _stash_with_reference if _steals_reference() else _stash


class Carried(Generic[T]):
    """A value per thread that is propagated to the device threads working for it.

    torch runs the nodes of each accelerator in a separate thread. That thread does not see the caller's `threading.local`
    or context variables, but it gets the caller's thread-local state of torch with the objects stored there. The name must
    be unique in the process.
    """

    __slots__ = ("_default", "_name")

    def __init__(self, name: str, default: T) -> None:
        self._name, self._default = name, default

    def get(self) -> T:
        if not _has(self._name):
            return self._default
        value: T = _find(self._name)
        return value

    def set(self, value: T) -> T:
        """Set the value for the current thread and for engine runs started here; return the previous one.

        Setting the default removes the stored object: a thread that ends with one waits for the GIL, which is fatal during
        interpreter shutdown.
        """
        is_set = _has(self._name)
        before: T = _find(self._name) if is_set else self._default
        if value is not self._default or _remove is None:
            _keep(self._name, value)
        elif is_set:
            _remove(self._name)
        return before


# used by wire

is_functorch_wrapped_tensor: Any = torch._C._functorch.is_functorch_wrapped_tensor  # inside vmap, grad and the like
is_functional_tensor: Any = torch._is_functional_tensor  # inside functionalize
neg_view: Any = torch._neg_view  # flips the neg bit without a copy
coo_indices: Any = torch.Tensor._indices  # unlike indices(), of tensors that are not coalesced, too
coo_values: Any = torch.Tensor._values
privateuse1_backend_name: Any = torch._C._get_privateuse1_backend_name  # the name of a backend added to torch
DisableTorchFunctionSubclass: Any = torch._C.DisableTorchFunctionSubclass  # operators see plain tensors in this block
make_subclass: Any = torch.Tensor._make_subclass  # a leaf of another class on the same memory
get_obj_state: Any = torch._utils._get_obj_state  # attributes and slots that a subclass adds
set_obj_state: Any = torch._utils._set_obj_state


def untyped_storage_of(storage: torch.TypedStorage) -> torch.UntypedStorage:
    """Return the untyped storage of a typed one; the public method emits a deprecation warning."""
    return storage._untyped_storage


def make_typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """Make a typed storage without the deprecation warning."""
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


# used by shard

RemoteDevice = _remote_devices._remote_device  # a placement: "rank:0/cpu" or "worker0/cpu"
# nn.Module calls it before it sets .data.
has_compatible_shallow_copy_type: Any = torch._has_compatible_shallow_copy_type
make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass  # a tensor with a size and no memory
is_view: Any = torch.Tensor._is_view  # whether a tensor shares the memory of another one
calculate_correct_fan: Any = torch.nn.init._calculate_correct_fan  # of a size and a mode, as nn.init computes it
is_profiler_enabled: Any = torch._C._autograd._profiler_enabled


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Return the submodules by attribute, including repeated ones, which `named_children` yields once."""
    return module._modules


def optimizer_hooks(optimizer: torch.optim.Optimizer, name: str) -> list[Any]:
    """Return the hooks of one kind: ``"step_pre"``, ``"state_dict_post"``, ``"load_state_dict_pre"`` and so on."""
    return list(getattr(optimizer, f"_optimizer_{name}_hooks").values())


def has_global_optimizer_hooks() -> bool:
    """Return whether hooks are registered for the steps of all optimizers."""
    return bool(_optimizers._global_optimizer_pre_hooks or _optimizers._global_optimizer_post_hooks)


def default_process_group() -> Any:
    """Return the default process group; raise ValueError if there is none."""
    return torch.distributed.distributed_c10d._get_default_group()


def store_of_group(group: Any) -> Any:
    """Return the store with which a process group was made."""
    _, store = torch.distributed.distributed_c10d._world.pg_map[group]
    return store


def is_gloo_group(group: Any) -> bool:
    """Return whether gloo moves a group's CPU tensors: `get_backend` returns other names for some of them."""
    try:
        return bool(group._get_backend(torch.device("cpu")).name() == "gloo")
    except RuntimeError:  # it has no backend for the CPU
        return False


# -- used by checkpoint ---------------------------------------------------------------------------------------------------

LOAD_OWN_STATE_DICT = "_load_from_state_dict"
"""The method that classes override to load a module's own tensors; torch's implementation copies from the given ones."""


def is_method_of_module(module: torch.nn.Module, method: str) -> bool:
    """Return whether a module has the method of `torch.nn.Module` itself, not overridden by a class or instance."""
    return getattr(getattr(module, method), "__func__", None) is getattr(torch.nn.Module, method)


def own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the tensors registered directly in a module (`_parameters` and `_buffers`) by name, including None."""
    return {**module._parameters, **module._buffers}


def own_state_dict(module: torch.nn.Module, keep_vars: bool) -> Any:
    """Return the module's own part of `state_dict`: `_save_to_state_dict` adds it without submodules."""
    found: Any = OrderedDict()
    found._metadata = {"": {"version": module._version}}
    module._save_to_state_dict(found, "", keep_vars)
    return found


def load_own_state_dict(module: torch.nn.Module, state: Any, metadata: dict[str, Any]) -> None:
    """Load the module's own tensors: `_load_from_state_dict` does so and appends errors to its last argument."""
    errors: list[str] = []
    module._load_from_state_dict(state, "", metadata, False, [], [], errors)
    if errors:
        raise RuntimeError("; ".join(errors))


def metadata_of(state: Any) -> dict[str, dict[str, Any]]:
    """Return the versions of modules in a state dict, by prefix: `state_dict` keeps them as ``_metadata``."""
    found: dict[str, dict[str, Any]] = state._metadata
    return found


def set_metadata(state: Any, metadata: dict[str, dict[str, Any]]) -> None:
    """Set the versions of modules in a state dict; `load_state_dict` passes them to the modules."""
    state._metadata = metadata


# used by rref

CppList: Any = getattr(torch._C, "ScriptList", list)  # a list that C++ has: its tensors are referred to from there


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and Python objects refer to the memory of a storage, including this object."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


# used by compat

wait_for: Any = torch._C.Future.wait  # torch's own `wait` of a future, whose class may have another
call_when_done: Any = torch._C.Future.add_done_callback  # likewise: calls back with the future, at once if it is done
# "aten::add" for torch.add; None for functions that are not operators.
find_builtin: Any = torch.jit._builtins._find_builtin
qualified_name: Any = torch._jit_internal._qualified_name  # "__torch__.<module>.<name>" of a script function


def end_event_with(event: Any, future: Any) -> Any:
    """End a profiler event (`record_function`) when a future completes; return a future that completes after that."""
    return event._call_end_callbacks_on_future(future)


def distributed_rpc() -> Any:
    """Return torch's rpc bindings: `_is_current_rpc_agent_set()`, and `_set_profiler_node_id(rank)` for profiles."""
    return importlib.import_module("torch._C._distributed_rpc")


# used by rpc
TorchFuture: Any = torch._C.Future
"""The C++ base of `torch.futures.Future`, whose `wait` and `add_done_callback` skip the checks of the Python class."""

# -- used by observe -------------------------------------------------------------------------------------------------------


def profile_all_threads() -> Any:
    """Return the setting with which `torch.profiler.profile` records all threads, not only those it is started in."""
    return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
