"""Which function stands for a torch function when one of its arguments is a sharded tensor.

Looked up in this order: what people registered for the function, what they registered for the function and the kind of
spec, and gradwire's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Implementation = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Gradwire's own: gets the torch function, its arguments and its keyword arguments."""

CustomImplementation = Callable[[tuple[type, ...], tuple[Any, ...], dict[str, Any], Any], Any]
"""Somebody else's: gets the types, the arguments, the keyword arguments and the process group (None over RPC workers)."""

C = TypeVar("C", bound=CustomImplementation)
I = TypeVar("I", bound=Implementation)  # noqa: E741

_own: dict[Callable[..., Any], Implementation] = {}
_custom: dict[Callable[..., Any], CustomImplementation] = {}
_custom_by_spec: dict[tuple[type, Callable[..., Any]], CustomImplementation] = {}


def implements(*functions: Callable[..., Any]) -> Callable[[I], I]:
    """Registers gradwire's own implementation of some torch functions."""

    def register(implementation: I) -> I:
        for function in functions:
            _own[function] = implementation
        return implementation

    return register


def custom_sharded_op_impl(func: Callable[..., Any]) -> Callable[[C], C]:
    """Registers what a torch function does with sharded tensors, instead of what gradwire does, if anything.

    Args:
        func: The function, such as ``torch.nn.functional.linear`` or ``torch.Tensor.add_``.

    Returns:
        A decorator for a function of ``(types, args, kwargs, process_group)``. It raises TypeError for one that cannot be
        called like this.
    """

    def register(implementation: C) -> C:
        _check_signature(implementation)
        _custom[func] = implementation
        return implementation

    return register


_sharded_op_impl = custom_sharded_op_impl


def _check_signature(implementation: Callable[..., Any]) -> None:
    found = inspect.signature(implementation)
    try:
        found.bind((), (), {}, None)
    except TypeError as error:
        raise TypeError(
            f"Custom sharded op function expects signature: (types, args, kwargs, process_group), but received signature: "
            f"{found}"
        ) from error


def custom_sharding_spec_op(sharding_spec_class: type, func: Callable[..., Any]) -> Callable[[C], C]:
    """The same, for tensors that are divided by one kind of spec.

    Args:
        sharding_spec_class: The class of the spec itself, not a base of it.
        func: The torch function.

    Returns:
        A decorator for a function of ``(types, args, kwargs, process_group)``. It raises TypeError for one that cannot be
        called like this.
    """

    def register(implementation: C) -> C:
        _check_signature(implementation)
        _custom_by_spec[sharding_spec_class, func] = implementation
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
    """Does what the function does with sharded tensors.

    Args:
        func: A torch function.
        types: Of the arguments that are tensors of special kinds.
        args: Its arguments.
        kwargs: Its keyword arguments.
        spec: How the first sharded tensor among them is divided.
        process_group: That of the first sharded tensor among them.

    Raises:
        RuntimeError: Nobody has said what it does.
    """
    custom = _custom.get(func) or _custom_by_spec.get((type(spec), func))
    if custom is not None:
        return custom(tuple(types), args, kwargs, process_group)
    own = _own.get(func)
    if own is not None:
        return own(func, args, kwargs)
    raise unsupported(func)


def unsupported(func: Any, why: str = "") -> RuntimeError:
    """The error for a function that sharded tensors do not know, or not in this form."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = f"{getattr(func.__self__, '__name__', '?')} ({'reading' if name == '__get__' else 'setting'} it)"
    return RuntimeError(
        f"torch function '{name}' is not supported for ShardedTensor{': ' + why if why else ''}. Gather it first (gather(), "
        f"full_tensor()), or say what it does with gradwire.shard.sharded_tensor.custom_sharded_op_impl"
    )
