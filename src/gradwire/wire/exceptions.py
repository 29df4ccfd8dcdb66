"""Convert exceptions to data and back. No pickle is read, and no constructor of a class named by a peer is run.

    worker c                    worker b                          worker a (the caller)
      raises ValueError
      describe_exception  --->  rebuild_exception, raised again
                                describe_exception          --->  rebuild_exception
                                                                  ValueError
                                                                    __cause__  RemoteTraceback of b
                                                                      __cause__  RemoteTraceback of c

Every hop keeps the previous traceback as its cause, so that an ordinary printed traceback shows the whole path.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final, TypeVar

from gradwire.config import Limits
from gradwire.errors import CannotSend, DecodeError, GradwireError, LimitExceeded, RemoteCallFailed, RemoteTraceback
from gradwire.types import CONTROL_CHARS, Trust, is_class
from gradwire.wire import plain
from gradwire.wire.messages import ErrorInfo, check_text

MAX_CHAIN: Final = 8
"""Exceptions of one chain that are sent: the one that was raised, and the causes behind it."""

MAX_CAUSES: Final = 16
"""Length of the longest accepted chain."""

T = TypeVar("T")

_DETAILS_LIMITS: Final = Limits()
_UNSAFE: Final = re.compile(rf"(?![\t\n])[{CONTROL_CHARS}]")
_NOT_FROM_AFAR: Final = (SystemExit, KeyboardInterrupt, GeneratorExit, RemoteTraceback)
# Attributes that built-in exceptions keep outside `args` and `__dict__`.
_BUILTIN_FIELDS: Final[tuple[tuple[type[BaseException], tuple[str, ...]], ...]] = (
    (ImportError, ("name", "path")),
    (AttributeError, ("name",)),
    (NameError, ("name",)),
)


def describe_exception(exc: BaseException, worker: str, limits: Limits) -> ErrorInfo:
    """Describe an exception so that another worker can raise it. Never raises, whatever the exception does."""
    chain = _chain_of(exc)
    budget = max(64, min(limits.error_text_bytes, limits.header_bytes // 2) // len(chain))
    described: ErrorInfo | None = None
    for link in reversed(chain):
        info = link if isinstance(link, ErrorInfo) else _describe_one(link, worker)
        described = ErrorInfo(
            type_name=info.type_name,
            message=clean(info.message, budget // 4),
            traceback=clean(info.traceback, budget // 2),
            worker=info.worker,
            details=info.details if len(info.details) <= budget // 4 else b"",
            cause=described,
        )
    assert described is not None  # the chain holds at least `exc`
    return described


def _chain_of(exc: BaseException) -> list[BaseException | ErrorInfo]:
    """Return the exception and its causes, nearest first; those received from other workers are passed on unchanged."""
    chain: list[BaseException | ErrorInfo] = []
    seen: set[int] = set()
    link: Any = exc
    while link is not None and len(chain) < MAX_CHAIN and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, RemoteTraceback) and isinstance(link.info, ErrorInfo):
            link = link.info
        chain.append(link)
        if isinstance(link, ErrorInfo):
            link = link.cause
        else:
            link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return chain


def _describe_one(exc: BaseException, worker: str) -> ErrorInfo:
    kind = type(exc)
    message = _attempt(
        lambda: str.__str__(str(exc)),  # plain text, where that is of a subclass of str
        lambda error: f"(message unavailable: str() raised {type(error).__name__})",
    )
    text = _attempt(
        lambda: _format_traceback(exc),
        lambda error: f"(traceback unavailable: {type(error).__name__})",
    )
    type_name = _attempt(
        lambda: clean(f"{kind.__module__}:{kind.__qualname__}", 512), lambda error: "builtins:BaseException"
    )
    return ErrorInfo(
        type_name, message, text, worker, _attempt(lambda: _encode_details(exc, message), lambda error: b"")
    )


def _format_traceback(exc: BaseException) -> str:
    """Format a traceback without the link of gradwire's own errors, which the rebuilt error shows."""
    lines = traceback.format_exception(type(exc), exc, exc.__traceback__, chain=False)
    if isinstance(exc, GradwireError):
        lines = [line for line in lines if line != f"See {exc.docs_url}\n"]
    return "".join(lines)


def _attempt(compute: Callable[[], T], otherwise: Callable[[BaseException], T]) -> T:
    """Run code of the user's class (``__str__``, properties, its metaclass), which may raise anything."""
    try:
        return compute()
    except BaseException as error:
        return otherwise(error)


def clean(text: str, max_bytes: int | None = None) -> str:
    """Make a text harmless to print, and cut its middle if it is too long.

    Control characters, escape sequences and marks that reorder text become visible escapes; newline and tab stay.
    """
    if max_bytes is None:
        return _UNSAFE.sub(_escape, text)
    ends = text if len(text) <= 2 * max_bytes else text[:max_bytes] + text[-max_bytes:]
    raw = _UNSAFE.sub(_escape, ends).encode()
    if len(raw) <= max_bytes:
        return raw.decode()
    note = f"\n... {len(text) - max_bytes} of {len(text)} characters omitted ...\n"
    half = max(0, max_bytes - len(note)) // 2
    if half == 0:
        return raw[:max_bytes].decode(errors="ignore")
    return raw[:half].decode(errors="ignore") + note + raw[-half:].decode(errors="ignore")


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def _encode_details(exc: BaseException, message: str) -> bytes:
    """Encode arguments and attributes, as far as they are plain data."""
    args = _arguments_of(exc)
    attributes = dict(getattr(exc, "__dict__", None) or {})
    for kind, names in _BUILTIN_FIELDS:
        if isinstance(exc, kind):
            attributes.update((name, getattr(exc, name, None)) for name in names)
    args = args if _encoded(args) is not None else (message,)
    kept = {key: value for key, value in attributes.items() if type(key) is str and _encoded(value) is not None}
    return _encoded((args, kept)) or b""


def _arguments_of(exc: BaseException) -> tuple[Any, ...]:
    if isinstance(exc, OSError) and exc.filename is not None and len(exc.args) == 2:
        more = () if exc.filename2 is None else (None, exc.filename2)
        return (*exc.args, exc.filename, *more)
    return tuple(exc.args)


def _encoded(value: Any) -> bytes | None:
    try:
        body, tensors = plain.dumps(value, _DETAILS_LIMITS)
    except (plain.NotPlain, CannotSend):
        return None
    return None if tensors else body


def check_error(info: ErrorInfo, limits: Limits) -> None:
    """Refuse an exception that `describe_exception` would not describe like that."""
    link: ErrorInfo | None = info
    for _ in range(MAX_CAUSES):
        if link is None:
            return
        check_text(link.worker, "a worker's name", limits.name_bytes)
        link = link.cause
    raise LimitExceeded(f"an error has a chain of more than {MAX_CAUSES} causes")


def rebuild_exception(info: ErrorInfo, trust: Trust) -> Exception:
    """Rebuild an exception that another worker described.

    It has its original type if that is known here: built-in, of torch or gradwire, and with ``trust="code"`` any class that
    is already loaded. Everything else becomes `RemoteCallFailed`. Its `__cause__` is a `RemoteTraceback`.
    """
    kind = _find_class(info.type_name, trust)
    made = _make(kind, info) if kind is not None else None
    if made is None:
        worker, type_name = clean(info.worker), clean(info.type_name.replace(":", "."))
        made = RemoteCallFailed(f"{type_name} on worker '{worker}': {clean(info.message)}", worker, type_name)
    made.__cause__ = _remote_traceback(info)
    return made


def _remote_traceback(info: ErrorInfo) -> RemoteTraceback:
    links: list[RemoteTraceback] = []
    link: ErrorInfo | None = info
    while link is not None and len(links) < MAX_CAUSES:
        links.append(RemoteTraceback(clean(link.worker), clean(link.traceback), link))
        link = link.cause
    for nearer, farther in pairwise(links):
        nearer.__cause__ = farther
    return links[0]


def _find_class(type_name: str, trust: Trust) -> type[Exception] | None:
    module_name, _, qualname = type_name.partition(":")
    is_ours = module_name in ("builtins", "torch", "gradwire.errors") or module_name.startswith("torch.")
    if not is_ours and trust != "code":
        return None
    found: Any = sys.modules.get(module_name)
    for part in qualname.split("."):  # reads dictionaries: getattr on a module may import things
        found = getattr(found, "__dict__", {}).get(part)
    if not is_class(found) or not issubclass(found, Exception) or issubclass(found, _NOT_FROM_AFAR):
        return None
    return found


def _make(kind: type[Exception], info: ErrorInfo) -> Exception | None:
    try:
        args, attributes = _decode_details(info)
        made: Any = kind(*args) if kind.__module__ == "builtins" else _make_bare(kind, args)
        for name, value in attributes.items():
            _set_attribute(made, name, value)
        str(made), repr(made)
    except (Exception, SystemExit):  # whatever its methods do: the caller must learn of the failure
        return None
    return made if isinstance(made, Exception) else None


def _make_bare(kind: type[Exception], args: tuple[Any, ...]) -> Any:
    """Make an instance without its `__init__`. Built-in constructors only set `args`; others might do more."""
    for base in kind.__mro__:
        if "__new__" not in vars(base):
            continue
        try:
            made = base.__new__(kind, *args)
            made.args = args
            return made
        except TypeError:  # of several built-in bases, only the one that laid out the instance may make it
            continue
    return None


def _decode_details(info: ErrorInfo) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if info.details:
        try:
            args, attributes = plain.loads(info.details, [], _DETAILS_LIMITS)
            if type(args) is tuple and type(attributes) is dict and all(type(name) is str for name in attributes):
                return _clean_value(args), {name: _clean_value(value) for name, value in attributes.items()}
        except (DecodeError, TypeError, ValueError):
            pass
    return (clean(info.message),), {}


def _clean_value(value: Any) -> Any:
    if type(value) is str:
        return clean(value)
    if type(value) in (list, tuple):
        return type(value)(_clean_value(item) for item in value)
    return value


def _set_attribute(made: Exception, name: str, value: Any) -> None:
    if name == "__notes__" and type(value) is list and all(type(note) is str for note in value):
        made.__dict__[name] = value
    elif any(isinstance(made, kind) and name in names for kind, names in _BUILTIN_FIELDS):
        setattr(made, name, value)
    elif not name.startswith("__") and not callable(getattr(type(made), name, None)):
        made.__dict__[name] = value  # not by setattr, which may be the class's own code
