"""Values of the current thread that torch takes along into the threads of its engine.

torch runs the nodes of each accelerator in a thread of its own. Such a thread sees none of the caller's `threading.local` or
context variables, but it gets the caller's thread-local state of torch, with the objects that are kept there.
"""

from __future__ import annotations

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


# used by rpc
TorchFuture: Any = torch._C.Future
"""The class behind `torch.futures.Future`; its `wait` and `add_done_callback` are called without the checks around them."""
