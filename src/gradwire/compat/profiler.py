"""torch's legacy profiler across workers: a profile includes calls to other workers, with the callee's events.

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
from gradwire._interrupts import interruptible
from gradwire._torch import call_when_done, end_event_with, find_builtin, is_profiler_enabled, wait_for
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
    options: dict[str, bool]
    remote_events: list[Any] = field(default_factory=list)


class _ProfilesOfThread(threading.local):
    def __init__(self) -> None:
        self.open: list[_Profile] = []


_profiles = _ProfilesOfThread()


def is_profiling() -> bool:
    return bool(_profiles.open) and is_profiler_enabled()


def enter(profile: Any) -> Any:
    """Call `profile.__enter__`, and remember the profile."""
    entered = _enter(profile)
    if profile.enabled:
        _profiles.open.append(_Profile({name: getattr(profile, name) for name in _OPTIONS}))
    return entered


def leave(profile: Any, *exception: Any) -> Any:
    """Call `profile.__exit__`, and add the events of other workers."""
    remote_events = _profiles.open.pop().remote_events if profile.enabled and _profiles.open else []
    result = _exit(profile, *exception)
    if remote_events:
        profile.function_events.extend(remote_events)
    return result


def _event_name(mode: str, function: Callable[..., Any], to: To) -> str:
    agent = rpc.current_agent()
    name = find_builtin(function) or getattr(function, "__qualname__", str(function))
    return f"rpc_{mode}#{name}({agent.info.name} -> {agent.worker_info(to).name})"


def make_event(mode: str, function: Callable[..., Any], to: To) -> contextlib.AbstractContextManager[Any]:
    if not is_profiling():
        return contextlib.nullcontext()
    event: contextlib.AbstractContextManager[Any] = _make_event(_event_name(mode, function, to))
    return event


class ProfiledCall:
    """One call inside a profile; its event begins here."""

    def __init__(self, mode: str, to: To, function: Callable[..., Any]) -> None:
        self._to = to
        self._function = function
        self._profile = _profiles.open[-1]
        self._key = _event_name(mode, function, to)
        self._ticket = f"{os.getpid()}-{next(_numbers)}-{rpc.current_agent().info.name}"
        self._event = _make_event(self._key)
        self._event.__enter__()

    def arguments(self, args: Sequence[Any] | None, kwargs: dict[str, Any] | None) -> tuple[Any, ...]:
        return self._ticket, self._profile.options, self._function, tuple(args or ()), kwargs or {}

    def follow(self, answer: torch.futures.Future[Any]) -> InterruptibleFuture[Any]:
        """Return a future with the same outcome, completed when the events are here, too."""
        outcome: InterruptibleFuture[Any] = InterruptibleFuture()

        def finish(_: Any = None) -> None:
            try:
                outcome.set_result(wait_for(answer))
            except Exception as error:
                outcome.set_exception(error)

        def on_events(events: torch.futures.Future[list[Any]]) -> None:
            try:
                self._profile.remote_events += [self._mark(event) for event in wait_for(events)]
            finally:
                finish()

        def on_ended(_: Any) -> None:
            try:
                rpc.rpc_async(self._to, take_events, (self._ticket,)).add_done_callback(on_events)
            except Exception:  # the worker is lost, and the answer carries that error
                finish()

        ended = end_event_with(self._event, answer)
        call_when_done(ended, on_ended)
        return outcome

    def _mark(self, event: Any) -> Any:
        event.name = f"{self._key}{REMOTE_OP}{event.name}"
        event.is_remote = True
        return event


@interruptible
def run_profiled(
    ticket: str, options: dict[str, bool], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the function on the callee and return its value; its events are kept for `take_events`."""
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
    """Return the events of a call from the callee, once."""
    with _lock:
        return _kept.pop(ticket, [])
