"""torch's legacy profiler across workers: a call made inside a profile is in it, with what the callee did for it.

    caller, inside ``with profile()``                    callee
    event "rpc_async#f(a -> b)" begins
    call of run_profiled(ticket, f, args)  ------------>  runs f inside a profile, keeps its events under the ticket
    event ends                             <------------  value
    take_events(ticket)                    ------------>  events, renamed to "rpc_async#f(a -> b)#remote_op: ..."
    the future of the call is completed

The events join the profile when it ends. Calls of the callee are profiled in the same way, so their events come along.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import profiler_legacy

from gradwire import rpc
from gradwire.errors import RpcTimeout, WorkerLost
from gradwire.rpc.functions import is_async_execution
from gradwire.rpc.futures import InterruptibleFuture
from gradwire.rpc.peers import To

REMOTE_OP = "#remote_op: "
_MAX_KEPT = 1000
_OPTIONS = ("record_shapes", "profile_memory", "with_flops")

_make_event: Any = torch.autograd.profiler.record_function
_make_profile: Any = profiler_legacy.profile
_enter: Any = profiler_legacy.profile.__enter__
_exit: Any = profiler_legacy.profile.__exit__
_numbers = itertools.count()
_kept: OrderedDict[str, list[Any]] = OrderedDict()  # events that callers have not asked for yet, by ticket
_lock = threading.Lock()  # guards _kept


@dataclass(slots=True)
class _Profile:
    """A profile that is under way in this thread."""

    options: dict[str, bool]
    remote_events: list[Any] = field(default_factory=list)


class _Local(threading.local):
    def __init__(self) -> None:
        self.profiles: list[_Profile] = []


_local = _Local()


def is_profiling() -> bool:
    """Whether the legacy profiler records what this thread does."""
    return bool(_local.profiles) and torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


def enter(profile: Any) -> Any:
    """`profile.__enter__`, remembering the profile."""
    entered = _enter(profile)
    if profile.enabled:
        _local.profiles.append(_Profile({name: getattr(profile, name) for name in _OPTIONS}))
    return entered


def leave(profile: Any, *exception: Any) -> Any:
    """`profile.__exit__`, adding what came from other workers."""
    remote_events = _local.profiles.pop().remote_events if profile.enabled and _local.profiles else []
    result = _exit(profile, *exception)
    if remote_events:
        profile.function_events.extend(remote_events)
    return result


def make_key(mode: str, function: Callable[..., Any], to: To) -> str:
    """The name of a call's event."""
    agent = rpc.current_agent()
    name = torch.jit._builtins._find_builtin(function) or getattr(function, "__qualname__", str(function))  # type: ignore[no-untyped-call]
    return f"rpc_{mode}#{name}({agent.info.name} -> {agent.worker_info(to).name})"


def make_event(mode: str, function: Callable[..., Any], to: To) -> contextlib.AbstractContextManager[Any]:
    """An event for the profile, if there is one."""
    if not is_profiling():
        return contextlib.nullcontext()
    event: contextlib.AbstractContextManager[Any] = _make_event(make_key(mode, function, to))
    return event


class ProfiledCall:
    """One call inside a profile; its event begins here.

    Args:
        mode: ``sync``, ``async`` or ``remote``.
        to: Whom to call.
        function: What is called.
    """

    def __init__(self, mode: str, to: To, function: Callable[..., Any]) -> None:
        self._to = to
        self._function = function
        self._profile = _local.profiles[-1]
        self._key = make_key(mode, function, to)
        self._ticket = f"{os.getpid()}-{next(_numbers)}-{rpc.current_agent().info.name}"
        self._event = _make_event(self._key)
        self._event.__enter__()

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any] | None) -> tuple[Any, ...]:
        """What `run_profiled` is called with."""
        return self._ticket, self._profile.options, self._function, tuple(args), kwargs or {}

    def follow(self, answer: torch.futures.Future[Any]) -> InterruptibleFuture[Any]:
        """A future with the same outcome, completed when the events are here, too."""
        outcome: InterruptibleFuture[Any] = InterruptibleFuture()

        def finish(_: Any = None) -> None:
            try:
                outcome.set_result(torch._C.Future.wait(answer))
            except Exception as error:
                outcome.set_exception(error)

        def on_events(events: torch.futures.Future[list[Any]]) -> None:
            try:
                self._profile.remote_events += [self._mark(event) for event in torch._C.Future.wait(events)]
            finally:
                finish()

        def on_ended(_: Any) -> None:
            try:
                rpc.rpc_async(self._to, take_events, (self._ticket,)).add_done_callback(on_events)
            except Exception:  # the worker is gone, as the answer says
                finish()

        ended = self._event._call_end_callbacks_on_future(answer)
        torch._C.Future.add_done_callback(ended, on_ended)
        return outcome

    def _mark(self, event: Any) -> Any:
        event.name = f"{self._key}{REMOTE_OP}{event.name}"
        event.is_remote = True
        return event


def run_profiled(
    ticket: str, options: dict[str, bool], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """On the callee: the function's value; its events are kept for `take_events`."""
    with _make_profile(**options) as profile:
        value = function(*args, **kwargs)
        if is_async_execution(function):
            value = value.wait()
    with _lock:
        _kept[ticket] = list(profile.function_events or ())
        while len(_kept) > _MAX_KEPT:  # their callers are gone
            _kept.popitem(last=False)
    return value


def take_events(ticket: str) -> list[Any]:
    """On the callee: the events of a call, once."""
    with _lock:
        return _kept.pop(ticket, [])


Function = Callable[..., Any]


def rpc_sync(
    to: To,
    func: Function,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = rpc.UNSET_RPC_TIMEOUT,
) -> Any:
    """As `gradwire.rpc.rpc_sync`.

    Raises:
        TypeError: The function cannot be called.
        RpcError: The call failed.
        Exception: What the function raised, as its own type.
    """
    _check(func)
    func = by_name(func)
    if is_profiling():
        return _call_profiled("sync", to, func, args, kwargs, timeout).wait()
    return rpc.rpc_sync(to, func, args, kwargs, timeout)


def rpc_async(
    to: To,
    func: Function,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = rpc.UNSET_RPC_TIMEOUT,
) -> torch.futures.Future[Any]:
    """As `gradwire.rpc.rpc_async`.

    Raises:
        TypeError: The function cannot be called.
        CannotSend: An argument cannot travel.
        UnknownWorker: There is no such worker.
    """
    _check(func)
    func = by_name(func)
    if is_profiling():
        return _call_profiled("async", to, func, args, kwargs, timeout)
    try:
        return rpc.rpc_async(to, func, args, kwargs, timeout)
    except (RpcTimeout, WorkerLost) as error:  # with torch, whoever waits is told
        failed: InterruptibleFuture[Any] = InterruptibleFuture()
        failed.set_exception(error)
        return failed


def _check(function: object) -> None:
    if not callable(function):
        raise TypeError(f"function should be callable, unlike {function!r}")


def by_name(function: Function) -> Function:
    """The function itself; for one of TorchScript, which does not travel, another that finds it there by its name."""
    if not isinstance(function, torch.jit.ScriptFunction):
        return function
    return functools.partial(_run_script, torch._jit_internal._qualified_name(function))


def _run_script(name: str, *args: Any, **kwargs: Any) -> Any:
    module, _, attribute = name.removeprefix("__torch__.").rpartition(".")
    return getattr(importlib.import_module(module), attribute)(*args, **kwargs)


def _call_profiled(
    mode: str,
    to: To,
    function: Function,
    args: Sequence[Any] | None,
    kwargs: dict[str, Any] | None,
    timeout: float,
) -> torch.futures.Future[Any]:
    call = ProfiledCall(mode, to, function)
    return call.follow(rpc.rpc_async(to, run_profiled, call.arguments(args or (), kwargs), timeout=timeout))
