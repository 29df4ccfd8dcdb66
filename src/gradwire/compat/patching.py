"""Patching: replace objects everywhere they are bound, and restore the old ones.

A name that a program imported (``from torch.distributed.rpc import rpc_sync``) is a separate binding: changing torch's
module does not change it. So all loaded modules are searched for the objects that are replaced. Modules themselves are not
replaced, only their contents; a program that has imported one sees its new contents.

Bindings that are found: globals of modules, and attributes of the classes that those modules define, also inside
``staticmethod``. Not found: closures, default arguments, containers, base classes. They keep torch's objects.

A module that is not imported yet is changed by an import hook when it is. So nothing of torch or gradwire is imported
for names that a program does not use.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from datetime import timedelta
from types import ModuleType
from typing import Any, NamedTuple

from gradwire.compat.import_hook import ImportHook

MISSING = object()
"""Stands for a name that was not bound."""

Table = Mapping[str, Any]
MakeTable = Callable[[], Table]

_OWN = "gradwire"
_FOREIGN = "torch"
_VALUES = (int, float, str, bytes, tuple, frozenset, timedelta, type(None), ModuleType)


class Patch:
    """A set of replacements that are in place, or will be when their module is imported.

    Args:
        modules: By the full name of a module, a function that returns new values by name. It is called when the module is
            imported, and again if it is reloaded. Names of a package may be in submodules, such as ``"api.f"``: those are
            changed when the whole package has been imported.
        classes: By class, new values by name.
    """

    def __init__(self, modules: Mapping[str, MakeTable], classes: Mapping[type, Table] | None = None) -> None:
        self._makers = modules
        self._lock = threading.RLock()  # guards what follows, and the bindings while they are changed
        self._undo: list[tuple[Any, str, Any]] = []  # holder, name, old value; in the order of the changes
        self._replaced: list[tuple[str, Any, Any]] = []  # name, the old object and the new one
        self._is_undone = False
        self._hook = ImportHook(modules, self._on_imported)
        self._hook.install()
        with contextlib.ExitStack() as undo:
            undo.callback(self.undo)
            # If another thread is importing a module, importlib waits for it.
            loaded = [importlib.import_module(name) for name in modules if name in sys.modules]
            self._apply({**{module: modules[module.__name__]() for module in loaded}, **(classes or {})})
            undo.pop_all()

    def _on_imported(self, module: ModuleType) -> None:
        self._apply({module: self._makers[module.__name__]()})

    def _apply(self, tables: Mapping[Any, Table]) -> None:
        with self._lock:
            if self._is_undone:
                return
            olds: dict[int, Any] = {}  # by the id of the old object, the new one
            for holder, table in tables.items():
                for path, new in table.items():
                    owner, name = _owner_of(holder, path)
                    old = _bound(owner, name)
                    if old is new:  # the hook has already run
                        continue
                    if old is not MISSING and isinstance(owner, ModuleType) and has_identity(old):
                        olds[id(old)] = new
                        self._replaced.append((name, old, new))  # it stays alive, so its id is not reused
                    self._set(owner, name, old, new)
            for binding in _bindings_of(olds, ""):
                self._set(binding.holder, binding.name, binding.bound, binding.wrap(olds[id(binding.value)]))

    def _set(self, holder: Any, name: str, old: Any, new: Any) -> None:
        setattr(holder, name, new)
        self._undo.append((holder, name, old))

    def undo(self) -> None:
        """Restore every name. Idempotent."""
        self._hook.remove()
        with self._lock:
            self._is_undone = True
            while self._undo:
                holder, name, old = self._undo.pop()
                if old is not MISSING:
                    setattr(holder, name, old)
                elif name in vars(holder):
                    delattr(holder, name)
            self._undo_later_bindings()

    def _undo_later_bindings(self) -> None:
        """Restore the old objects in modules of torch that were imported meanwhile and have bound the new ones."""
        news: dict[int, dict[str, Any]] = {}  # by the id of the new object, the old ones by name
        for name, old, new in self._replaced:
            if has_identity(new):
                news.setdefault(id(new), {}).setdefault(name, old)
        for binding in _bindings_of(news, _FOREIGN):
            olds = news[id(binding.value)]
            old = olds.get(binding.name, next(iter(olds.values())))
            setattr(binding.holder, binding.name, binding.wrap(old))
        self._replaced.clear()


def _owner_of(holder: Any, path: str) -> tuple[Any, str]:
    """Return the module or class that has a name, and the name: ``"api.f"`` is ``f`` of the submodule ``api``."""
    module, _, name = path.rpartition(".")
    return (importlib.import_module(f"{holder.__name__}.{module}") if module else holder), name


def _bound(holder: Any, name: str) -> Any:
    """Return the value of a name in a module or class itself, without inherited ones."""
    return holder.__name__ if name == "__name__" else vars(holder).get(name, MISSING)


def has_identity(value: object) -> bool:
    """Return whether the identity of a value is meaningful: that of functions and classes is, that of numbers is not."""
    return not isinstance(value, _VALUES)


class _Binding(NamedTuple):
    """One name of a module or class: its value, and the object that the value is or wraps."""

    holder: Any
    name: str
    bound: Any
    value: Any

    def wrap(self, value: Any) -> Any:
        """Return the value wrapped as the old one was."""
        return value if self.bound is self.value else staticmethod(value)


def _bindings_of(ids: Container[int], package: str) -> Iterator[_Binding]:
    """Yield where objects of these ids are bound, in the modules of a package; in all modules if it is empty."""
    for module in list(sys.modules.values()):
        if not issubclass(type(module), ModuleType) or _is_in(module, _OWN):  # programs put other objects there, too
            continue
        if package and not _is_in(module, package):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in ids:
                yield _Binding(module, name, value, value)
            elif _is_class_of(value, module):
                yield from _attributes_of(value, ids)


def _is_class_of(value: Any, module: ModuleType) -> bool:
    """Return whether a value, which may be any object of a program, is a class that the module defines."""
    try:
        return issubclass(type(value), type) and value.__module__ == module.__name__  # does not trigger lazy objects
    except Exception:  # a metaclass may do anything
        return False


def _is_in(module: ModuleType, package: str) -> bool:
    return module.__name__ == package or module.__name__.startswith(f"{package}.")


def _attributes_of(holder: type, ids: Container[int]) -> Iterator[_Binding]:
    for name, bound in list(vars(holder).items()):
        value = bound.__func__ if isinstance(bound, staticmethod) else bound
        if id(value) in ids:
            yield _Binding(holder, name, bound, value)
