"""Classes whose instances may travel as plain data, because somebody registered them.

They are found by name in a table, never by import, and rebuilt by their own constructor, so that what `__post_init__`
refuses is refused for foreign data too.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gradwire.errors import ConfigurationError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlainClass:
    """How instances of one class are taken apart and put together."""

    kind: type
    name: str
    to_fields: Callable[[Any], Sequence[Any]]
    from_fields: Callable[[list[Any]], Any]


_lock = threading.Lock()  # guards writing; reading one key of a dict needs none
BY_KIND: dict[type, PlainClass] = {}
BY_NAME: dict[str, PlainClass] = {}


def register_plain_class(cls: type[T], name: str | None = None) -> type[T]:
    """Let instances of a dataclass, named tuple or enum travel between workers as plain data, with any trust.

    Both sides have to register it. May be used as a decorator.

    Args:
        cls: The class. Subclasses are not included.
        name: What the workers call it; by default ``module:qualname``.

    Raises:
        ConfigurationError: The class is of another kind, needs values its fields do not hold, or the name is taken.
    """
    if dataclasses.is_dataclass(cls):
        _register(_dataclass(cls, _name_of(cls, name)))
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        _register(PlainClass(cls, _name_of(cls, name), tuple, lambda values: cls(*values)))
    elif issubclass(cls, enum.Enum):
        _register(
            PlainClass(cls, _name_of(cls, name), lambda member: (member.name,), lambda values: cls[_only(values)])
        )
    else:
        raise ConfigurationError(f"{cls!r} is no dataclass, named tuple or enum; use register_plain_type")
    return cls


def register_plain_type(
    cls: type[T],
    name: str,
    to_fields: Callable[[T], Sequence[Any]],
    from_fields: Callable[[list[Any]], T],
) -> None:
    """Let instances of any class travel as plain data, by functions that take them apart and put them together.

    Args:
        cls: The class. Subclasses are not included.
        name: What the workers call it.
        to_fields: Gives the values to send; they may be anything that can travel.
        from_fields: Makes an instance of the values that came. They are foreign data: check them.

    Raises:
        ConfigurationError: The name is taken.
    """
    _register(PlainClass(cls, name, to_fields, from_fields))


def _name_of(cls: type, name: str | None) -> str:
    return name if name is not None else f"{cls.__module__}:{cls.__qualname__}"


def _only(values: list[Any]) -> Any:
    (value,) = values
    return value


def _dataclass(cls: type, name: str) -> PlainClass:
    fields = dataclasses.fields(cls)
    annotations = getattr(cls, "__dataclass_fields__", {})
    if len(annotations) > len(fields) and any(
        item._field_type is dataclasses._FIELD_INITVAR  # type: ignore[attr-defined]
        for item in annotations.values()
    ):
        raise ConfigurationError(f"{cls!r} has an InitVar, whose value is not kept; use register_plain_type")
    given = [item.name for item in fields if item.init]
    derived = [item.name for item in fields if not item.init]
    names = given + derived

    def from_fields(values: list[Any]) -> Any:
        if len(values) != len(names):
            raise ValueError(f"{name} has {len(names)} fields, not {len(values)}")
        made = cls(**dict(zip(given, values)))  # noqa: B905  derived fields follow
        for field, value in zip(derived, values[len(given) :], strict=True):
            object.__setattr__(made, field, value)
        return made

    return PlainClass(cls, name, lambda value: [getattr(value, field) for field in names], from_fields)


def _register(entry: PlainClass) -> None:
    with _lock:
        known = BY_NAME.get(entry.name)
        # A cell of a notebook that is run again defines its classes again; the newest one counts.
        if known is not None and _name_of(known.kind, None) != _name_of(entry.kind, None):
            raise ConfigurationError(f"the name {entry.name!r} is taken by {known.kind!r}")
        BY_NAME[entry.name] = entry
        BY_KIND[entry.kind] = entry
