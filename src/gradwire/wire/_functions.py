"""Functions by name: ``module:qualname``, where importing that gives the very same object."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType
from typing import Any

from gradwire.errors import NoSuchFunction
from gradwire.wire._pickled import MAIN_MODULES, is_in_script

_MAX_KNOWN = 4096
_modules: dict[str, tuple[ModuleType, str]] = {}  # where functions were found
_known: dict[Any, str] = {}  # names that were found; modules hold their functions for good anyway


def function_name(fn: Any, shares_main: bool = False) -> str | None:
    """The name under which another worker finds this function, or None if it has to travel by value.

    None for lambdas, closures, partials, methods of instances, and, unless the other worker runs the same script, for
    everything that was defined in ``__main__``.
    """
    if getattr(fn, "__module__", None) in MAIN_MODULES:
        return _main_name(fn) if shares_main else None
    try:
        name = _known.get(fn)
    except TypeError:  # not hashable
        return None
    if name is None:
        name = _find_name(fn)
        if name is not None and not isinstance(fn, MethodType):
            if len(_known) >= _MAX_KNOWN:
                _known.clear()
            _known[fn] = name
    return name


def _main_name(fn: Any) -> str | None:
    qualname = getattr(fn, "__qualname__", "<")
    if "<" in qualname or not isinstance(fn, FunctionType | type) or not is_in_script(fn):
        return None
    return f"__main__:{qualname}" if _walk(sys.modules["__main__"], qualname) is fn else None


def _find_name(fn: Any) -> str | None:
    if isinstance(fn, MethodType):
        return _class_method_name(fn)
    qualname = getattr(fn, "__qualname__", None)
    if type(qualname) is not str or "<" in qualname:
        return None
    owner = getattr(fn, "__objclass__", None)  # of a method of a built-in class
    module = getattr(fn, "__module__", None) or getattr(owner, "__module__", None) or "torch"
    for name in (qualname, getattr(fn, "__name__", qualname)):  # torch.add says it is _VariableFunctionsClass.add
        if _find_loaded(module, name) is fn:
            return f"{module}:{name}"
    return None


def _class_method_name(fn: MethodType) -> str | None:
    owner = fn.__self__
    if not isinstance(owner, type) or "<" in owner.__qualname__:
        return None
    qualname = f"{owner.__qualname__}.{fn.__name__}"
    return f"{owner.__module__}:{qualname}" if _find_loaded(owner.__module__, qualname) == fn else None


def _find_loaded(module: Any, qualname: str) -> Any:
    if module in MAIN_MODULES:
        return None
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def resolve_function(name: str) -> Callable[..., Any]:
    """The function of that name; imports its module. Only for workers that trust each other with code.

    Raises:
        ImportError: There is no such module here, or importing it fails.
        NoSuchFunction: The module has no such function.
        TypeError: It is not callable.
    """
    known = _modules.get(name)
    if known is not None:  # a function at the top of a module: its attribute is read anew, so redefinitions count
        module, attribute = known
        found = getattr(module, attribute, None)
        if found is not None and sys.modules.get(module.__name__) is module:
            return found  # type: ignore[no-any-return]
    return _resolve(name)


def _resolve(name: str) -> Callable[..., Any]:
    module_name, _, qualname = name.partition(":")
    if not module_name or not qualname:
        raise ImportError(f"{name!r} is no name of a function; it should be module:qualname")
    module = sys.modules.get(module_name) or _import(module_name, name)
    found = _walk(module, qualname)
    if found is None:
        # Another thread may be in the middle of importing it; this waits for that.
        found = _walk(_import(module_name, name), qualname)
    if found is None:
        raise NoSuchFunction(
            f"module {module_name!r} has no {qualname!r} on this worker (asked for {name!r}); the RPC pickler does not "
            f"serialize the code of importable functions, so both workers need it"
        )
    if not callable(found):
        raise TypeError(f"{name!r} is a {type(found).__name__}, not a function")
    if "." not in qualname:
        if len(_modules) >= _MAX_KNOWN:
            _modules.clear()
        _modules[name] = (sys.modules[module_name], qualname)
    return found  # type: ignore[no-any-return]


def _walk(module: ModuleType, qualname: str) -> Any:
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _import(module_name: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        text = f"{name!r} cannot be called on this worker: {error}; make the module importable there"
        raise ModuleNotFoundError(text, name=error.name, path=error.path) from error
