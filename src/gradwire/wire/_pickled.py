"""Pickles, for workers that trust each other with code. Tensors stay outside of the pickle.

The C pickler does what it can. What it cannot do by reference (lambdas, closures, anything that was defined in
``__main__`` of workers that run different programs) is done again by cloudpickle, by value.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import deque
from types import FunctionType
from typing import Any, Final

import cloudpickle
import torch

from gradwire.errors import CannotSend, DecodeError
from gradwire.wire._plain import TensorTable
from gradwire.wire._registry import BY_KIND
from gradwire.wire._subclasses import is_ordinary, is_storage, reduce_storage, reduce_tensor

MAIN_MODULES: Final = frozenset(("__main__", "__mp_main__"))
_KEEP_PICKLERS: Final = 16
_KEEP_BYTES: Final = 1 << 20


class _ByValue(Exception):
    """Something that the other worker cannot import."""


def is_in_script(obj: Any) -> bool:
    """Whether something of ``__main__`` comes from the script itself, and was not typed in or made by ``exec``."""
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
        return self.table.index_of(obj) if isinstance(obj, torch.Tensor) and is_ordinary(obj) else None

    def reducer_override(self, obj: Any) -> Any:
        reduced = _reduce(obj, self.table)
        if reduced is not NotImplemented:
            return reduced
        is_of_main = isinstance(obj, type | FunctionType) and obj.__module__ in MAIN_MODULES
        if is_of_main and not (self.shares_main and is_in_script(obj)):
            raise _ByValue
        return NotImplemented

    def reset(self) -> None:
        self.clear_memo()
        self.buffer.seek(0)
        self.buffer.truncate()
        self.table = TensorTable()


class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles by value where it has to."""

    def __init__(self, buffer: io.BytesIO) -> None:
        self.table = TensorTable()
        super().__init__(buffer, protocol=5)

    def persistent_id(self, obj: Any) -> int | None:
        return self.table.index_of(obj) if isinstance(obj, torch.Tensor) and is_ordinary(obj) else None

    def reducer_override(self, obj: Any) -> Any:
        reduced = _reduce(obj, self.table)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


def _reduce(obj: Any, table: TensorTable) -> Any:
    """What tensors that are not ordinary, and storages, consist of; `NotImplemented` for everything else."""
    if is_storage(obj):
        return reduce_storage(obj)
    if not isinstance(obj, torch.Tensor) or type(obj) in BY_KIND:  # registered classes know it themselves
        return NotImplemented
    reduced, is_tracked = reduce_tensor(obj)
    if not is_tracked:
        table.untracked.append(obj)
    return reduced


class _Unpickler(pickle.Unpickler):
    def __init__(self, body: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(body))
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class("__main__" if module in MAIN_MODULES else module, name)

    def persistent_load(self, pid: Any) -> torch.Tensor:
        if type(pid) is not int or not 0 <= pid < len(self._tensors):
            raise DecodeError(f"tensor {pid!r} does not exist ({len(self._tensors)} came)")
        return self._tensors[pid]


# Idle picklers. Taking and returning are single operations, so threads need no lock, and a pickler that is in use when
# a class calls back into gradwire while it is pickled is simply not here.
_idle: deque[_Pickler] = deque(maxlen=_KEEP_PICKLERS)


def dumps(value: Any, shares_main: bool = False) -> tuple[bytes, TensorTable]:
    """Pickle a value. Its tensors are in the table.

    Args:
        value: What to pickle.
        shares_main: Whether what is defined in ``__main__`` can be found there by name.

    Raises:
        CannotSend: Raised by a class while it was pickled.
        Exception: Whatever cloudpickle says about a value that cannot be pickled.
    """
    try:
        return _dumps_by_reference(value, shares_main)
    except CannotSend:
        raise
    except Exception:  # anything: classes raise what they like, and only the second attempt counts
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
    """Load a pickle of a worker that is trusted with code.

    Raises:
        DecodeError: The bytes are no pickle.
        CannotSend: It names something that this worker cannot import or make.
    """
    try:
        return _Unpickler(bytes(body), tensors).load()
    except DecodeError:
        raise
    except (pickle.UnpicklingError, EOFError) as error:
        raise DecodeError(f"not a pickle: {error}") from error
    except (ImportError, AttributeError) as error:
        text = f"a value cannot be rebuilt on this worker: {error}; its module must be importable here too"
        raise CannotSend(text) from error
    except Exception as error:
        raise CannotSend(f"a value cannot be rebuilt on this worker: {type(error).__name__}: {error}") from error
