"""Types shared by all layers: a worker's identity and addresses, and the layout of ids."""

from __future__ import annotations

import os
import re
import time
from typing import Annotated, Any, Final, Literal, TypeGuard

import msgspec

Trust = Literal["code", "data"]
"""How far workers trust each other: ``"code"`` may send functions and pickles, ``"data"`` only tensors and plain data."""


class WorkerInfo(msgspec.Struct, frozen=True, array_like=True):
    """Name and rank of a worker, like ``torch.distributed.rpc.WorkerInfo``.

    Attributes:
        name: Unique among the workers of a cluster.
        id: The rank, 0 to 65,535, so that it fits into the upper 16 bits of an autograd context id.
    """

    name: str
    id: int

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


class WorkerAddress(msgspec.Struct, frozen=True):
    """Everything another worker needs to reach this one."""

    info: WorkerInfo
    incarnation: int  # increases with every start under the same name; frames of an older one are refused
    host: str  # identity of the machine and network namespace; workers with equal hosts connect over ``unix``
    uris: tuple[str, ...]  # where it listens, e.g. ``unix:///tmp/gw-x/w0.sock`` and ``tcp://10.0.0.4:4711?tls``
    main: str = ""  # digest of the script it runs, or empty

    def shares_main(self, other: WorkerAddress) -> bool:
        """Return whether both run the same script, so that objects of ``__main__`` can be sent by name."""
        return self.main != "" and self.main == other.main


def is_worker_name(name: str) -> bool:
    """Return whether a name has only letters, digits and ``-_:.``, which are safe in messages, paths and logs."""
    return bool(name) and all(char.isalnum() or char in "-_:." for char in name)


def make_incarnation() -> int:
    """Return a number that increases with every start; 63 bits of nanoseconds last until the year 2262."""
    return time.time_ns()


COUNTER_BITS = 48
MAX_COUNTER = (1 << COUNTER_BITS) - 1
_TICK_NS = 10_000_000
_IDS_PER_TICK_BITS = 9

Id = Annotated[int, msgspec.Meta(ge=0)]
"""An id in a message; msgpack has no integers of more than 64 bits."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=10**12)]
"""A duration in a message, neither infinite nor NaN."""

Rank = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
"""A rank in a message."""

MOST_CHARS: Final = 256

CONTROL_CHARS: Final = r"\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
"""Control characters, line separators, marks that reorder text, and surrogates: the inside of a set in a pattern."""

Text = Annotated[str, msgspec.Meta(max_length=MOST_CHARS, pattern=rf"\A[^{CONTROL_CHARS}]*\Z")]
"""One line without `CONTROL_CHARS` in a message; not escaped for any output format."""


_UNSAFE: Final = re.compile(f"[{CONTROL_CHARS}]")


def is_class(value: object) -> TypeGuard[type[Any]]:
    """Return whether a value is a class; for Python 3.10, aliases such as ``list[int]`` are instances of `type`, too."""
    return issubclass(type(value), type)


def short(value: object) -> str:
    """Return a text that is short and clean enough for a `Text`."""
    return _UNSAFE.sub("?", str(value)[:MOST_CHARS])


def first_counter(incarnation: int) -> int:
    """Return the first value of a worker's counters: 512 ids for each hundredth of a second since the epoch."""
    return ((incarnation // _TICK_NS) << _IDS_PER_TICK_BITS) & MAX_COUNTER


def make_secret_id(rank: int) -> int:
    """Return an id that other workers cannot guess."""
    return (rank << COUNTER_BITS) | (int.from_bytes(os.urandom(COUNTER_BITS // 8), "big") or 1)


def creator_of(number: int) -> int:
    """Return the rank of the worker that made an id."""
    return number >> COUNTER_BITS
