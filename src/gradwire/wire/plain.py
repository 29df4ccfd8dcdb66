"""Plain data as msgpack: the codec that never runs foreign code.

Msgpack knows None, bool, 64-bit ints, floats, str, bytes, arrays and maps; msgspec writes and reads these in C.
Everything else is an extension (`Ext`), either a value by itself (a tensor's index, a complex number, a dtype) or the
first item of an array, which then is not a list but a tuple, a set and so on. A user's list cannot begin with such a
mark, because `Ext` is not among the types that users may send. Types are compared exactly: a subclass carries more than
its data.

The same tensor twice is one entry of the table and arrives as one object. Other objects that appear twice arrive as
two.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, TypeVar

import msgspec
import torch
from msgspec.msgpack import Ext

from gradwire.config import KIB, Limits
from gradwire.errors import CannotSend, ConfigurationError, DecodeError, LimitExceeded

T = TypeVar("T")


# Extension codes. Those from _TUPLE on mark an array.
_TENSOR, _INT, _COMPLEX, _BYTEARRAY, _TORCH_NAME, _DEVICE = range(6)
_TUPLE, _DICT, _SET, _FROZENSET, _SLICE, _RANGE, _SIZE, _CLASS = range(32, 40)

_NATIVE: Final = frozenset((type(None), bool, float, str, bytes))
_NATIVE_DECODED: Final = _NATIVE | {int}
_TENSOR_MARKS: Final = tuple(Ext(_TENSOR, struct.pack("<I", index)) for index in range(64))
_MARKS: Final = {code: Ext(code, b"") for code in range(_TUPLE, _CLASS)}
_TUPLE_MARK: Final = _MARKS[_TUPLE]
_TOO_DEEP: Final = "a value cannot be sent: it is nested more deeply than Limits.depth allows, or contains itself"
_COMPLEX_FORMAT: Final = struct.Struct("<dd")
_MAX_EQUAL_HASHES: Final = 100

_encode_msgpack: Final = msgspec.msgpack.Encoder().encode
_decode_msgpack: Final = msgspec.msgpack.Decoder().decode

# dtypes, layouts and memory formats by the name that torch gives them, e.g. "float32"
_TORCH_OBJECTS: Final[dict[str, Any]] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format)
}


class NotPlain(Exception):
    """Raised for a value that this codec does not support, which is its only argument."""


class TensorTable:
    """The tensors of one message in order of first use, each once."""

    __slots__ = ("_indices", "max_items", "tensors", "untracked")

    def __init__(self, max_items: float = float("inf")) -> None:
        self.max_items = max_items  # in one container; others are left to pickle, which is faster with many
        self.tensors: list[torch.Tensor] = []
        self.untracked: list[torch.Tensor] = []  # not in the table; require grad, and gradients do not get through
        self._indices: dict[int, int] = {}  # by id; the list keeps the tensors alive, so ids stay unique

    def index_of(self, tensor: torch.Tensor) -> int:
        """Return the tensor's place in the table; add it if it is new."""
        tensors = self.tensors
        new = len(tensors)
        index = self._indices.setdefault(id(tensor), new)
        if index == new:
            tensors.append(tensor)
        return index


def dumps(value: Any, limits: Limits, max_items: float = float("inf")) -> tuple[bytes, list[torch.Tensor]]:
    """Encode a value; raise `NotPlain` if it holds something else, or a container of more than `max_items`."""
    table = TensorTable(max_items)
    try:
        (raw,) = _encode_items([], (value,), table, limits.depth + 1)
        return _encode_msgpack(raw), table.tensors
    except (ValueError, OverflowError) as error:  # a lone surrogate, or a string of 4 GiB
        raise NotPlain(value) from error


def _encode_items(out: list[Any], items: Iterable[Any], table: TensorTable, depth: int) -> list[Any]:
    if depth <= 0:
        raise CannotSend(_TOO_DEEP)
    for item in items:
        kind = type(item)
        out.append(item if kind in _NATIVE else _ENCODERS.get(kind, _encode_instance)(item, table, depth - 1))
    return out


def _encode_int(value: int, table: TensorTable, depth: int) -> Any:
    if -(2**63) <= value < 2**64:
        return value
    return Ext(_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _encode_tensor(value: torch.Tensor, table: TensorTable, depth: int) -> Any:
    if value.is_quantized or value.is_nested:
        raise NotPlain(value)
    index = table.index_of(value)
    return _TENSOR_MARKS[index] if index < len(_TENSOR_MARKS) else Ext(_TENSOR, struct.pack("<I", index))


def _encode_sequence(value: list[Any] | tuple[Any, ...], table: TensorTable, depth: int) -> Any:
    if len(value) > table.max_items:
        raise NotPlain(value)
    return _encode_items([] if type(value) is list else [_TUPLE_MARK], value, table, depth)


def _encode_dict(value: dict[Any, Any], table: TensorTable, depth: int) -> Any:
    if depth <= 0:
        raise CannotSend(_TOO_DEEP)
    if not value:
        return value
    if len(value) > table.max_items:
        raise NotPlain(value)
    if any(type(key) is not str for key in value):
        return _encode_items([_MARKS[_DICT]], (item for pair in value.items() for item in pair), table, depth)
    return dict(zip(value, _encode_items([], value.values(), table, depth), strict=True))


def _encode_instance(value: Any, table: TensorTable, depth: int) -> Any:
    entry = BY_KIND.get(type(value))
    if entry is None:
        raise NotPlain(value)
    return _encode_items([Ext(_CLASS, entry.name.encode())], entry.to_fields(value), table, depth)


def _items_encoder(code: int, take: Callable[[Any], Iterable[Any]]) -> Callable[[Any, TensorTable, int], Any]:
    return lambda value, table, depth: _encode_items([_MARKS[code]], take(value), table, depth)


def _ext_encoder(code: int, take: Callable[[Any], bytes]) -> Callable[[Any, TensorTable, int], Any]:
    return lambda value, table, depth: Ext(code, take(value))


def _torch_name(value: Any) -> bytes:
    return str(value).removeprefix("torch.").encode()


_ENCODERS: Final[dict[type, Callable[[Any, TensorTable, int], Any]]] = {
    int: _encode_int,
    torch.Tensor: _encode_tensor,
    torch.nn.Parameter: _encode_tensor,
    list: _encode_sequence,
    tuple: _encode_sequence,
    dict: _encode_dict,
    set: _items_encoder(_SET, iter),
    frozenset: _items_encoder(_FROZENSET, iter),
    slice: _items_encoder(_SLICE, lambda value: (value.start, value.stop, value.step)),
    range: _items_encoder(_RANGE, lambda value: (value.start, value.stop, value.step)),
    torch.Size: _items_encoder(_SIZE, tuple),
    complex: _ext_encoder(_COMPLEX, lambda value: _COMPLEX_FORMAT.pack(value.real, value.imag)),
    bytearray: _ext_encoder(_BYTEARRAY, bytes),
    torch.dtype: _ext_encoder(_TORCH_NAME, _torch_name),
    torch.layout: _ext_encoder(_TORCH_NAME, _torch_name),
    torch.memory_format: _ext_encoder(_TORCH_NAME, _torch_name),
    torch.device: _ext_encoder(_DEVICE, lambda value: str(value).encode()),
}


@dataclass(slots=True)
class _Incoming:
    tensors: list[torch.Tensor]
    num_named: int = 0  # how many of them the body has named so far

    def tensor_at(self, index: int) -> torch.Tensor:
        if index == self.num_named < len(self.tensors):
            self.num_named = index + 1
        elif index >= self.num_named:
            raise DecodeError(
                f"tensor {index} is referenced out of order or does not exist ({len(self.tensors)} were received)"
            )
        return self.tensors[index]


def loads(body: bytes | bytearray | memoryview, tensors: list[torch.Tensor], limits: Limits) -> Any:
    """Decode a value, which must name every tensor of the table."""
    incoming = _Incoming(tensors)
    try:
        raw = _decode_msgpack(body)
        value = raw if type(raw) in _NATIVE_DECODED else _decode(raw, incoming, limits.depth)
    except RecursionError as error:
        raise LimitExceeded(f"arguments are nested more than {limits.depth} levels deep") from error
    except (TypeError, ValueError, KeyError, OverflowError, RuntimeError, struct.error) as error:
        raise DecodeError(f"not plain data: {error}") from error
    if incoming.num_named != len(tensors):
        raise DecodeError(f"{len(tensors)} tensors were received, but the arguments reference {incoming.num_named}")
    return value


def _decode(raw: Any, incoming: _Incoming, depth: int) -> Any:
    """Convert data decoded by msgspec into the value; lists and dicts are changed in place."""
    kind = type(raw)
    if kind is Ext:
        if raw.code == _TENSOR:
            return incoming.tensor_at(int.from_bytes(raw.data, "little"))
        return _VALUES[raw.code](bytes(raw.data))
    if depth <= 0:
        raise LimitExceeded("arguments are nested more deeply than Limits.depth allows")
    if kind is list:
        mark = raw[0] if raw else None
        if type(mark) is not Ext or mark.code < _TUPLE:
            return _decode_items(raw, incoming, depth)
        del raw[0]
        items = _decode_items(raw, incoming, depth)
        return tuple(items) if mark.code == _TUPLE else _CONTAINERS[mark.code](items, bytes(mark.data))
    if kind is not dict:
        raise DecodeError(f"not plain data: {kind.__name__}")
    for key, item in raw.items():
        if type(key) is not str:
            raise DecodeError(f"not plain data: a map with a key of type {type(key).__name__}")
        if type(item) not in _NATIVE_DECODED:
            raw[key] = _decode(item, incoming, depth - 1)
    return raw


def _decode_items(items: list[Any], incoming: _Incoming, depth: int) -> list[Any]:
    for index, item in enumerate(items):
        if type(item) not in _NATIVE_DECODED:
            items[index] = _decode(item, incoming, depth - 1)
    return items


def _check_hashes(keys: list[Any]) -> list[Any]:
    """Raise for keys chosen to share a hash: a thousand of them are slow to insert, a million bring the worker down."""
    if len(keys) > _MAX_EQUAL_HASHES and max(Counter(map(hash, keys)).values()) > _MAX_EQUAL_HASHES:
        raise DecodeError(f"a set or dict has more than {_MAX_EQUAL_HASHES} keys with the same hash")
    return keys


def _make_dict(items: list[Any], data: bytes) -> dict[Any, Any]:
    return dict(zip(_check_hashes(items[::2]), items[1::2], strict=True))


def _make_instance(items: list[Any], data: bytes) -> Any:
    name = data.decode()
    entry = BY_NAME.get(name)
    if entry is None and import_home(name):
        entry = BY_NAME.get(name)
    if entry is None:
        raise DecodeError(
            f"no class is registered as {name[:200]!r} on this worker; mark it with @gradwire.rpc.expose there"
        )
    try:
        return entry.from_fields(items)
    except Exception as error:  # the constructor's own check of its arguments
        raise DecodeError(f"{name} cannot be built from the received fields: {error}") from error


def _three(items: list[Any]) -> tuple[Any, Any, Any]:
    start, stop, step = items
    return start, stop, step


_VALUES: Final[dict[int, Callable[[bytes], Any]]] = {
    _INT: lambda data: int.from_bytes(data, "little", signed=True),
    _COMPLEX: lambda data: complex(*_COMPLEX_FORMAT.unpack(data)),
    _BYTEARRAY: bytearray,
    _TORCH_NAME: lambda data: _TORCH_OBJECTS[data.decode()],
    _DEVICE: lambda data: torch.device(data.decode()),
}
_CONTAINERS: Final[dict[int, Callable[[list[Any], bytes], Any]]] = {
    _DICT: _make_dict,
    _SET: lambda items, data: set(_check_hashes(items)),
    _FROZENSET: lambda items, data: frozenset(_check_hashes(items)),
    _SLICE: lambda items, data: slice(*_three(items)),
    _RANGE: lambda items, data: range(*_three(items)),
    _SIZE: lambda items, data: torch.Size(items),
    _CLASS: _make_instance,
}


# Registered classes


@dataclass(frozen=True, slots=True)
class PlainClass:
    kind: type
    name: str
    to_fields: Callable[[Any], Sequence[Any]]
    from_fields: Callable[[list[Any]], Any]


_lock = threading.Lock()  # guards writing; reading one key of a dict needs none
BY_KIND: dict[type, PlainClass] = {}
BY_NAME: dict[str, PlainClass] = {}


def register_plain_class(cls: type[T], name: str | None = None) -> type[T]:
    """Register a dataclass, named tuple or enum as plain data, which can be sent at any trust level.

    Both workers must register it. Can be used as a decorator.

    Args:
        cls: The class. Subclasses are not included.
        name: Its name in messages; ``module:qualname`` by default.

    Raises:
        ConfigurationError: The class is of another kind or needs values that its fields do not hold, or the name is taken.
    """
    name = _type_name(cls) if name is None else name
    if dataclasses.is_dataclass(cls):
        _register(_dataclass(cls, name))
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        _register(PlainClass(cls, name, tuple, lambda values: cls(*values)))
    elif issubclass(cls, enum.Enum):

        def find_member(values: list[Any]) -> Any:
            (member,) = values
            return cls[member]

        _register(PlainClass(cls, name, lambda member: (member.name,), find_member))
    else:
        raise ConfigurationError(
            f"{cls!r} cannot be exposed: it is not a dataclass, named tuple, enum or module class; send its fields instead"
        )
    return cls


def register_plain_type(
    cls: type[T],
    name: str,
    to_fields: Callable[[T], Sequence[Any]],
    from_fields: Callable[[list[Any]], T],
) -> None:
    """Register any class as plain data, with functions that convert its instances to fields and back.

    Args:
        cls: The class. Subclasses are not included.
        name: Its name in messages.
        to_fields: Returns the values to send; they may be anything that can be sent.
        from_fields: Makes an instance from the received values. They are untrusted: validate them.

    Raises:
        ConfigurationError: The name is taken.
    """
    _register(PlainClass(cls, name, to_fields, from_fields))


def register_plain_number(cls: type[int]) -> None:
    """Register a subclass of `int` whose instances are sent as the plain number, without the subclass's attributes."""
    _ENCODERS[cls] = lambda value, table, depth: _encode_int(int(value), table, depth)


def _type_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _dataclass(cls: type, name: str) -> PlainClass:
    fields = dataclasses.fields(cls)
    annotations = getattr(cls, "__dataclass_fields__", {})
    if len(annotations) > len(fields) and any(
        item._field_type is dataclasses._FIELD_INITVAR  # type: ignore[attr-defined]
        for item in annotations.values()
    ):
        raise ConfigurationError(
            f"{cls!r} has an InitVar, whose value is not stored; remove it, or send its fields instead"
        )
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
        # A notebook cell that is run again redefines its classes; the newest definition counts.
        if known is not None and _type_name(known.kind) != _type_name(entry.kind):
            raise ConfigurationError(f"the name {entry.name!r} is already registered for {known.kind!r}")
        BY_NAME[entry.name] = entry
        BY_KIND[entry.kind] = entry


_OWN: Final = "gradwire."
_homes: dict[str, str] = {}  # modules, by a name or by what a name has before its last dot


def set_home(name: str, module: str) -> None:
    """Set the module that registers a name, or all names that start with ``name.``."""
    _homes[name] = module


def import_home(name: str) -> bool:
    """Import the module that registers a name; return whether there is one."""
    module = _homes.get(name) or _homes.get(name.rpartition(".")[0])
    if module is None or not name.startswith(_OWN):
        return False
    import_module(module)
    return True


def import_module(name: str) -> ModuleType:
    """Import a module, after the packages that it is in.

    Python imports a submodule although another thread is still importing its package. If modules of the package import each
    other, one of the two threads then fails: with a deadlock error, or because it sees a partly imported module. Importing
    the package by its own name first waits for the other thread.
    """
    packages = name.split(".")[:-1]
    for end in range(1, len(packages) + 1):
        importlib.import_module(".".join(packages[:end]))
    return importlib.import_module(name)


# Bodies that would cost more than they weigh


_BYTES_PER_ITEM: Final = 64  # what the cheapest container costs in memory, for one byte on the wire
_FEWEST_ITEMS: Final = 16 * KIB
_SAFE_RECURSION: Final = 10_000
SCAN_FROM: Final = 8 * KIB
"""Shorter data is not checked, because decoding finds its errors cheaply."""

# For every first byte: (bytes of a length that follows, bytes besides it, what it is).
_VALUE, _ARRAY, _MAP, _STRING = range(4)


def _kinds() -> tuple[tuple[int, int, int], ...]:
    table = [(0, 0, _VALUE)] * 256
    table[0x80:0x90] = [(0, count, _MAP) for count in range(16)]
    table[0x90:0xA0] = [(0, count, _ARRAY) for count in range(16)]
    table[0xA0:0xC0] = [(0, count, _STRING) for count in range(32)]
    for step in range(3):  # lengths of 1, 2 and 4 bytes
        table[0xC4 + step] = (1 << step, 0, _VALUE)  # bytes
        table[0xC7 + step] = (1 << step, 1, _VALUE)  # extension with its code
        table[0xD9 + step] = (1 << step, 0, _STRING)
    # Floats, unsigned and signed ints, and extensions of 1 to 16 bytes with their code
    table[0xCA:0xD9] = [(0, size, _VALUE) for size in (4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 2, 3, 5, 9, 17)]
    table[0xDC:0xE0] = [(2, 0, _ARRAY), (4, 0, _ARRAY), (2, 0, _MAP), (4, 0, _MAP)]
    return tuple(table)


_MSGPACK_KINDS: Final = _kinds()


def check_structure(data: bytes | bytearray | memoryview, limits: Limits) -> None:
    """Raise for msgpack data that is small but would take excessive memory or time to decode."""
    if len(data) <= SCAN_FROM:
        return
    most = max(limits.frame_bytes // _BYTES_PER_ITEM, _FEWEST_ITEMS)
    raw = bytes(data)
    if len(raw) > most or b"\xde" in raw or b"\xdf" in raw or sys.getrecursionlimit() > _SAFE_RECURSION:
        _scan(raw, most)


def _scan(raw: bytes, most: int) -> None:
    offset, num_items, end = 0, 1, len(raw)
    stack: list[int] = []  # of every open container: items to come, negative for a map
    while True:
        if offset >= end:
            raise DecodeError("arguments end too early")
        length_bytes, extra, kind = _MSGPACK_KINDS[raw[offset]]
        if stack and stack[-1] < 0 and stack[-1] % 2 == 0 and kind != _STRING:
            raise DecodeError("a map has keys that are not text")
        body_at = offset + 1 + length_bytes
        count = extra + int.from_bytes(raw[offset + 1 : body_at], "big") if length_bytes else extra
        if stack:
            stack[-1] += 1 if stack[-1] < 0 else -1
        if kind in (_ARRAY, _MAP):
            offset = body_at
            num_items += count * kind
            stack.append(count if kind == _ARRAY else -2 * count)
            if num_items > most or len(stack) > _SAFE_RECURSION:
                raise LimitExceeded(
                    f"arguments have more than {most} items, or are nested more than {_SAFE_RECURSION} levels deep"
                )
        else:
            offset = body_at + count
        while stack and stack[-1] == 0:
            stack.pop()
        if not stack:
            return
