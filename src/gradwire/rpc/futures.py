"""Futures of calls.

`CallFuture` is a `torch.futures.Future`, so `then`, `add_done_callback` and `torch.futures.wait_all` work. Its `wait` does
more: the waiting thread reads its reply itself, a waiting service thread releases its slot, and Ctrl-C works. Coroutines can
await it, and `as_concurrent` converts it for code that takes futures of `concurrent.futures`.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import threading
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch

from gradwire import _interrupts
from gradwire._torch import TorchFuture
from gradwire.errors import ConfigurationError, RpcError, WaitTimeout
from gradwire.rpc.connection import while_waiting
from gradwire.rpc.pending_calls import PendingCall
from gradwire.wire.devices import record_use

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from concurrent.futures import Future as ConcurrentFuture

    from gradwire.rpc.client import Client

T = TypeVar("T")
S = TypeVar("S")

_NO_DEVICES: list[torch.device] = []


def copies_of(error: Exception) -> Callable[[], Exception]:
    """Return a function that makes copies of this error, one for each thread that raises it.

    A raised error refers to all frames it passed through and to their variables. If one of these, such as a future, kept
    the error, all of them would stay alive for ever.
    """

    def make() -> Exception:
        try:
            made = copy.copy(error)
        except Exception:  # an exception class that cannot be copied
            return error
        made.__cause__, made.__traceback__ = error.__cause__, error.__traceback__
        return made if type(made) is type(error) else error

    return make


class InterruptibleFuture(torch.futures.Future, Generic[T]):  # type: ignore[type-arg]
    """A future whose `wait` can be interrupted by signals."""

    has_callbacks = False

    def wait(self, timeout: float | None = None) -> T:
        """Block until the future is completed and return its value.

        Args:
            timeout: Seconds to wait; None waits until the future is completed.

        Raises:
            WaitTimeout: The future was not completed within `timeout`. It can be waited for again.
            ConfigurationError: The timeout is negative or not a number.
            Exception: The error that the future was completed with.
        """
        deadline = _deadline_of(timeout)
        if not self.done():
            ready = threading.Lock()  # released by the thread that completes the future
            ready.acquire()
            TorchFuture.add_done_callback(self, lambda _: ready.release())
            with while_waiting():
                left_s = deadline - time.monotonic()
                _interrupts.acquire(
                    ready, -1 if left_s == float("inf") else max(0.0, min(left_s, threading.TIMEOUT_MAX))
                )
            if not self.done():
                raise WaitTimeout(
                    f"no result after waiting for {timeout:g} s; the operation is still running: wait again"
                )
        return cast(T, TorchFuture.wait(self))

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in a coroutine without blocking its event loop: ``await rpc_async(...)``.

        Cancelling the coroutine while it waits, as `asyncio.wait_for` does, cancels the call; `asyncio.shield` prevents
        that.

        Raises:
            Exception: The error that the future was completed with.
        """
        if not self.done():
            import asyncio  # a program that awaits has loaded it

            loop = asyncio.get_running_loop()
            arrival: asyncio.Future[None] = loop.create_future()
            self.has_callbacks = True
            TorchFuture.add_done_callback(self, lambda _: _wake(loop, arrival))
            try:
                yield from arrival
            except asyncio.CancelledError:
                self._give_up()
                raise
        return cast(T, self.value())

    def as_concurrent(self) -> ConcurrentFuture[T]:
        """Return a `concurrent.futures.Future` for the same result.

        Use it with `concurrent.futures.wait` and `as_completed`, `asyncio.wrap_future` and other code that takes such
        futures. Cancelling it cancels the call.
        """
        from concurrent.futures import Future, InvalidStateError

        made: Future[T] = Future()

        def on_done(_: Any) -> None:
            with contextlib.suppress(InvalidStateError):  # it was cancelled
                try:
                    value = cast(T, TorchFuture.wait(self))
                except Exception as error:
                    made.set_exception(_without_this_frame(error))
                else:
                    made.set_result(value)

        def on_ended(_: Any) -> None:
            if made.cancelled():
                made.set_running_or_notify_cancel()  # from now on `concurrent.futures.wait` counts it as done
                self._give_up()

        made.add_done_callback(on_ended)
        self.has_callbacks = True
        TorchFuture.add_done_callback(self, on_done)
        return made

    def _give_up(self) -> None:
        """Cancel the operation that produces the result. Must not block."""

    def set_exception(self, result: Any) -> None:
        """Complete the future with an error; each thread that waits for it raises its own copy.

        Raises:
            TypeError: `result` is not an exception.
        """
        if not isinstance(result, Exception):
            raise TypeError(f"set_exception() takes an exception, not {result!r}")
        make = copies_of(result)

        def raise_error(_: Any) -> None:
            raise make()

        self._set_unwrap_func(raise_error)
        self.set_result(result)

    def then(self, callback: Callable[[Any], S]) -> InterruptibleFuture[S]:
        """Return a future for the result of `callback(self)`, which runs when this future is completed.

        An exception raised by the callback becomes the error of the new future.

        Raises:
            TypeError: `callback` is not callable.
        """
        if not callable(callback):
            raise TypeError(f"then(): incompatible function arguments. It takes a callable, not {callback!r}")
        self.has_callbacks = True
        derived: InterruptibleFuture[S] = InterruptibleFuture()
        call_back = _in_these_surroundings(callback)

        def run(_: Any) -> None:
            try:
                value = call_back(self)
            except Exception as error:
                derived.set_exception(_without_this_frame(error))
            except BaseException as error:  # such as SystemExit: no thread must be left waiting
                derived.set_exception(RpcError(f"a callback raised {type(error).__name__}: {error}"))
            else:
                derived.set_result(value)

        super().add_done_callback(run)
        return derived

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Run `callback(self)` when the future is completed."""
        self.has_callbacks = True
        call_back = _in_these_surroundings(callback)
        super().add_done_callback(lambda _: call_back(self))


def _deadline_of(timeout: float | None) -> float:
    if timeout is None:
        return float("inf")
    if not timeout >= 0:
        raise ConfigurationError(
            f"the timeout of wait() must be None or a number of seconds, 0 or more, not {timeout!r}"
        )
    return time.monotonic() + timeout


def _wake(loop: AbstractEventLoop, arrival: Any) -> None:
    def arrive() -> None:
        if not arrival.done():  # the coroutine may have been cancelled
            arrival.set_result(None)

    with contextlib.suppress(RuntimeError):  # the loop was closed, so no coroutine is waiting
        loop.call_soon_threadsafe(arrive)


def _without_this_frame(error: Exception) -> Exception:
    """Remove the caller's frame from the traceback, because it refers to the future that will hold the error."""
    return error.with_traceback(error.__traceback__.tb_next if error.__traceback__ is not None else None)


def _in_these_surroundings(callback: Callable[[Any], S]) -> Callable[[Any], S]:
    """Wrap a callback so that it runs with the context variables and grad mode of the code that adds it.

    Callbacks run in the thread that reads the reply, which may be waiting for another call under `torch.no_grad`.
    """
    surroundings, is_grad_enabled = contextvars.copy_context(), torch.is_grad_enabled()

    @_interrupts.interruptible
    def run(future: Any) -> S:
        with torch.set_grad_enabled(is_grad_enabled):
            return surroundings.run(callback, future)

    return run


class CallFuture(InterruptibleFuture[T]):
    """The result of a call that may still be in progress.

    Args:
        client: The client that makes the call.

    Attributes:
        call: The call, set just before it is sent.
    """

    def __init__(self, client: Client) -> None:
        TorchFuture.__init__(self, _NO_DEVICES)  # same effect as torch's constructor in half the time
        self._client = client
        self.call: PendingCall | None = None
        self.keeps: Any = None  # an object that must live until the call has completed

    def wait(self, timeout: float | None = None) -> T:
        """Block until the call has completed and return its result.

        Args:
            timeout: Seconds to wait; None waits until the call has completed. It does not limit the call itself, whose
                deadline is the `timeout` it was made with.

        Raises:
            WaitTimeout: The call has not completed within `timeout`. It can be waited for again, or cancelled.
            RpcTimeout: The call's deadline passed.
            WorkerLost: The worker died.
            CallCancelled: `cancel` was called.
            ConfigurationError: The timeout is negative or not a number.
            Exception: The function's exception, with its own type if that is known here.
        """
        call = self.call
        if call is not None and not (call.is_done or self.done()):
            if timeout is None:
                self._client.wait(call)
            else:
                self._client.wait(call, _deadline_of(timeout))
                if not self.done():
                    raise WaitTimeout(
                        f"worker {call.worker} has not answered the call to {call.function} within {timeout:g} s of "
                        "waiting. The call is still running: wait again, or cancel it with cancel()"
                    )
        value = TorchFuture.wait(self)
        if call is not None and call.on_device:
            record_use(call.on_device)
        return cast(T, value)

    def value(self) -> T:
        """Return the result of a call that has completed; callbacks use it.

        Raises:
            Exception: The error that the call ended with.
        """
        if self.call is not None and self.call.on_device:
            record_use(self.call.on_device)
        return cast(T, TorchFuture.value(self))

    def cancel(self) -> bool:
        """Cancel the call: it ends with `CallCancelled` here, and the callee is told to drop it.

        Returns:
            False if the call had already completed.
        """
        return self.call is not None and self._client.cancel(self.call)

    def _give_up(self) -> None:
        if self.call is not None:
            self._client.cancel_soon(self.call)
