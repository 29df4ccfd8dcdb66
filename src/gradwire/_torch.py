"""Values of the current thread that torch takes along into the threads of its engine.

torch runs the nodes of each accelerator in a thread of its own. Such a thread sees none of the caller's `threading.local` or
context variables, but it gets the caller's thread-local state of torch, with the objects that are kept there.
"""

from __future__ import annotations

import importlib
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


# used by optim

set_grad_enabled: Any = torch._C._set_grad_enabled  # set_grad_enabled(bool) sets grad mode of this thread, and no more


# used by compat

wait_for: Any = torch._C.Future.wait  # torch's own `wait` of a future, whose class may have another
call_when_done: Any = torch._C.Future.add_done_callback  # likewise: calls back with the future, at once if it is done
is_profiler_enabled: Any = torch.autograd._profiler_enabled  # type: ignore[attr-defined]  # whether this thread is recorded
find_builtin: Any = (
    torch.jit._builtins._find_builtin
)  # "aten::add" for torch.add; None for functions that are no operators
qualified_name: Any = torch._jit_internal._qualified_name  # "__torch__.<module>.<name>" of a script function


def end_event_with(event: Any, future: Any) -> Any:
    """End an event of a profiler, a `record_function`, with a future; return one that is done when the event has ended."""
    return event._call_end_callbacks_on_future(future)


def node_class(function: Any) -> type:
    """Return the class of the graph's nodes that a class of `torch.autograd.Function` makes; it has the node's name."""
    found: type = function._backward_cls
    return found


def distributed_rpc() -> Any:
    """Return torch's own rpc: `_is_current_rpc_agent_set()`, and `_set_profiler_node_id(rank)` for profiles."""
    return importlib.import_module("torch._C._distributed_rpc")
