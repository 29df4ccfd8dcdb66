"""What the tests have workers do; imported by them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradwire import rpc
from gradwire.rpc import RRef
from gradwire.rref import context
from gradwire.rref._ownership import Ownership
from gradwire.testing import wait_until

KEPT: dict[str, Any] = {}
gate = threading.Event()


def counts() -> tuple[int, int, int, int]:
    """Values, forks, children and messages of this worker."""
    found = context.here().statistics()
    return found.num_values, found.num_forks, found.num_children, found.num_messages


def wait_clean(names: Sequence[str], timeout_s: float = 25.0) -> None:
    """Returns when no reference is left here and on these workers."""

    def left() -> dict[str, tuple[int, int, int, int]]:
        everybody = {"here": counts(), **{name: rpc.rpc_sync(name, counts) for name in names}}
        return {name: found for name, found in everybody.items() if any(found)}

    with contextlib.suppress(TimeoutError):
        wait_until(lambda: not left(), timeout_s)
    assert left() == {}


def make(value: float, size: int = 3) -> torch.Tensor:
    return torch.full((size,), value)


def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


def fail(text: str) -> None:
    raise ValueError(text)


def fetch(rref: RRef[Any]) -> Any:
    return rref.to_here()


def fetch_all(rrefs: Any) -> Any:
    return [rref.to_here() for rref in rrefs]


def fetch_inside(thing: Any) -> Any:
    return thing["list"][0][1].to_here()


def forward(rref: RRef[Any], way: Sequence[str]) -> Any:
    """Passes a reference on, and the last one fetches it."""
    return rpc.rpc_sync(way[0], forward, args=(rref, list(way[1:]))) if way else rref.to_here()


def hand_back(rref: RRef[Any]) -> RRef[Any]:
    return rref


def own(value: Any) -> RRef[Any]:
    """A value of this worker, which nothing here refers to."""
    return RRef(value)


def keep(name: str, rref: RRef[Any]) -> None:
    KEPT[name] = rref


def give(name: str) -> RRef[Any]:
    found: RRef[Any] = KEPT[name]
    return found


def kept_value(name: str) -> Any:
    return KEPT[name].to_here()


def kept_state(name: str) -> str:
    return repr(KEPT[name])


def kept_to(name: str, to: str) -> None:
    """Passes what was kept on to another worker, which keeps it, too."""
    rpc.rpc_sync(to, keep, args=(name, KEPT[name]))


def drop(name: str) -> None:
    KEPT.pop(name, None)


def wait_gate() -> int:
    """Runs until `open_gate`."""
    assert gate.wait(30)
    return os.getpid()


def open_gate() -> None:
    gate.set()


_begun = threading.Event()


def forward_unmade(owner: str, to: str) -> None:
    """Keeps the owner busy, has a value made there that must wait, and passes it on."""
    busy = [rpc.rpc_async(owner, wait_gate) for _ in range(20)]
    rref = rpc.remote(owner, make, args=(1.0,))
    future = rpc.rpc_async(to, fetch, args=(rref,))
    _begun.set()
    future.wait()
    assert busy


def has_begun() -> bool:
    return _begun.is_set()


def is_owner(rref: RRef[Any]) -> tuple[bool, str, bool]:
    return rref.is_owner(), rref.owner_name(), rref.confirmed_by_owner()


@rpc.functions.async_execution
def later(to: str, value: float) -> Any:
    return rpc.rpc_async(to, make, args=(value,))


@dataclass
class Box:
    """Something that only a pickle can carry."""

    rref: Any


def open_box(box: Box) -> Any:
    return box.rref.to_here()


class Counter:
    """A value with methods."""

    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, number: int, *, times: int = 1) -> int:
        self.value += number * times
        return self.value

    def fail(self) -> None:
        raise KeyError("no such thing")

    @rpc.functions.async_execution
    def add_later(self, number: int, to: str) -> Any:
        return rpc.rpc_async(to, abs, args=(number,)).then(lambda done: self.add(done.value()))


_shared = torch.zeros(2)
_shared_memory = _shared.numpy()


def shared_tensor() -> torch.Tensor:
    """A value that other code of this worker has, too."""
    return _shared


def shared_view() -> torch.Tensor:
    return _shared.view(2)


def shared_detached() -> torch.Tensor:
    return _shared.detach()


def shared_memory() -> torch.Tensor:
    return torch.from_numpy(_shared_memory)


def change_shared(by: float = 1.0) -> None:
    _shared.add_(by)


def add_one_here(rref: RRef[torch.Tensor]) -> None:
    rref.local_value().add_(1)


def add_one_there(rref: RRef[torch.Tensor]) -> None:
    rref.rpc_sync().add_(1)


def num_remembered(ownership: Ownership) -> int:
    """How many ids of forks and values that ended a worker remembers."""
    return sum(len(ids.latest | ids.older) for ids in ownership._ended.values())
