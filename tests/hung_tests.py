"""A test that takes too long ends its process, after the stacks of that process and of those that it started were printed.

pytest-timeout prints the stacks of one process, and under xdist to where no one sees them. Hooks for ``conftest.py``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import pytest_timeout

GRACE_S = 30.0
"""How much later a process is ended in which no thread can print them, because one keeps the GIL for ever."""

_PY_SPY_S = 10.0
_stderr = -1  # the real one: tests run with another one in its place


def pytest_configure() -> None:
    global _stderr
    _stderr = os.dup(2)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """In place of the function of this name in pytest-timeout, whose counterpart calls ``cancel_timeout``."""
    timer = threading.Timer(settings.timeout, _end_process, (item.nodeid, settings))
    timer.name = f"pytest_timeout {item.nodeid}"

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        timer.cancel()
        timer.join()

    item.cancel_timeout = cancel  # type: ignore[attr-defined]
    # Needs no GIL: it prints the stacks of this process, and lets the signal end it. Set anew, as a test may have reset it.
    faulthandler.unregister(signal.SIGALRM)
    faulthandler.register(signal.SIGALRM, file=_stderr, chain=True)
    timer.start()
    signal.setitimer(signal.ITIMER_REAL, settings.timeout + GRACE_S)
    return True


def _end_process(test: str, settings: Any) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    if not settings.disable_debugger_detection and pytest_timeout.is_debugging():
        return
    try:
        _write(f"\n{test} has not ended within {settings.timeout:.0f} s; its processes end now, with these stacks:\n\n")
        faulthandler.dump_traceback(_stderr)
        for pid in descendants(os.getpid()):
            _write("\n" + stacks(pid))
    finally:
        os._exit(1)


def _write(text: str) -> None:
    os.write(_stderr, text.encode(errors="replace"))


def stacks(pid: int) -> str:
    """Return the stacks of all threads of a Python process, or why they cannot be read."""
    command = [str(Path(sys.executable).with_name("py-spy")), "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_PY_SPY_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"process {pid}: {error}"
    return done.stdout.decode(errors="replace")


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, those that they have started, and so on."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            children += map(int, task.read_text().split())
    return [found for child in children for found in (child, *descendants(child))]
