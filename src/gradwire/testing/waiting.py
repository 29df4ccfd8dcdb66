"""Waiting for what must become true, instead of sleeping and hoping."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_PAUSE_S = 0.005


def wait_until(condition: Callable[[], object], timeout_s: float = 10.0, what: str = "the condition") -> None:
    """Returns as soon as `condition()` is true.

    Args:
        condition: Called again and again; must not block.
        timeout_s: How long to wait.
        what: Names the condition in the error.

    Raises:
        TimeoutError: It did not become true in time.
    """
    pause = threading.Event()  # never set: its wait is a pause that lets signals through
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{what} did not come true within {timeout_s:g} s")
        pause.wait(_PAUSE_S)
