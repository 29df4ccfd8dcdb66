"""The states behind a reference: a value of this worker (`Owned`), or a fork of a value elsewhere (`UserFork`).

Threads that use one leaf tensor at the same time can deadlock in torch 2.13 if Python alone refers to it, so the owner keeps
the leaves of its values referred to from C++ (`keep_leaves`).
"""

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

from gradwire import _interrupts
from gradwire._torch import CppList
from gradwire.errors import RpcTimeout, RRefError
from gradwire.rpc.connection import while_waiting
from gradwire.rpc.pending_calls import PendingCall
from gradwire.rref._messages import Worker
from gradwire.rref._ownership import ForkPhase
from gradwire.types import MAX_COUNTER, WorkerInfo, creator_of

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_ATOMS: Final = frozenset((bool, int, float, complex, str, bytes, type(None)))
_MAX_ITEMS: Final = 1000  # of an object or container that are looked at
_LOOK_EVERY_S: Final = 1.0  # how often a value that is used is looked at for its leaves, at most

_lock = threading.Lock()  # guards the outcome and `_waiters` of every `_Awaited`; held for a moment only


class _Awaited(msgspec.Struct, eq=False, kw_only=True):
    """An operation that completes once, with or without an error."""

    # References to it that this worker's code has, or is about to get; under the lock of `References`.
    num_local: int = 1
    is_done: bool = False
    error: Callable[[], Exception] | None = None  # makes a new one for each caller
    call: PendingCall | None = None  # the call that makes the value, while it is in progress
    keeps: Any = None  # what must live until that call has ended
    _waiters: list[Callable[[], None]] | None = None

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back when it is done, or at once if it already is."""
        with _lock:
            if not self.is_done:
                self._waiters = self._waiters or []
                self._waiters.append(callback)
                return
        callback()

    def wait(self, deadline: float, what: str, worker: str) -> None:
        """Wait until it is done, or raise `RpcTimeout` with `what` in the message."""
        if self.is_done:
            return
        done = threading.Lock()  # a signal: released when it is done
        done.acquire()
        self.when_done(done.release)
        with while_waiting():
            if not _interrupts.acquire(done, min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)):
                text = f"RPC ran for more than set timeout: {what} (phase: run)"
                raise RpcTimeout(f"{text}. Pass a larger timeout, or raise rpc_timeout", worker, "run")

    def check(self) -> None:
        """Raise the error, if any: the owner is lost, the reference was deleted, or the creating function failed."""
        if self.error is not None:
            raise self.error()

    def _notify(self) -> None:
        with _lock:
            waiters, self._waiters = self._waiters, None
        for callback in waiters or ():
            callback()


class Owned(_Awaited, eq=False):
    """A value of this worker, possibly still being created."""

    rref_id: int
    label: str = ""  # the function that makes it, for error messages
    value: Any = None
    leaves: Any = None  # keeps its leaf tensors safe to be used by several threads
    _next_look: float = float("inf")
    is_shared: bool = False  # other workers were told of it
    is_freed: bool = False  # no worker refers to it any longer
    fork_id: ClassVar[int] = 0  # it is not a reference to a value elsewhere

    def set(self, value: Any) -> None:
        if type(value) not in _ATOMS:
            self._look_at(value)
        self._finish(value, None)

    def fail(self, error: Callable[[], Exception]) -> None:
        self._finish(None, error)

    def _finish(self, value: Any, error: Callable[[], Exception] | None) -> None:
        with _lock:
            if self.is_done:  # the first outcome counts
                return
            self.value, self.error, self.is_done = value, error, True
        self._notify()

    def free(self) -> None:
        self.error = functools.partial(_freed, self.rref_id)  # first: see `get`
        self.value = self.leaves = None

    def wait_value(self, deadline: float, worker: str) -> Any:
        """Wait for the value and return it; `worker` is this worker's name."""
        what = f"the value of reference {describe(self.rref_id)} was not created on worker {worker} in time"
        self.wait(deadline, what, worker)
        return self.get()

    def get(self) -> Any:
        """Return the value, which is done, or raise the exception of the function that should have created it."""
        value = self.value
        self.check()
        if time.monotonic() >= self._next_look:
            self._look_at(value)
        return value

    def _look_at(self, value: Any) -> None:
        # Its leaves may be others than before: a module gets other parameters, a tensor begins to require a gradient.
        self.leaves = keep_leaves(value)
        self._next_look = time.monotonic() + _LOOK_EVERY_S


class UserFork(_Awaited, eq=False):
    """A reference that this worker has to a value elsewhere. It is done when the owner has confirmed it, or it is broken."""

    rref_id: int
    fork_id: int
    owner: WorkerInfo
    owner_life: Worker  # the owner by rank and incarnation
    is_first: bool = False  # a call of this worker makes the value for it
    is_used: bool = True  # the value may have changed since: the reference was passed on, or a method called
    type_: Any = None  # of the value, once it was asked for
    early: Any = None  # the value, if it came with the answer to that call
    is_shared: ClassVar[bool] = True  # the owner knows of it

    @property
    def phase(self) -> ForkPhase:
        if self.error is not None:
            return ForkPhase.BROKEN
        return ForkPhase.CONFIRMED if self.is_done else ForkPhase.PENDING

    def use(self) -> Any:
        """Mark the value as used; return, once, the copy that came with the reply to its creation."""
        with _lock:
            early, self.early, self.is_used = self.early, None, True
        return early

    def confirm(self) -> None:
        with _lock:
            self.is_done = True
        self._notify()

    def end(self, error: Callable[[], Exception]) -> None:
        with _lock:
            if self.error is not None:
                return
            self.error, self.early, self.is_done = error, None, True
        self._notify()

    def closed(self) -> UserFork:
        error = deleted(self.rref_id)
        return UserFork(self.rref_id, self.fork_id, self.owner, self.owner_life, error=error, is_done=True)


def describe(rref_id: int) -> str:
    """Return the name of a reference for error messages: the rank that created it, and its number there."""
    return f"{creator_of(rref_id)}:{rref_id & MAX_COUNTER}"


def lost_text(rref_id: int, owner: str, reason: object) -> str:
    """Return the text of an `OwnerLost`."""
    return f"reference {describe(rref_id)} to a value of worker {owner} is lost: {reason}. Create the value again"


def deleted(rref_id: int) -> Callable[[], Exception]:
    """Return a factory for the error of a reference that this worker has deleted."""
    text = f"reference {describe(rref_id)} was deleted on this worker (by close or shutdown)"
    return functools.partial(RRefError, f"{text}. Cannot call to_here() on it after deletion.")


def _freed(rref_id: int) -> RRefError:
    return RRefError(
        f"the value of reference {describe(rref_id)} was freed: no worker held a reference to it; create it again"
    )


def keep_leaves(value: Any) -> Any:
    """Return an object that refers from C++ to the leaves of a tensor, a module, or an object or container that has such.

    Objects and containers are looked at one level deep, and no further than their first thousand items.
    """
    if type(value) is torch.Tensor and not value.requires_grad:  # most are
        return None
    leaves = [leaf for leaf in _leaves_of(value) if type(leaf) in _PLAIN and leaf.requires_grad and leaf.is_leaf]
    if not leaves:
        return None
    kept = CppList(leaves)
    for leaf in leaves:
        with contextlib.suppress(RuntimeError):  # not of every layout
            leaf.view_as(leaf)  # releases the GIL: a thread that is making the accumulator has made it after this
    return kept


def _leaves_of(value: Any) -> Iterator[torch.Tensor]:
    # Types are looked at, not values: looking at a proxy or a lazy object could make it do something.
    for item in itertools.chain((value,), itertools.islice(_items_of(value), _MAX_ITEMS)):
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
