"""The private names of torch that gradwire uses, each with what is relied on. No other module touches any.

A new release of torch that changes one of them breaks this file, and a test in ``tests/unit/test_torch.py`` that names it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

# -- used by autograd and params -------------------------------------------------------------------------------------------

run_backward: Any = torch.autograd.Variable._execution_engine.run_backward
"""Runs the engine, as `torch.autograd.grad` does, without its checks: they take longer than a small graph."""

is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on in this thread for any device."""

set_grad_mode: Callable[[bool], None] = torch._C._set_grad_enabled
"""Sets the grad mode of this thread, and leaves no object behind that sets it back."""


def function_apply(kind: type[torch.autograd.Function]) -> Any:
    """Return the ``apply`` of a function in C.

    That of `torch.autograd.Function` first looks for functorch's transforms, which take no part here; that doubles its cost.
    """
    return super(torch.autograd.Function, kind).apply  # type: ignore[misc]


def backward_class(kind: type[torch.autograd.Function]) -> Any:
    """Return the class of the nodes of a function: ``_backward_cls``, an attribute that may be replaced by a subclass."""
    return kind._backward_cls


def set_backward_class(kind: type[torch.autograd.Function], node: Any) -> None:
    """Let the nodes of a function be of another class, derived from the one they have."""
    kind._backward_cls = node


def sequence_number(node: Any) -> int:
    """Return what the engine orders ready nodes by: those with the highest number come first."""
    return node._sequence_nr()  # type: ignore[no-any-return]


def set_sequence_number(node: Any, number: int) -> None:
    """Change what the engine orders ready nodes by."""
    node._set_sequence_nr(number)


hook_mixin: Any = torch.autograd.function._HookMixin
"""Its ``_register_hook`` is called for every hook that Python registers on a node of a function."""


leaf_hooks: Callable[[torch.Tensor], Any] = operator.attrgetter("_backward_hooks")
"""Returns the table of hooks that see the gradient of a leaf before it is accumulated; None or empty if there are none."""


def post_accumulate_hooks(leaf: torch.Tensor) -> Any:
    """Return the table of hooks that see a leaf after its gradient was accumulated; None or empty if there are none."""
    return getattr(leaf, "_post_accumulate_grad_hooks", None)


_keep: Any = (
    torch._C._stash_obj_in_tls
)  # keeps an object in the state that torch takes along into threads of its engine
_find: Any = torch._C._get_obj_in_tls
_has: Any = torch._C._is_key_in_tls
_remove: Any = getattr(torch._C, "_remove_obj_from_tls", None)  # not in older releases


class Carried(Generic[T]):
    """One value for each thread, and for the threads of devices that work for it.

    torch runs the nodes of each accelerator in a thread of its own. Such a thread sees none of the caller's
    `threading.local` or context variables, but it gets the caller's thread-local state of torch, with the objects there.

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
        is_set = _has(self._name)
        before: T = _find(self._name) if is_set else self._default
        if value is not self._default or _remove is None:
            _keep(self._name, value)
        elif is_set:
            _remove(self._name)
        return before
