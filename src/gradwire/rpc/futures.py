"""Futures that know whom they wait for.

`CallFuture` is a `torch.futures.Future`, so `then`, `add_done_callback` and `torch.futures.wait_all` work. Its own `wait`
does more: the waiting thread reads its answer itself, a service thread that waits gives its slot back, and Ctrl-C works.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import torch

from gradwire.errors import RpcError
from gradwire.rpc.incoming import while_waiting

T = TypeVar("T")
S = TypeVar("S")

_SLICE_S = 0.2


class InterruptibleFuture(torch.futures.Future, Generic[T]):  # type: ignore[type-arg]
    """A future whose `wait` lets signals through."""

    has_callbacks = False

    def wait(self) -> T:
        """Blocks until the value is there.

        Raises:
            Exception: Whatever the future was completed with.
        """
        if not self.done():
            ready = threading.Lock()  # released by whoever completes the future
            ready.acquire()
            super().add_done_callback(lambda _: ready.release())
            with while_waiting():
                while not (ready.acquire(timeout=_SLICE_S) or self.done()):  # Ctrl-C may have cut the callback off
                    pass
        return cast(T, super().wait())

    def then(self, callback: Callable[[Any], S]) -> InterruptibleFuture[S]:
        """A future for `callback(self)`, which runs when this one is completed.

        The callback gets this future, completed; what it raises becomes the new future's error.
        """
        self.has_callbacks = True
        derived: InterruptibleFuture[S] = InterruptibleFuture()

        def run(_: Any) -> None:
            try:
                value = callback(self)
            except Exception as error:
                derived.set_exception(error)
            except BaseException as error:  # SystemExit, say: it must not leave anybody waiting
                derived.set_exception(RpcError(f"a callback ended with {type(error).__name__}: {error}"))
            else:
                derived.set_result(value)

        super().add_done_callback(run)
        return derived

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Runs `callback(self)` when the future is completed."""
        self.has_callbacks = True
        super().add_done_callback(lambda _: callback(self))


class CallFuture(InterruptibleFuture[T]):
    """The result of a call that may still be under way."""

    def __init__(self, wait: Callable[[], None], cancel: Callable[[], bool]) -> None:
        super().__init__()
        self._wait = wait
        self._cancel = cancel

    def wait(self) -> T:
        """Blocks until the result is there.

        Raises:
            RpcTimeout: The call's deadline passed.
            WorkerLost: The worker died.
            CallCancelled: `cancel` was called.
            Exception: Whatever the function raised, as its own type where that is known here.
        """
        if not self.done():
            self._wait()
        return cast(T, torch.futures.Future.wait(self))

    def cancel(self) -> bool:
        """Gives the call up: it ends with `CallCancelled` here, and the callee is told to drop it.

        Returns:
            False if it had ended already.
        """
        return self._cancel()
