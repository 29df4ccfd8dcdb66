"""Several workers in one process, for tests that need no second process, and waiting for conditions."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from gradwire.config import WorkerConfig
from gradwire.rpc.agent import Agent
from gradwire.rpc.peers import StaticDirectory
from gradwire.runtime import start_worker
from gradwire.types import WorkerInfo

_FIRST_NAMES = "abcdefghijklmnopqrstuvwxyz"
_PAUSE_S = 0.005


@contextlib.contextmanager
def local_agents(num_workers: int, transport: str = "unix", **config: Any) -> Iterator[list[Agent]]:
    """Start workers ``a``, ``b``, ``c``... of one cluster in this process; close them at the end.

    Args:
        num_workers: Number of workers; ranks start at 0.
        transport: ``unix``, ``inproc`` or ``tcp`` (on loopback).
        **config: Fields of `gradwire.config.WorkerConfig`.

    Raises:
        ConfigurationError: An option is wrong; nothing is left running.
    """
    settings = WorkerConfig(**{"transports": (transport,), "token": secrets.token_bytes(16), **config})
    directory = StaticDirectory()
    with contextlib.ExitStack() as stack:
        agents = []
        for rank in range(num_workers):
            name = _FIRST_NAMES[rank] if rank < len(_FIRST_NAMES) else f"worker{rank}"
            agents.append(start_worker(WorkerInfo(name, rank), settings, directory))
            stack.callback(agents[-1].close)
        yield agents


def wait_until(condition: Callable[[], object], timeout_s: float = 10.0, what: str = "the condition") -> None:
    """Return as soon as `condition()` is true.

    Args:
        condition: Called repeatedly; must not block.
        timeout_s: Seconds to wait.
        what: Name of the condition in the error.

    Raises:
        TimeoutError: The condition did not become true in time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"timed out after {timeout_s:g} s waiting for: {what}")
        time.sleep(_PAUSE_S)
