"""Puts objects in the place of others, everywhere they are bound, and puts the old ones back.

A name that a program imported (``from torch.distributed.rpc import rpc_sync``) is a binding of its own: changing it in
torch's module does not change it there. So every module that is loaded is looked through for the very objects that are
replaced. Modules are not replaced, only what they hold; whoever has imported one sees its new contents.

Bindings that are found: globals of modules, and attributes of the classes that those modules define, also inside
``staticmethod``. Not found: closures, default arguments, containers, base classes. They were taken before and stay torch's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from types import ModuleType
from typing import Any

MISSING = object()
"""Stands for a name that was not bound."""

_OWN = "gradwire"
_VALUES = (int, float, str, bytes, tuple, frozenset, timedelta, type(None), ModuleType)


class Patch:
    """A set of replacements that are in place.

    Args:
        tables: By module or class, the values that its names shall have.
    """

    def __init__(self, tables: Mapping[ModuleType | type, Mapping[str, Any]]) -> None:
        self._undo: list[tuple[Any, str, Any]] = []  # holder, name, what it was before; in the order of the changes
        try:
            self._apply(tables)
        except BaseException:
            self.undo()
            raise

    def _apply(self, tables: Mapping[ModuleType | type, Mapping[str, Any]]) -> None:
        replaced: dict[int, tuple[Any, Any]] = {}  # by id: the old object, so that it lives, and the new one
        for holder, table in tables.items():
            for name, new in table.items():
                old = _bound(holder, name)
                if old is not MISSING and isinstance(holder, ModuleType) and has_identity(old):
                    replaced[id(old)] = old, new
                self._set(holder, name, old, new)
        for holder, name, old, new in _bindings_of(replaced):
            self._set(holder, name, old, new)

    def _set(self, holder: Any, name: str, old: Any, new: Any) -> None:
        setattr(holder, name, new)
        self._undo.append((holder, name, old))

    @property
    def changes(self) -> list[tuple[Any, str, Any]]:
        """Each holder and name, with what it was bound to before."""
        return list(self._undo)

    def undo(self) -> None:
        """Binds every name as it was before. Idempotent."""
        while self._undo:
            holder, name, old = self._undo.pop()
            if old is not MISSING:
                setattr(holder, name, old)
            elif name in vars(holder):
                delattr(holder, name)


def _bound(holder: Any, name: str) -> Any:
    """What a name of a module or class is bound to there; what a class inherits does not count."""
    return holder.__name__ if name == "__name__" else vars(holder).get(name, MISSING)


def has_identity(value: object) -> bool:
    """Whether two names that are bound to it mean the same thing: functions and classes, but not numbers or strings."""
    return not isinstance(value, _VALUES)


def _bindings_of(replaced: Mapping[int, tuple[Any, Any]]) -> Iterator[tuple[Any, str, Any, Any]]:
    """Where the old objects are bound: holder, name, what is bound, what to bind instead."""
    for module in list(sys.modules.values()):
        if not issubclass(type(module), ModuleType) or _is_own(module):  # programs put other things there, too
            continue
        for name, value in list(vars(module).items()):
            if id(value) in replaced:
                yield module, name, value, replaced[id(value)][1]
            elif _is_class_of(value, module):
                yield from _attributes_of(value, replaced)


def _is_class_of(value: Any, module: ModuleType) -> bool:
    """Whether a value is a class that the module defines; asked of anything that a program may have."""
    try:
        return issubclass(type(value), type) and value.__module__ == module.__name__  # no lazy object is woken up
    except Exception:  # the metaclass has ideas of its own
        return False


def _is_own(module: ModuleType) -> bool:
    return module.__name__ == _OWN or module.__name__.startswith(f"{_OWN}.")


def _attributes_of(holder: type, replaced: Mapping[int, tuple[Any, Any]]) -> Iterator[tuple[Any, str, Any, Any]]:
    for name, value in list(vars(holder).items()):
        if id(value) in replaced:
            yield holder, name, value, replaced[id(value)][1]
        elif isinstance(value, staticmethod) and id(value.__func__) in replaced:
            yield holder, name, value, staticmethod(replaced[id(value.__func__)][1])
