"""Functions by value, pickled once: for scripts and notebooks, whose functions other workers cannot import.

Pickling a function by value takes a millisecond, loading it a tenth. Both are done once for a function that cannot give
another pickle the next time: everything it refers to (globals, defaults, what it closes over) is the very same object as
before, and of a kind that does not change (numbers, text, modules, importable classes and functions, or functions of this
kind again). One that refers to a list, a tensor or a model is pickled anew for every call, as it was before.
"""

from __future__ import annotations

import dis
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Final

import msgspec
import torch

from gradwire.errors import CannotSend, DecodeError
from gradwire.wire import _pickled
from gradwire.wire._registry import register_plain_type

_CONSTANT: Final = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
_MAX_PARTS: Final = 256
_MAX_LOADED: Final = 512


class CarriedFunction(msgspec.Struct, frozen=True):
    """A function as a pickle."""

    pickle: bytes

    def load(self) -> Any:
        """The function; the same one for the same pickle.

        Raises:
            CannotSend: It names something that this worker cannot import.
        """
        with _lock:
            function = _loaded.get(self.pickle)
            if function is not None:
                _loaded.move_to_end(self.pickle)
                return function
        function = _pickled.loads(self.pickle, [])
        with _lock:
            _loaded[self.pickle] = function
            if len(_loaded) > _MAX_LOADED:
                _loaded.popitem(last=False)
        return function


_lock = threading.Lock()  # guards _loaded
_loaded: OrderedDict[bytes, Any] = OrderedDict()  # the least used first
_carried: weakref.WeakKeyDictionary[FunctionType, tuple[list[Any], CarriedFunction]] = weakref.WeakKeyDictionary()
_names: weakref.WeakKeyDictionary[CodeType, tuple[str, ...] | None] = weakref.WeakKeyDictionary()


class _Changeable(Exception):
    """The function refers to something that may have changed since it was last pickled."""


def carry(function: Any) -> CarriedFunction | None:
    """The function as a pickle that may be used again; None if it has to be pickled for every call."""
    if type(function) is not FunctionType:
        return None
    try:
        parts = list(_parts_of(function, set()))
    except _Changeable:
        return None
    known = _carried.get(function)
    if known is not None and len(known[0]) == len(parts) and all(map(_is_same, known[0], parts)):
        return known[1]
    try:
        body, table = _pickled.dumps(function)
    except (CannotSend, Exception):  # the usual way says what is wrong
        return None
    if table.tensors:
        return None
    made = CarriedFunction(body)
    _carried[function] = (parts, made)
    return made


def _is_same(one: Any, other: Any) -> bool:
    return one is other


def _parts_of(function: FunctionType, seen: set[int]) -> Iterator[Any]:
    """Everything that a pickle of the function depends on.

    Raises:
        _Changeable: One of them may change without becoming another object.
    """
    if id(function) in seen:
        return
    seen.add(id(function))
    yield function.__code__
    names = _global_names(function.__code__)
    if names is None:
        raise _Changeable
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    try:
        values += [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell that is still empty
        raise _Changeable from None
    values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    values += [*function.__annotations__.values(), *vars(function).values()]
    for value in values:
        yield from _check(value, seen)


def _check(value: Any, seen: set[int]) -> Iterator[Any]:
    if len(seen) > _MAX_PARTS:
        raise _Changeable
    if isinstance(value, _CONSTANT) or type(value) in (ModuleType, BuiltinFunctionType):
        yield value
    elif isinstance(value, tuple) and type(value) is tuple:
        yield value
        for item in value:
            yield from _check(item, seen)
    elif isinstance(value, type):
        if value.__module__ in _pickled.MAIN_MODULES or "<" in value.__qualname__:
            raise _Changeable
        yield value
    elif type(value) is FunctionType:
        yield value.__code__  # not the function: one that refers to itself would keep itself alive
        if value.__module__ in _pickled.MAIN_MODULES or "<" in value.__qualname__:
            yield from _parts_of(value, seen)
    else:
        raise _Changeable


def _global_names(code: CodeType) -> tuple[str, ...] | None:
    """Names that code looks up among its globals; None if it also sets some, and so has a state of its own."""
    try:
        return _names[code]
    except KeyError:
        pass
    found: tuple[str, ...] | None = ()
    if any(step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for step in dis.get_instructions(code)):
        found = None
    else:
        inner = [_global_names(item) for item in code.co_consts if isinstance(item, CodeType)]
        found = None if None in inner else tuple({*code.co_names, *(name for names in inner for name in names or ())})
    _names[code] = found
    return found


def _from_fields(fields: list[Any]) -> CarriedFunction:
    if len(fields) != 1 or type(fields[0]) is not bytes:
        raise DecodeError("a function by value is one pickle")
    return CarriedFunction(*fields)


register_plain_type(CarriedFunction, "gradwire.function", lambda item: (item.pickle,), _from_fields)
