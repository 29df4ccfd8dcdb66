"""Finding processes, and stopping them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gradwire.testing import wait_until


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


def thread_states(pid: int) -> list[str]:
    """The kernel's letter for each thread of a process, e.g. ``T`` for one that was stopped."""
    stats = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            stats.append((task / "stat").read_text())
    return [stat.rpartition(")")[2].split()[0] for stat in stats]


def stop(pid: int) -> None:
    """Stop a process. The signal reaches its threads one by one, and until then they may answer: wait for all."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: set(thread_states(pid)) == {"T"}, 20.0, "that the process is stopped")


@contextmanager
def stopped(pid: int | None) -> Iterator[None]:
    """Stop a process inside the block; to others it looks like a busy one."""
    assert pid is not None
    try:
        stop(pid)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
