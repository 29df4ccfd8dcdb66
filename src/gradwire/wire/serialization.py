"""Convert values to (codec, body, tensors) and back.

    EMPTY    ((), {}): a call without arguments; no body
    NONE     None: what most calls return; no body
    PLAIN    msgpack (`gradwire.wire.plain`): tensors, numbers, text, containers, registered classes
    TENSOR   one tensor and nothing else; no body
    TENSORS  ((tensor, ...), {}): a call whose arguments are distinct tensors; no body
    PICKLE   a pickle (`gradwire.wire.pickling`); only with ``trust="code"``, and only for what PLAIN does not know

With ``trust="data"`` no byte of a pickle is written or read.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import torch

from gradwire.config import Limits
from gradwire.errors import CannotSend, DecodeError, LimitExceeded, WorkerLost
from gradwire.types import Trust
from gradwire.wire import pickling, plain
from gradwire.wire.pickling import CarriedFunction, carry, function_name, resolve_function
from gradwire.wire.plain import check_structure, import_home, register_plain_class, register_plain_type, set_home
from gradwire.wire.tensors import describe

__all__ = [
    "BARE",
    "EMPTY",
    "NONE",
    "PICKLE",
    "PLAIN",
    "TENSOR",
    "TENSORS",
    "CarriedFunction",
    "Packed",
    "carry",
    "function_name",
    "import_home",
    "pack",
    "pack_bare",
    "pack_other",
    "register_plain_class",
    "register_plain_type",
    "resolve_function",
    "set_home",
    "unpack",
    "unpack_bare",
]


EMPTY: Final = 0
PLAIN: Final = 1
PICKLE: Final = 2
NONE: Final = 3
TENSOR: Final = 4
TENSORS: Final = 5

BARE: Final = (EMPTY, NONE, TENSOR, TENSORS)
"""Codecs of values that are nothing but tensors, or nothing at all."""

_TENSOR_TYPE: Final = torch.Tensor
_MANY_ITEMS: Final = 4096  # a container of more is pickled where it may be: several times as fast
_NO_TENSORS: Final[list[torch.Tensor]] = []  # shared by all values without tensors; never changed


class Packed(msgspec.Struct, frozen=True):
    codec: int
    body: bytes  # the value without its tensors
    tensors: list[torch.Tensor]  # in the order in which `body` numbers them
    transfer: Any = (
        None  # for the layer that packs: what the value holds that must know whether it arrives; opaque here
    )
    untracked: list[torch.Tensor] = _NO_TENSORS  # require grad, but gradients cannot be sent back to them


def pack(value: Any, trust: Trust, limits: Limits, shares_main: bool = False) -> Packed:
    """Encode a value for another worker: ``(args, kwargs)`` for a call, anything else for a result.

    If `shares_main`, the other worker runs the same script, so that objects of ``__main__`` can be sent by name. The error
    for a value that cannot be sent names the part, where it is, and what to do.
    """
    return pack_bare(value) or pack_other(value, trust, limits, shares_main)


def pack_bare(value: Any) -> Packed | None:
    """Encode a value that consists of tensors only or of nothing, as most do; return None for any other."""
    if value is None:
        return Packed(NONE, b"", _NO_TENSORS)
    if type(value) is _TENSOR_TYPE:
        return None if value.is_quantized or value.is_nested else Packed(TENSOR, b"", [value])
    if type(value) is not tuple or len(value) != 2:
        return None
    args, kwargs = value
    if type(args) is not tuple or type(kwargs) is not dict or kwargs:
        return None
    if not args:
        return Packed(EMPTY, b"", _NO_TENSORS)
    for item in args:  # a loop: half the cost of all() over a generator
        if type(item) is not _TENSOR_TYPE or item.is_quantized or item.is_nested:
            return None
    if len(args) > 1 and len(set(map(id, args))) < len(args):
        return None
    return Packed(TENSORS, b"", list(args))


def pack_other(value: Any, trust: Trust, limits: Limits, shares_main: bool = False) -> Packed:
    """Encode a value that is not bare; arguments and errors as `pack`."""
    try:
        tensors: list[torch.Tensor] | None
        body, tensors = plain.dumps(value, limits, _MANY_ITEMS if trust == "code" else float("inf"))
    except plain.NotPlain:
        tensors = None
    if tensors is None:  # outside the handler: an error from here must not show NotPlain as its context
        if trust != "code":
            raise _explain_not_plain(value, limits)
        return _pack_pickle(value, shares_main)
    if trust != "code":
        try:
            check_structure(body, limits)
        except LimitExceeded as error:
            raise CannotSend(f"a value cannot be sent: {error}; send many numbers as a tensor") from error
    return Packed(PLAIN, body, tensors)


def unpack(
    codec: int, body: bytes | bytearray | memoryview, tensors: list[torch.Tensor], trust: Trust, limits: Limits
) -> Any:
    if codec == PLAIN:
        if trust != "code":
            check_structure(body, limits)
        return plain.loads(body, tensors, limits)
    if codec == PICKLE:
        if trust != "code":
            raise DecodeError('received a pickle, which trust="data" does not allow')
        return pickling.loads(body, tensors)
    return unpack_bare(codec, body, tensors)


def unpack_bare(codec: int, body: bytes | bytearray | memoryview, tensors: list[torch.Tensor]) -> Any:
    """Decode a value that consists of tensors only or of nothing."""
    if body:
        raise DecodeError(f"codec {codec} has no body, but {len(body)} bytes were received")
    if codec == TENSORS:
        return tuple(tensors), {}
    if codec == TENSOR and len(tensors) == 1:
        return tensors[0]
    if tensors or codec not in (EMPTY, NONE):
        raise DecodeError(f"codec {codec} does not take {len(tensors)} tensors")
    return ((), {}) if codec == EMPTY else None


def _pack_pickle(value: Any, shares_main: bool) -> Packed:
    try:
        body, table = pickling.dumps(value, shares_main)
        return Packed(PICKLE, body, table.tensors, None, table.untracked)
    except (CannotSend, WorkerLost):  # a reference whose owner is gone
        raise
    except Exception as error:
        where, culprit = _locate(value, lambda part: _succeeds(pickling.dumps, part))
        reason = f"{type(error).__name__}: {error}"[:500]
        # Only a class's own __reduce__ has a traceback worth reading; that of a pickler leads through gradwire alone.
        cause = error if _is_users(error) else None
        raise CannotSend(f"{where} of type {_type_name(culprit)} cannot be sent: {reason}") from cause


def _is_users(error: BaseException) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").partition(".")[0] not in ("gradwire", "cloudpickle", "copyreg", "pickle")


def _succeeds(dumps: Callable[..., Any], *args: Any) -> bool:
    try:
        dumps(*args)
    except Exception:
        return False
    return True


def _explain_not_plain(value: Any, limits: Limits) -> CannotSend:
    where, culprit = _locate(value, lambda part: _succeeds(plain.dumps, part, limits))
    if type(culprit) is _TENSOR_TYPE:  # quantized or nested: the reason is better known elsewhere
        describe(culprit, limits)
    advice = (
        "Send the plain tensors it is made of, such as x.as_subclass(torch.Tensor)"
        if isinstance(culprit, _TENSOR_TYPE)
        else "Send its contents, mark its class with @gradwire.rpc.expose on both workers (dataclasses, named tuples, enums)"
    )
    return CannotSend(
        f'{where} of type {_type_name(culprit)} cannot be sent with trust="data", which carries tensors and plain '
        f'data. {advice}, or use trust="code" if the workers may run each other\'s code'
    )


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# Where the part is that cannot be sent


_MAX_TRIES: Final = 2000


def _locate(value: Any, can_send: Callable[[Any], bool]) -> tuple[str, Any]:
    """Follow the first part that cannot be sent, down to the smallest one; return a path to it and the part.

    A path looks like ``args[1]['lock']``. `can_send` is called with one part at a time, and is false for `value`.
    """
    path, num_tries, seen = "", 0, {id(value)}
    while True:
        for label, child in _children(value, is_root=not path):
            num_tries += 1
            if num_tries > _MAX_TRIES:
                return path or "value", value
            if id(child) not in seen and not can_send(child):
                seen.add(id(child))
                path, value = (path + label) if path or not label.startswith("[") else "value" + label, child
                break
        else:
            return path or "value", value


def _children(value: Any, is_root: bool) -> Iterator[tuple[str, Any]]:
    labels = _call_labels(value) if is_root else None
    if labels is not None:
        yield from zip(labels, value, strict=True)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"[{_short(key)}]", item
            yield f"[key {_short(key)}]", key
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield f"[{index}]", item
    elif isinstance(value, set | frozenset):
        for item in value:
            yield "[item]", item
    elif not isinstance(value, torch.Tensor):  # a subclass stands for itself, whatever it holds
        yield from _inside_of(value)


def _call_labels(value: Any) -> tuple[str, ...] | None:
    """Return names for the parts of a call: (args, kwargs) or (function, args, kwargs)."""
    if not isinstance(value, tuple) or len(value) not in (2, 3):
        return None
    if not isinstance(value[-2], tuple) or not isinstance(value[-1], dict):
        return None
    return ("function", "args", "kwargs")[-len(value) :]


def _inside_of(value: Any) -> Iterator[tuple[str, Any]]:
    for cell, name in zip(
        getattr(value, "__closure__", None) or (),
        getattr(getattr(value, "__code__", None), "co_freevars", ()),
        strict=False,
    ):
        yield f".<variable {name}>", cell.cell_contents
    for name, item in list(getattr(value, "__dict__", {}).items()):
        yield f".{name}", item


def _short(key: Any) -> str:
    text = repr(key) if isinstance(key, str | int | float | bool | None) else type(key).__name__
    return text if len(text) <= 60 else text[:57] + "..."
