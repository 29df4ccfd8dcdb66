"""Futures that know whom they wait for.

`CallFuture` is a `torch.futures.Future`, so `then`, `add_done_callback` and `torch.futures.wait_all` work. Its own `wait`
does more: the waiting thread reads its answer itself, a service thread that waits gives its slot back, and Ctrl-C works.
Coroutines await it, and `as_concurrent` makes one for code that takes the futures of `concurrent.futures`.
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

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from concurrent.futures import Future as ConcurrentFuture

    from gradwire.rpc.client import Client

T = TypeVar("T")
S = TypeVar("S")

_NO_DEVICES: list[torch.device] = []


def copies_of(error: Exception) -> Callable[[], Exception]:
    """Return a function that makes errors like this one, one for each thread that is told.

    An error that is raised knows all frames it came through, and what lies in them. Kept by something that these frames
    know, a future say, it would keep all of that alive for ever.
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
    """A future whose `wait` lets signals through."""

    has_callbacks = False

    def wait(self, timeout: float | None = None) -> T:
        """Block until the value is there, and return it.

        Args:
            timeout: Seconds to wait; None waits until the future is completed.

        Raises:
            WaitTimeout: It is not completed within `timeout`. It may be waited for again.
            ConfigurationError: The timeout is negative or not a number.
            Exception: What the future was completed with.
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
        """Wait in a coroutine, without blocking its event loop: ``await rpc_async(...)``.

        A coroutine that is cancelled meanwhile, as by `asyncio.wait_for`, gives up the call; `asyncio.shield` prevents
        that.

        Raises:
            Exception: What the future was completed with.
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
        return cast(T, TorchFuture.wait(self))

    def as_concurrent(self) -> ConcurrentFuture[T]:
        """Return a `concurrent.futures.Future` of the same result.

        For `concurrent.futures.wait` and `as_completed`, `asyncio.wrap_future` and everything else that takes such
        futures. Cancelling it gives up the call.
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
                made.set_running_or_notify_cancel()  # `concurrent.futures.wait` counts it as done from now on
                self._give_up()

        made.add_done_callback(on_ended)
        self.has_callbacks = True
        TorchFuture.add_done_callback(self, on_done)
        return made

    def _give_up(self) -> None:
        """Give up what the result comes from. Must not wait."""

    def set_exception(self, result: Any) -> None:
        """Complete the future with an error; each thread that asks for its value gets a copy of its own."""
        if not isinstance(result, Exception):
            raise TypeError(f"set_exception() takes an exception, not {result!r}")
        make = copies_of(result)

        def raise_error(_: Any) -> None:
            raise make()

        self._set_unwrap_func(raise_error)
        self.set_result(result)

    def then(self, callback: Callable[[Any], S]) -> InterruptibleFuture[S]:
        """Return a future for `callback(self)`, which runs when this one is completed.

        The callback gets this future, completed; what it raises becomes the new future's error.

        Raises:
            TypeError: It cannot be called.
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
            except BaseException as error:  # SystemExit, say: no thread must be left waiting
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
        raise ConfigurationError(f"wait() takes a number of seconds or None, not {timeout!r}")
    return time.monotonic() + timeout


def _wake(loop: AbstractEventLoop, arrival: Any) -> None:
    def arrive() -> None:
        if not arrival.done():  # the coroutine may have been cancelled
            arrival.set_result(None)

    with contextlib.suppress(RuntimeError):  # the loop was closed: no coroutine waits any more
        loop.call_soon_threadsafe(arrive)


def _without_this_frame(error: Exception) -> Exception:
    """Remove the frame of the caller, which knows the future that is to keep the error."""
    return error.with_traceback(error.__traceback__.tb_next if error.__traceback__ is not None else None)


def _in_these_surroundings(callback: Callable[[Any], S]) -> Callable[[Any], S]:
    """Return the callback, to be run with the context variables and the grad mode of the code that adds it.

    The thread that reads the answer runs the callbacks: one that waits for another call, maybe, under `torch.no_grad`.
    """
    surroundings, is_grad_enabled = contextvars.copy_context(), torch.is_grad_enabled()

    @_interrupts.interruptible
    def run(future: Any) -> S:
        with torch.set_grad_enabled(is_grad_enabled):
            return surroundings.run(callback, future)

    return run


class CallFuture(InterruptibleFuture[T]):
    """The result of a call that may still be under way.

    Args:
        client: Makes the call.

    Attributes:
        call: The call, from the moment before it is sent.
    """

    def __init__(self, client: Client) -> None:
        TorchFuture.__init__(self, _NO_DEVICES)  # what torch's own constructor comes to, in half the time
        self._client = client
        self.call: PendingCall | None = None
        self.keeps: Any = None  # what must live until the call has ended

    def wait(self, timeout: float | None = None) -> T:
        """Block until the result is there, and return it.

        Args:
            timeout: Seconds to wait; None waits until the call has ended. The call goes on when they are over: its own
                deadline is the `timeout` that it was made with.

        Raises:
            WaitTimeout: The call has not ended within `timeout`. It may be waited for again, or cancelled.
            RpcTimeout: The call's deadline passed.
            WorkerLost: The worker died.
            CallCancelled: `cancel` was called.
            ConfigurationError: The timeout is negative or not a number.
            Exception: What the function raised, as its own type where that is known here.
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
        return cast(T, TorchFuture.wait(self))

    def cancel(self) -> bool:
        """Give the call up: it ends with `CallCancelled` here, and the callee is told to drop it.

        Returns:
            False if it had ended already.
        """
        return self.call is not None and self._client.cancel(self.call)

    def _give_up(self) -> None:
        if self.call is not None:
            self._client.cancel_soon(self.call)
