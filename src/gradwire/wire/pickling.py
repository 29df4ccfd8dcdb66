"""Pickling for workers that trust each other with code; functions by value and by name.

The C pickler does what it can. What it cannot do by reference (lambdas, closures, anything that was defined in
``__main__`` of workers that run different programs) is done again by cloudpickle, by value. Ordinary tensors stay outside
the pickle. A tensor of any other class is taken apart into ordinary ones, so that gradients get through where they can.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import io
import operator
import pickle
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import cloudpickle
import msgspec
import torch

from gradwire import _interrupts, _torch
from gradwire.errors import CannotSend, DecodeError, NoSuchFunction
from gradwire.types import is_class
from gradwire.wire.plain import BY_KIND, TensorTable, import_module, register_plain_type

_MAIN_MODULES: Final = frozenset(("__main__", "__mp_main__"))
_KEEP_PICKLERS: Final = 16
_KEEP_BYTES: Final = 1 << 20


class _ByValue(Exception):
    """Something that the other worker cannot import."""


def _is_in_script(obj: Any) -> bool:
    """Return whether an object of ``__main__`` comes from the script itself, not from a prompt or ``exec``."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    parts = (
        [obj] if isinstance(obj, FunctionType) else [item for item in vars(obj).values() if type(item) is FunctionType]
    )
    files = {part.__code__.co_filename for part in parts} - {"<string>"}  # dataclasses write methods of their own
    return script is not None and files <= {script}


class _Pickler(pickle.Pickler):
    """Pickles by reference. Used many times, because making one costs more than most messages."""

    shares_main = False  # whether the other worker's ``__main__`` is the same script

    def __init__(self) -> None:
        self.buffer = io.BytesIO()
        self.table = TensorTable()
        super().__init__(self.buffer, protocol=5)

    def persistent_id(self, obj: Any) -> int | None:
        return _table_index(obj, self.table)

    def reducer_override(self, obj: Any) -> Any:
        reduced = _reduce(obj, self.table)
        if reduced is not NotImplemented:
            return reduced
        is_of_main = isinstance(obj, type | FunctionType) and obj.__module__ in _MAIN_MODULES
        if is_of_main and not (self.shares_main and _is_in_script(obj)):
            raise _ByValue
        return NotImplemented

    def reset(self) -> None:
        self.clear_memo()
        self.buffer.seek(0)
        self.buffer.truncate()
        self.table = TensorTable()


class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that falls back to pickling by value."""

    def __init__(self, buffer: io.BytesIO) -> None:
        self.table = TensorTable()
        super().__init__(buffer, protocol=5)

    def persistent_id(self, obj: Any) -> int | None:
        return _table_index(obj, self.table)

    def reducer_override(self, obj: Any) -> Any:
        reduced = _reduce(obj, self.table)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


def _table_index(obj: Any, table: TensorTable) -> int | None:
    """Return the place of an ordinary tensor in the table; None for everything else."""
    is_ordinary = type(obj) in _ORDINARY and not obj.is_quantized and not obj.is_nested
    return table.index_of(obj) if is_ordinary else None


def _reduce(obj: Any, table: TensorTable) -> Any:
    """Reduce storages and tensors that are not ordinary; return `NotImplemented` for everything else."""
    if isinstance(obj, torch.UntypedStorage):
        return _rebuild_storage, (_bytes_of(obj),)
    if isinstance(obj, torch.TypedStorage):
        return _rebuild_typed_storage, (_bytes_of(_torch.untyped_storage_of(obj)), obj.dtype)
    if not isinstance(obj, torch.Tensor) or type(obj) in BY_KIND:  # registered classes know it themselves
        return NotImplemented
    reduced, is_tracked = _reduce_tensor(obj)
    if not is_tracked:
        table.untracked.append(obj)
    return reduced


class _Unpickler(pickle.Unpickler):
    def __init__(self, body: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(body))
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        if module in _MAIN_MODULES:
            module = "__main__"
        elif module not in sys.modules:
            import_module(module)
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> torch.Tensor:
        if type(pid) is not int or not 0 <= pid < len(self._tensors):
            raise DecodeError(f"tensor {pid!r} does not exist ({len(self._tensors)} were received)")
        return self._tensors[pid]


# Idle picklers. Taking and returning are single operations, so threads need no lock, and a pickler that is in use when
# a class calls back into gradwire while it is pickled is simply not here.
_idle: deque[_Pickler] = deque(maxlen=_KEEP_PICKLERS)


def dumps(value: Any, shares_main: bool = False) -> tuple[bytes, TensorTable]:
    """Pickle a value, whose tensors go into the table.

    If `shares_main`, what is defined in ``__main__`` can be found there by name. Raises whatever a class or cloudpickle
    raises for a value that cannot be pickled.
    """
    try:
        return _dumps_by_reference(value, shares_main)
    except CannotSend:
        raise
    except Exception:  # anything: classes raise what they like, and only the second attempt counts
        pass
    buffer = io.BytesIO()
    pickler = _CloudPickler(buffer)
    pickler.dump(value)
    return buffer.getvalue(), pickler.table


def _dumps_by_reference(value: Any, shares_main: bool) -> tuple[bytes, TensorTable]:
    try:
        pickler = _idle.pop()
    except IndexError:
        pickler = _Pickler()
    pickler.shares_main = shares_main
    pickler.dump(value)  # a pickler that failed is not kept
    body, table = pickler.buffer.getvalue(), pickler.table
    if len(body) < _KEEP_BYTES:
        pickler.reset()
        _idle.append(pickler)
    return body, table


def loads(body: bytes | bytearray | memoryview, tensors: list[torch.Tensor]) -> Any:
    """Load a pickle from a worker that is trusted with code."""
    try:
        return _Unpickler(bytes(body), tensors).load()
    except DecodeError:
        raise
    except (pickle.UnpicklingError, EOFError) as error:
        raise DecodeError(f"not a pickle: {error}") from error
    except (ImportError, AttributeError) as error:
        text = f"a value cannot be rebuilt by the receiving worker: {error}; make its module importable on both workers"
        raise CannotSend(text) from error
    except Exception as error:
        text = f"a value cannot be rebuilt by the receiving worker: {type(error).__name__}: {error}"
        raise CannotSend(text) from error


# Tensors and storages inside a pickle


_ORDINARY: Final = (torch.Tensor, torch.nn.Parameter)
_PROTOCOL: Final = 5

# By module and name, so that none is imported for this: a tensor of such a class exists only if its module does.
_LOCAL: Final = {
    ("torch.distributed.tensor", "DTensor"): "send its local part, tensor.to_local()",
    ("torch.distributed._functional_collectives", "AsyncCollectiveTensor"): "wait for it first, tensor.wait()",
    ("torch._subclasses.fake_tensor", "FakeTensor"): "it has no elements; make the call outside FakeTensorMode",
    ("torch._subclasses.functional_tensor", "FunctionalTensor"): "make the call outside the function transform",
}


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, bool]:
    """Return the result of ``__reduce_ex__`` for `pickle`, and whether gradients can flow through it."""
    _check_leaves_home(tensor)
    kind = type(tensor)
    if _is_decorated(kind):
        return _reduce_decorated(tensor), True
    reduce = copyreg.dispatch_table.get(kind)
    with torch.enable_grad():
        reduced: Any = reduce(tensor) if reduce is not None else tensor.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]
    with _torch.DisableTorchFunctionSubclass():
        if not tensor.requires_grad or torch.nn.parameter.is_lazy(tensor):
            return reduced, True
        if _has_own_dispatch(kind) or not any(part.requires_grad for part in _tensors_in(reduced)):
            return reduced, False  # autograd sees the wrapper, and nothing of what is in it
    return (_rebuild_tracked, (reduced[0], *reduced[1]), *reduced[2:]), True


def _check_leaves_home(tensor: torch.Tensor) -> None:
    kind = type(tensor)
    for (module, name), advice in _LOCAL.items():
        local = getattr(sys.modules.get(module), name, None)
        if local is not None and issubclass(kind, local):
            raise CannotSend(f"this tensor cannot be sent: it is a {kind.__module__}.{kind.__qualname__}; {advice}")
    if _torch.is_functorch_wrapped_tensor(tensor):
        raise CannotSend(
            "this tensor cannot be sent: it belongs to a function transform (vmap, grad, functionalize); make the call "
            "outside it"
        )


def _is_decorated(kind: type[torch.Tensor]) -> bool:
    """Return whether a class only adds Python to ordinary elements."""
    return (
        kind not in _ORDINARY
        and kind not in copyreg.dispatch_table
        and kind.__reduce_ex__ in (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__)
        and not _has_own_dispatch(kind)
    )


def _has_own_dispatch(kind: type[torch.Tensor]) -> bool:
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _reduce_decorated(tensor: torch.Tensor) -> Any:
    with torch.enable_grad(), _torch.DisableTorchFunctionSubclass():
        plain = tensor.as_subclass(torch.Tensor)
    return _rebuild_decorated, (type(tensor), plain), _torch.get_obj_state(tensor) or None, None, None, _restore


def _rebuild_decorated(kind: type[torch.Tensor], plain: torch.Tensor) -> torch.Tensor:
    if plain.grad_fn is None:  # a leaf stays one
        return _torch.make_subclass(kind, plain, plain.requires_grad)  # type: ignore[no-any-return]
    with torch.enable_grad(), _torch.DisableTorchFunctionSubclass():
        return plain.as_subclass(kind)


def _restore(tensor: Any, state: Any) -> None:
    if type(tensor).__setstate__ is not torch.Tensor.__setstate__:  # torch's own is for old files
        tensor.__setstate__(state)
    else:
        _torch.set_obj_state(tensor, state)


def _rebuild_tracked(rebuild: Callable[..., Any], *args: Any) -> Any:
    with torch.enable_grad():
        made = rebuild(*args)
    with _torch.DisableTorchFunctionSubclass():
        is_cut_off = made.grad_fn is None and any(part.grad_fn is not None for part in _tensors_in(args))
    if is_cut_off:  # in a recorded call
        kind = type(made)
        raise CannotSend(
            f"gradients cannot flow through a {kind.__module__}.{kind.__qualname__}: the object that its "
            "__reduce_ex__ rebuilds is "
            f"not connected to the tensor it is built from. Send that tensor instead, or detach() it"
        )
    return made


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | tuple | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _rebuild_storage(data: torch.Tensor) -> torch.UntypedStorage:
    return data.untyped_storage()


def _rebuild_typed_storage(data: torch.Tensor, dtype: torch.dtype) -> torch.TypedStorage:
    return _torch.make_typed_storage(data.untyped_storage(), dtype)


# Functions by value


_CONSTANT: Final = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
_MAX_PARTS: Final = 256


class CarriedFunction(msgspec.Struct, frozen=True):
    """A function as a pickle."""

    pickle: bytes

    def load(self) -> Any:
        """Return the function; the same one for the same pickle."""
        return _load_function(self.pickle)


@functools.lru_cache(maxsize=512)
def _load_function(body: bytes) -> Any:
    return loads(body, [])


_carried: weakref.WeakKeyDictionary[FunctionType, tuple[list[Any], CarriedFunction]] = weakref.WeakKeyDictionary()
_names: weakref.WeakKeyDictionary[CodeType, tuple[str, ...] | None] = weakref.WeakKeyDictionary()


class _Changeable(Exception):
    """The function refers to something that may have changed since it was last pickled."""


def carry(function: Any) -> CarriedFunction | None:
    """Return a reusable pickle of the function; None if it must be pickled for every call."""
    if type(function) is not FunctionType:
        return None
    try:
        parts = list(_parts_of(function, set()))
    except _Changeable:
        return None
    known = _carried.get(function)
    if known is not None and len(known[0]) == len(parts) and all(map(operator.is_, known[0], parts)):
        return known[1]
    try:
        body, table = dumps(function)
    except Exception:  # packing the call will say what is wrong
        return None
    if table.tensors:
        return None
    made = CarriedFunction(body)
    _carried[function] = (parts, made)
    return made


def _parts_of(function: FunctionType, seen: set[int]) -> Iterator[Any]:
    """Iterate over the objects that a pickle of the function depends on."""
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
    elif is_class(value):
        if value.__module__ in _MAIN_MODULES or "<" in value.__qualname__:
            raise _Changeable
        yield value
    elif type(value) is FunctionType:
        yield value.__code__  # not the function: one that refers to itself would keep itself alive
        if value.__module__ in _MAIN_MODULES or "<" in value.__qualname__:
            yield from _parts_of(value, seen)
    else:
        raise _Changeable


def _global_names(code: CodeType) -> tuple[str, ...] | None:
    """Return the global names that code reads; None if it also sets some and therefore has state."""
    if code in _names:
        return _names[code]
    found: tuple[str, ...] | None
    if any(step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for step in dis.get_instructions(code)):
        found = None
    else:
        inner = [_global_names(item) for item in code.co_consts if isinstance(item, CodeType)]
        found = None if None in inner else tuple({*code.co_names, *(name for names in inner for name in names or ())})
    _names[code] = found
    return found


def _from_fields(fields: list[Any]) -> CarriedFunction:
    if len(fields) != 1 or type(fields[0]) is not bytes:
        raise DecodeError("a function sent by value must be a single pickle")
    return CarriedFunction(*fields)


register_plain_type(CarriedFunction, "gradwire.function", lambda item: (item.pickle,), _from_fields)


# Functions by name


_MAX_KNOWN = 4096
_IMPORT_S: Final = 2.0
_IMPORT_LOOK_S: Final = 0.005
_modules: dict[str, tuple[ModuleType, str]] = {}  # where functions were found
_known: dict[Any, str] = {}  # names that were found; modules hold their functions for good anyway


def function_name(fn: Any, shares_main: bool = False) -> str | None:
    """Return the name under which another worker finds this function, or None if it has to travel by value.

    None for lambdas, closures, partials, methods of instances, and, unless the other worker runs the same script, for
    everything that was defined in ``__main__``.
    """
    if getattr(fn, "__module__", None) in _MAIN_MODULES:
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
    if "<" in qualname or not isinstance(fn, FunctionType | type) or not _is_in_script(fn):
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
    if not is_class(owner) or "<" in owner.__qualname__:
        return None
    qualname = f"{owner.__qualname__}.{fn.__name__}"
    return f"{owner.__module__}:{qualname}" if _find_loaded(owner.__module__, qualname) == fn else None


def _find_loaded(module: Any, qualname: str) -> Any:
    return None if module in _MAIN_MODULES else _walk(sys.modules.get(module), qualname)


def resolve_function(name: str) -> Callable[..., Any]:
    """Return the function of that name; import its module. Only for workers that trust each other with code."""
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
        raise ImportError(f"{name!r} is not a valid function name; expected module:qualname")
    _wait_imported(sys.modules.get(module_name) or _import(module_name, name))
    module = sys.modules.get(module_name) or _import(module_name, name)  # anew, if the other thread's import has failed
    found = _walk(module, qualname)
    if found is None:
        # If another thread is still importing it, this waits until it has ended.
        found = _walk(_import(module_name, name), qualname)
    if found is None:
        raise NoSuchFunction(
            f"module {module_name!r} has no {qualname!r} on the called worker (asked for {name!r}); the RPC pickler does "
            f"not serialize the code of importable functions, so both workers need it"
        )
    if not callable(found):
        raise TypeError(f"{name!r} is a {type(found).__name__}, not a function")
    if "." not in qualname:
        if len(_modules) >= _MAX_KNOWN:
            _modules.clear()
        _modules[name] = (module, qualname)
    return found  # type: ignore[no-any-return]


def _walk(module: ModuleType | None, qualname: str) -> Any:
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _wait_imported(module: ModuleType) -> None:
    """Wait while another thread imports a module: its functions may need names that it has yet to define.

    Not for long: the module's own code may be waiting for this call, or may serve calls until the program ends.
    """
    spec, until = getattr(module, "__spec__", None), time.monotonic() + _IMPORT_S
    # Python's own import statement decides by this attribute whether it has to wait.
    while getattr(spec, "_initializing", False) is True and time.monotonic() < until:
        _interrupts.sleep(_IMPORT_LOOK_S)


def _import(module_name: str, name: str) -> ModuleType:
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        text = f"{name!r} cannot be called: {error}; make the module importable on the called worker"
        raise ModuleNotFoundError(text, name=error.name, path=error.path) from error
