"""Functions that the tests call on workers."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch

from gradwire import rpc
from gradwire.rpc import Agent

agents: dict[str, Agent] = {}
"""The agents that run in this process, for functions that make calls of their own."""

seen: list[Any] = []
"""What `note` was called with."""

gate = threading.Event()
entered = threading.Semaphore(0)


def reset() -> None:
    """Forgets what an earlier test left."""
    seen.clear()
    gate.clear()
    agents.clear()
    while entered.acquire(blocking=False):
        pass


def echo(value: Any = None) -> Any:
    return value


def keywords(*args: Any, **kwargs: Any) -> Any:
    return list(args), kwargs


def pid() -> int:
    return os.getpid()


def note(value: Any) -> None:
    seen.append(value)


def what_was_seen() -> list[Any]:
    return list(seen)


def total(value: torch.Tensor) -> float:
    return float(value.double().sum())


def wait_gate(timeout_s: float = 30.0) -> bool:
    """Blocks in a way that the worker cannot see."""
    entered.release()
    return gate.wait(timeout_s)


def open_gate() -> None:
    gate.set()


def close_gate() -> None:
    gate.clear()


def hold_gil(seconds: float) -> int:
    """Never leaves Python code."""
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        count += 1
    return count


def spin_until_gate() -> bool:
    """Never leaves Python code until the gate opens."""
    end = time.monotonic() + 60.0
    while not gate.is_set() and time.monotonic() < end:
        pass
    return gate.is_set()


def fail(kind: type[BaseException], *args: Any) -> None:
    raise kind(*args)


# -- nested calls, between agents of one process ------------------------------------------------------------------


def bounce(here: str, there: str, depth: int) -> int:
    """Calls back and forth."""
    return 0 if depth == 0 else 1 + agents[here].call(there, bounce, (there, here, depth - 1))


def bounce_future(here: str, there: str, depth: int) -> int:
    return 0 if depth == 0 else 1 + agents[here].submit(there, bounce_future, (there, here, depth - 1)).wait()


def bounce_wait_all(here: str, there: str, depth: int) -> int:
    if depth == 0:
        return 0
    return 1 + torch.futures.wait_all([agents[here].submit(there, bounce_wait_all, (there, here, depth - 1))])[0]


def ring(names: list[str], position: int, depth: int) -> int:
    if depth == 0:
        return 0
    following = (position + 1) % len(names)
    return 1 + agents[names[position]].call(names[following], ring, (names, following, depth - 1))


def forward(here: str, there: str, function: Any, *args: Any) -> Any:
    """Calls a function on a third worker."""
    return agents[here].call(there, function, args)


# -- nested calls, between processes ---------------------------------------------------------------------------------


def pass_on(to: str, function: Any, *args: Any) -> Any:
    """Calls a function on a third worker."""
    return rpc.rpc_sync(to, function, args=args)


def pass_along(way: list[str], function: Any, *args: Any) -> Any:
    """Calls a function at the end of a way."""
    if not way:
        return function(*args)
    return rpc.rpc_sync(way[0], pass_along, args=(way[1:], function, *args))


# -- answers that come later -----------------------------------------------------------------------------------------


@rpc.functions.async_execution
def answer_later(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    threading.Thread(target=lambda: future.set_result(value), name="answers-later").start()
    return future


@rpc.functions.async_execution
def add_there(here: str, there: str, left: torch.Tensor, right: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    return agents[here].submit(there, torch.add, (left, right)).then(lambda done: done.wait() + 1)


@rpc.functions.async_execution
def raise_at_once() -> torch.futures.Future[Any]:
    raise ValueError("raised before there was a future")


@rpc.functions.async_execution
def fail_later() -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_exception(KeyError("raised by the future"))
    return future


@rpc.functions.async_execution
def no_future() -> int:
    return 3


# -- exceptions ------------------------------------------------------------------------------------------------------


class NeedsArguments(Exception):
    def __init__(self, first: int, second: str) -> None:
        super().__init__(f"{first} and {second}")
        self.first, self.second = first, second


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class CarriesLock(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()
        self.kept = 7


class CannotBeShown(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


def raise_needs_arguments() -> None:
    raise NeedsArguments(4, "five")


def raise_keyword_only() -> None:
    raise KeywordOnly(code=9)


def raise_carries_lock() -> None:
    raise CarriesLock("locked")


def raise_cannot_be_shown() -> None:
    raise CannotBeShown


def raise_long(num_bytes: int) -> None:
    raise ValueError("x" * num_bytes)


def raise_deep(depth: int) -> None:
    if depth == 0:
        raise ValueError("bottom")
    raise_deep(depth - 1)


def raise_local_class() -> None:
    class Unknown(Exception):
        pass

    raise Unknown("nobody knows this class")


def make_lock() -> Any:
    return threading.Lock()


# -- with trust="data" ---------------------------------------------------------------------------------------------


@rpc.expose
def exposed_add(left: Any, right: Any) -> Any:
    return left + right


@rpc.expose(name="double")
def exposed_double(value: Any) -> Any:
    return value * 2


class Plain:
    """Not plain data."""

    def method(self, value: int) -> int:
        return value + 1


exposed_gate = "wait at the gate"


@rpc.expose(name=exposed_gate)
def exposed_wait_gate() -> bool:
    return wait_gate()
