"""What a reference refers to: a value that is here, or a fork of one that is elsewhere."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Final

import msgspec
import torch

from gradwire.errors import RpcTimeout, RRefError
from gradwire.rpc.connection import while_waiting
from gradwire.rpc.pending_calls import PendingCall
from gradwire.rref._messages import Worker
from gradwire.rref._ownership import ForkPhase
from gradwire.types import MAX_COUNTER, WorkerInfo, creator_of

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_ATOMS: Final = frozenset((bool, int, float, complex, str, bytes, type(None)))
_MOST_ITEMS: Final = 1000  # of an object or container that are looked at
_KeptInCpp: Any = getattr(torch._C, "ScriptList", list)


def may_have_leaves(value: Any) -> bool:
    """Whether it is worth looking for some, now and later."""
    return type(value) not in _ATOMS


def keep_leaves(value: Any) -> Any:
    """Something that refers to the leaves of a tensor, a module, or an object or container that has such, from C++.

    Objects and containers are looked at one level deep, and no further than their first thousand items.
    """
    if type(value) is torch.Tensor and not value.requires_grad:  # most are
        return None
    leaves = [leaf for leaf in _leaves_of(value) if type(leaf) in _PLAIN and leaf.requires_grad and leaf.is_leaf]
    if not leaves:
        return None
    kept = _KeptInCpp(leaves)
    for leaf in leaves:
        with contextlib.suppress(RuntimeError):  # not of every layout
            leaf.view_as(leaf)  # lets go of the GIL: whoever is making the accumulator right now has made it after this
    return kept


def _leaves_of(value: Any) -> Iterator[torch.Tensor]:
    """Asks types, not values: looking at a proxy or a lazy object could make it do something."""
    for item in itertools.chain((value,), itertools.islice(_items_of(value), _MOST_ITEMS)):
        if type(item) in _PLAIN:
            yield item
        elif issubclass(type(item), torch.nn.Module):
            with contextlib.suppress(Exception):  # it may not be ready to be looked at, or elsewhere
                yield from list(item.parameters())


def _items_of(value: Any) -> Iterator[Any]:
    kind = type(value)
    if issubclass(kind, dict):
        return iter(list(dict.values(value)))
    if issubclass(kind, list):
        return list.__iter__(value)
    if issubclass(kind, tuple):
        return tuple.__iter__(value)
    return iter(list(object.__getattribute__(value, "__dict__").values()) if kind.__dictoffset__ else ())


_lock = threading.Lock()  # guards is_done and _waiters of everything here; held for a moment only
_SLICE_S = 0.2
_LOOK_S = 1.0  # how often a value that is used is looked at for its leaves, at most


class _Awaited(msgspec.Struct, eq=False, kw_only=True):
    """Something that is done at some time, once, with an error or without.

    Attributes:
        num_local: References to it that this worker's own code has, or is about to get; changed under the decisions' lock.
    """

    num_local: int = 1
    is_done: bool = False
    error: Callable[[], Exception] | None = None  # makes one for everybody who is told
    call: PendingCall | None = None  # the one that makes the value, while it is under way
    keeps: Any = None  # what must live until that call has ended
    _waiters: list[Callable[[], None]] | None = None

    def when_done(self, callback: Callable[[], None]) -> None:
        """Calls back when it is done; at once if it is."""
        with _lock:
            if not self.is_done:
                if self._waiters is None:
                    self._waiters = []
                self._waiters.append(callback)
                return
        callback()

    def wait(self, deadline: float, what: str, worker: str) -> None:
        """Returns when it is done.

        Raises:
            RpcTimeout: It was not, in time.
        """
        if self.is_done:
            return
        bell = threading.Lock()  # released when it is done
        bell.acquire()
        self.when_done(bell.release)
        with while_waiting():
            while not bell.acquire(timeout=max(0.0, min(_SLICE_S, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    text = f"RPC ran for more than its time: {what} (phase: run). Pass a larger timeout"
                    raise RpcTimeout(text, worker, "run")

    def _tell_waiters(self) -> None:
        """It is done, and nobody can come to wait any more."""
        with _lock:
            waiters, self._waiters = self._waiters, None
        for callback in waiters or ():
            callback()


class Owned(_Awaited, eq=False):
    """A value of this worker, or one that is still being made.

    Attributes:
        rref_id: Its id.
        label: What makes it, for messages.
        is_shared: Whether other workers were ever told of it.
        is_freed: Whether nobody can refer to it any more.
        leaves: What makes its leaf tensors safe to be used by several threads.
        fork_id: 0, because it is no reference to a value elsewhere.
    """

    rref_id: int
    label: str = ""
    value: Any = None
    leaves: Any = None
    _next_look: float = float("inf")
    is_shared: bool = False
    is_freed: bool = False
    fork_id: ClassVar[int] = 0

    def free(self) -> None:
        """Nobody refers to it any more."""
        self.error = functools.partial(_freed, self.rref_id)  # first: see `get`
        self.value = self.leaves = None

    def set(self, value: Any) -> bool:
        """It is made; False if it had an outcome already."""
        if may_have_leaves(value):
            self._look_at(value)
        with _lock:
            if self.is_done:
                return False
            self.value, self.is_done = value, True
        if self._waiters is not None:
            self._tell_waiters()
        return True

    def fail(self, error: Callable[[], Exception]) -> bool:
        """It will never be made; False if it had an outcome already."""
        with _lock:
            if self.is_done:
                return False
            self.error, self.is_done = error, True
        if self._waiters is not None:
            self._tell_waiters()
        return True

    def get(self) -> Any:
        """The value, once it is done.

        Raises:
            Exception: What went wrong when it was made.
        """
        value = self.value
        if self.error is not None:
            raise self.error()
        if time.monotonic() >= self._next_look:
            self._look_at(value)
        return value

    def _look_at(self, value: Any) -> None:
        """Its leaves may be others than before: a module gets other parameters, a tensor begins to require a gradient."""
        self.leaves = keep_leaves(value)
        self._next_look = time.monotonic() + _LOOK_S


class UserFork(_Awaited, eq=False):
    """A reference that this worker has to a value elsewhere. It is done when the owner has confirmed it, or it is broken.

    Attributes:
        rref_id: Of the value.
        fork_id: Of this reference.
        owner: Who has the value.
        owner_life: The owner by rank and incarnation.
        phase: Where it is.
        is_first: Whether the value was made for it.
        type_: The value's type, once it was asked for.
        early: The value, if it came with the answer to that call.
        is_used: Whether the value may have changed since: the reference was passed on, or a method called.
        is_shared: True, because its owner knows of it.
    """

    rref_id: int
    fork_id: int
    owner: WorkerInfo
    owner_life: Worker
    is_first: bool = False
    is_used: bool = True
    phase: ForkPhase = ForkPhase.PENDING
    type_: Any = None
    early: Any = None
    is_shared: ClassVar[bool] = True

    def use(self) -> Any:
        """From now on the value may change; returns what came with the answer to the creation, to one caller only."""
        with _lock:
            early, self.early, self.is_used = self.early, None, True
        return early

    def confirm(self) -> None:
        """The owner knows of it."""
        with _lock:
            if self.is_done:
                return
            self.phase, self.is_done = ForkPhase.CONFIRMED, True
        if self._waiters is not None:
            self._tell_waiters()

    def end(self, error: Callable[[], Exception]) -> None:
        """It leads nowhere any more."""
        with _lock:
            if self.phase is ForkPhase.BROKEN:
                return
            self.error, self.phase, self.early, self.is_done = error, ForkPhase.BROKEN, None, True
        if self._waiters is not None:
            self._tell_waiters()

    def closed(self) -> UserFork:
        """What a reference has that was closed."""
        error, broken = deleted(self.rref_id), ForkPhase.BROKEN
        return UserFork(
            self.rref_id, self.fork_id, self.owner, self.owner_life, phase=broken, error=error, is_done=True
        )

    def check(self) -> None:
        """
        Raises:
            OwnerLost: The owner is gone.
            RRefError: It was deleted, or its value was never made.
            Exception: What went wrong when the value was to be made.
        """
        if self.error is not None:
            raise self.error()


def _freed(rref_id: int) -> RRefError:
    return RRefError(f"the value of reference {describe(rref_id)} was freed: nobody referred to it any more")


def describe(rref_id: int) -> str:
    """What to call a reference in messages: the rank that made it, and its number there."""
    return f"{creator_of(rref_id)}:{rref_id & MAX_COUNTER}"


def deleted(rref_id: int) -> Callable[[], Exception]:
    """Makes the error of a reference that this worker has deleted."""
    text = f"reference {describe(rref_id)} was deleted on this worker (by close or shutdown)"
    return lambda: RRefError(f"{text}. Cannot call to_here() on it after deletion.")
