"""What a reference refers to: a value that is here, or a fork of one that is elsewhere."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gradwire.errors import RpcTimeout, RRefError
from gradwire.rpc._calls import PendingCall
from gradwire.rpc._ids import MAX_COUNTER, creator_of
from gradwire.rpc.incoming import while_waiting
from gradwire.rref._actions import Worker
from gradwire.rref._ownership import ForkPhase
from gradwire.types import WorkerInfo

if TYPE_CHECKING:
    from gradwire.rref.api import RRef

_lock = threading.Lock()  # guards is_done and _waiters of everything here; held for a moment only
_SLICE_S = 0.2


class _Awaited:
    """Something that is done at some time, once, with an error or without."""

    __slots__ = ("_waiters", "error", "is_done", "rref")

    def __init__(self) -> None:
        self.is_done = False
        self.error: Callable[[], Exception] | None = None  # makes one for everybody who is told
        self._waiters: list[Callable[[], None]] | None = None
        self.rref: weakref.ref[RRef[Any]] | None = None  # what this worker's own code has of it, if it has anything

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

    def _finish(self, change: Callable[[], None]) -> bool:
        with _lock:
            if self.is_done:
                return False
            change()
            self.is_done = True
            waiters, self._waiters = self._waiters, None
        for callback in waiters or ():
            callback()
        return True


class Owned(_Awaited):
    """A value of this worker, or one that is still being made.

    Attributes:
        rref_id: Its id.
        label: What makes it, for messages.
        num_local: References to it that this worker's own code has, or is about to get; changed under the decisions' lock.
        is_shared: Whether other workers were ever told of it.
        is_freed: Whether nobody can refer to it any more.
    """

    __slots__ = ("is_freed", "is_shared", "label", "num_local", "rref_id", "value")

    def __init__(self, rref_id: int, label: str = "") -> None:
        super().__init__()
        self.rref_id = rref_id
        self.label = label
        self.value: Any = None
        self.num_local = 1
        self.is_shared = self.is_freed = False

    def free(self) -> None:
        """Nobody refers to it any more."""
        text = f"the value of reference {describe(self.rref_id)} was freed: nobody referred to it any more"
        self.value, self.error = None, lambda: RRefError(text)

    def set(self, value: Any) -> bool:
        """It is made; False if it had an outcome already."""

        def change() -> None:
            self.value = value

        return self._finish(change)

    def fail(self, error: Callable[[], Exception]) -> bool:
        """It will never be made; False if it had an outcome already."""

        def change() -> None:
            self.error = error

        return self._finish(change)

    def get(self) -> Any:
        """The value, once it is done.

        Raises:
            Exception: What went wrong when it was made.
        """
        if self.error is not None:
            raise self.error()
        return self.value


class UserFork(_Awaited):
    """A reference that this worker has to a value elsewhere. It is done when the owner has confirmed it, or it is broken.

    Attributes:
        rref_id: Of the value.
        fork_id: Of this reference.
        owner: Who has the value.
        owner_life: The owner by rank and incarnation.
        phase: Where it is.
        is_first: Whether the value was made for it.
        type_: The value's type, once it was asked for.
        call: The one that makes the value, while it is under way.
        early: The value, if it came with the answer to that call.
        is_used: Whether the value may have changed since: the reference was passed on, or a method called.
    """

    __slots__ = ("call", "early", "fork_id", "is_first", "is_used", "owner", "owner_life", "phase", "rref_id", "type_")

    def __init__(self, rref_id: int, fork_id: int, owner: WorkerInfo, owner_life: Worker, is_first: bool) -> None:
        super().__init__()
        self.rref_id = rref_id
        self.fork_id = fork_id
        self.owner = owner
        self.owner_life = owner_life
        self.is_first = is_first
        self.phase = ForkPhase.PENDING
        self.type_: Any = None
        self.call: PendingCall | None = None
        self.early: Any = None
        self.is_used = not is_first

    def use(self) -> Any:
        """From now on the value may change; returns what came with the answer to the creation, to one caller only."""
        with _lock:
            early, self.early, self.is_used = self.early, None, True
        return early

    def confirm(self) -> bool:
        """The owner knows of it."""

        def change() -> None:
            self.phase = ForkPhase.CONFIRMED

        return self._finish(change)

    def end(self, error: Callable[[], Exception]) -> None:
        """It leads nowhere any more."""

        def change() -> None:
            self.error, self.phase, self.early = error, ForkPhase.BROKEN, None

        if not self._finish(change) and self.phase is not ForkPhase.BROKEN:
            change()

    def check(self) -> None:
        """
        Raises:
            OwnerLost: The owner is gone.
            RRefError: It was deleted, or its value was never made.
            Exception: What went wrong when the value was to be made.
        """
        if self.error is not None:
            raise self.error()


def describe(rref_id: int) -> str:
    """What to call a reference in messages: the rank that made it, and its number there."""
    return f"{creator_of(rref_id)}:{rref_id & MAX_COUNTER}"


def deleted(rref_id: int) -> Callable[[], Exception]:
    """Makes the error of a reference that this worker has deleted."""
    text = f"reference {describe(rref_id)} was deleted on this worker (by close or shutdown)"
    return lambda: RRefError(f"{text}. Cannot call to_here() on it after deletion.")
