"""Finding processes, and waiting for what must become true."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    """Whether the condition becomes true in time."""
    pause = threading.Event()
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.01)
    return True


def is_there(pid: int) -> bool:
    """Whether a process of that number exists, be it as a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def processes_with(mark: str) -> dict[int, str]:
    """Every process that has a mark in its first environment, which forks inherit: its number and name."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if mark.encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "comm").read_text().strip()
            except OSError:
                continue  # it has just ended
    return found


def children_of(pid: int) -> list[int]:
    """The processes that one has started and not yet reaped."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []  # it has just ended
