"""Finds the implementation of a torch function that was called with a sharded tensor.

Order of the lookup: an implementation that the program registered for the function, one that it registered for the
function and the class of the spec, and gradwire's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from gradwire._interrupts import interruptible

Implementation = Callable[..., Any]
"""Gradwire's own: called with the torch function, and then with what that was called with (without ``out=None``)."""

CustomImplementation = Callable[[tuple[type, ...], tuple[Any, ...], dict[str, Any], Any], Any]
"""A program's: called with the types, the arguments, the keyword arguments and the process group (None over RPC workers)."""

C = TypeVar("C", bound=CustomImplementation)
I = TypeVar("I", bound=Implementation)  # noqa: E741

_own: dict[Callable[..., Any], Implementation] = {}
_custom: dict[Callable[..., Any], CustomImplementation] = {}
_custom_by_spec: dict[tuple[type, Callable[..., Any]], CustomImplementation] = {}


def implements(*functions: Callable[..., Any]) -> Callable[[I], I]:
    """Register gradwire's own implementation of some torch functions."""

    def register(implementation: I) -> I:
        _own.update(dict.fromkeys(functions, implementation))
        return implementation

    return register


def custom_sharded_op_impl(func: Callable[..., Any]) -> Callable[[C], C]:
    """Register an implementation of a torch function for sharded tensors, in place of gradwire's own.

    Args:
        func: The function, such as ``torch.nn.functional.linear`` or ``torch.Tensor.add_``.

    Returns:
        A decorator for a function of ``(types, args, kwargs, process_group)``. It raises TypeError for another
        signature.
    """
    return _registrar(_custom, func)


_sharded_op_impl = custom_sharded_op_impl


def custom_sharding_spec_op(sharding_spec_class: type, func: Callable[..., Any]) -> Callable[[C], C]:
    """Register an implementation of a torch function for tensors with one class of spec.

    Args:
        sharding_spec_class: The class of the spec itself, not a base of it.
        func: The torch function.

    Returns:
        A decorator, as `custom_sharded_op_impl` returns it.
    """
    return _registrar(_custom_by_spec, (sharding_spec_class, func))


def _registrar(table: dict[Any, CustomImplementation], key: Any) -> Callable[[C], C]:
    def register(implementation: C) -> C:
        found = inspect.signature(implementation)
        try:
            found.bind((), (), {}, None)
        except TypeError as error:
            raise TypeError(
                f"Custom sharded op function expects signature: (types, args, kwargs, process_group), but received "
                f"signature: {found}"
            ) from error
        table[key] = implementation
        return implementation

    return register


def dispatch(
    func: Callable[..., Any],
    types: Iterable[type],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    spec: Any,
    process_group: Any,
) -> Any:
    custom = _custom.get(func) or _custom_by_spec.get((type(spec), func))
    if custom is not None:
        return _call_custom(custom, tuple(types), args, kwargs, process_group)
    own = _own.get(func)
    if own is None:
        raise unsupported(func)
    if kwargs.get("out") is not None:
        raise unsupported(func, "it cannot write to out=")
    return own(func, *args, **{name: value for name, value in kwargs.items() if name != "out"})


@interruptible
def _call_custom(implementation: CustomImplementation, *args: Any) -> Any:
    return implementation(*args)


def unsupported(func: Any, why: str = "") -> RuntimeError:
    """Return the error for a function that sharded tensors do not implement, or not with these arguments."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = f"{getattr(func.__self__, '__name__', '?')} ({'reading' if name == '__get__' else 'setting'} it)"
    return RuntimeError(
        f"torch function '{name}' is not supported for ShardedTensor{': ' + why if why else ''}. Gather it first (gather(), "
        f"full_tensor()), or register an implementation with gradwire.shard.sharded_tensor.custom_sharded_op_impl"
    )
