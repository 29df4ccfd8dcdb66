"""Values of the current thread that torch takes along into the threads of its engine.

torch runs the nodes of each accelerator in a thread of its own. Such a thread sees none of the caller's `threading.local` or
context variables, but it gets the caller's thread-local state of torch, with the objects that are kept there.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

_keep: Any = torch._C._stash_obj_in_tls
_find: Any = torch._C._get_obj_in_tls
_has: Any = torch._C._is_key_in_tls
_remove: Any = getattr(torch._C, "_remove_obj_from_tls", None)  # not in older releases


class Carried(Generic[T]):
    """One value for each thread, and for the threads of devices that work for it.

    Args:
        name: Known once in the whole process.
        default: The value of threads that have set none.
    """

    __slots__ = ("_default", "_name")

    def __init__(self, name: str, default: T) -> None:
        self._name, self._default = name, default

    def get(self) -> T:
        """Return the value of the current thread."""
        if not _has(self._name):
            return self._default
        value: T = _find(self._name)
        return value

    def set(self, value: T) -> T:
        """Set the value for the current thread and for runs of the engine that begin here; return what it was.

        Setting it back to the default leaves nothing behind: a thread that ends with objects there waits for the GIL, which
        is fatal while the interpreter ends.
        """
        before = self.get()
        if value is not self._default or _remove is None:
            _keep(self._name, value)
        elif _has(self._name):
            _remove(self._name)
        return before


# -- used by checkpoint ---------------------------------------------------------------------------------------------------

LOAD_OWN_STATE_DICT = "_load_from_state_dict"
"""The method that classes override to load what is directly in a module; torch's own copies from the tensors it is given."""


def is_method_of_module(module: torch.nn.Module, method: str) -> bool:
    """Return whether a module has a method from `torch.nn.Module` itself, which no class or instance overrides."""
    return getattr(getattr(module, method), "__func__", None) is getattr(torch.nn.Module, method)


def own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return what is registered directly in a module: `_parameters` and `_buffers` have it by name, even None."""
    return {**module._parameters, **module._buffers}


def own_state_dict(module: torch.nn.Module, keep_vars: bool) -> Any:
    """Return what of `state_dict` is directly in a module: `_save_to_state_dict` adds that, and no submodules."""
    found: Any = OrderedDict()
    found._metadata = {"": {"version": module._version}}
    module._save_to_state_dict(found, "", keep_vars)
    return found


def load_own_state_dict(module: torch.nn.Module, state: Any, metadata: dict[str, Any]) -> None:
    """Load what is directly in a module: `_load_from_state_dict` does that, and appends errors to its last argument.

    Raises:
        RuntimeError: The state does not fit.
    """
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
