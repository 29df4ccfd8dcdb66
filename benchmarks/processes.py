"""The processes below this one, wherever their parents ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
END_TIMEOUT_S = 10.0


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends, so that none is lost sight of."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def with_descendants(pids: Iterable[int]) -> list[int]:
    """Return the processes and all below them, parents first."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(path.parent.name))
    found = list(pids)
    for pid in found:  # grows while it is read
        found += [child for child in children.get(pid, ()) if child not in found]
    return found


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_descendants(keep: set[int]) -> list[str]:
    """Kill every process below this one but those to keep, and return the names of those that still ran."""
    names: dict[int, str] = {}
    deadline = time.monotonic() + END_TIMEOUT_S
    while left := [pid for pid in with_descendants([os.getpid()])[1:] if pid not in keep]:
        for pid in left:
            with contextlib.suppress(OSError):
                names.setdefault(pid, Path(f"/proc/{pid}/comm").read_text().strip())
        signal_all(left, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes that cannot be ended: {left}")
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)
    return list(names.values())
