"""An import hook that runs a function after certain modules.

This file imports nothing of gradwire, because `bootstrap/sitecustomize.py` loads it in interpreters that have not imported
torch yet.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

OnImported = Callable[[ModuleType], None]


class ImportHook:
    """Calls a function with each module of certain names, as soon as the module's own code has run.

    At that moment the importing module has not bound any name of it. The function is called again if a module is
    reloaded, but not for modules that were imported before the hook was installed. If it raises, the import fails.
    """

    def __init__(self, names: Container[str], on_imported: OnImported) -> None:
        self._names = names
        self._on_imported = on_imported

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Remove the hook. Idempotent. A running import still ends with the call."""
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the next finders, with a loader that calls the function."""
        if name not in self._names:
            return None
        spec = self._find_elsewhere(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenCall(spec.loader, self._on_imported)  # type: ignore[assignment]
        return spec

    def _find_elsewhere(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        finders: list[Any] = list(sys.meta_path)
        later = finders[finders.index(self) + 1 :] if self in finders else finders
        found = (finder.find_spec(name, path, target) for finder in later if hasattr(finder, "find_spec"))
        return next((spec for spec in found if spec is not None), None)


class _ThenCall:
    """Loads a module with another loader, and leaves no trace of itself in the module."""

    def __init__(self, loader: Any, on_imported: OnImported) -> None:
        self._loader = loader
        self._on_imported = on_imported

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._on_imported(module)
