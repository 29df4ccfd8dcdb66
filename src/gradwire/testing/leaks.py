"""Leak check: finds resources that a test leaves behind.

`LeakCheck` looks at this process from outside, through ``/proc``, and so finds resources that a library has forgotten. Only
autograd contexts, references, subscriptions of events, log handlers and the current worker are read from gradwire itself.
Resources that existed when the check began are not leaks; neither are the daemon threads of other libraries, nor the
template process that `gradwire.cluster` keeps for the next cluster.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import stat
import sys
import tempfile
import threading
import traceback
from collections import Counter
from pathlib import Path
from types import TracebackType

from gradwire.autograd import engine
from gradwire.errors import NotInitialized
from gradwire.observe import events, log
from gradwire.rpc import current_agent
from gradwire.rref import context as rref_context
from gradwire.testing.agents import wait_until

_MEMFD = "memfd:gradwire"
_TEMPLATE = "gw-forkserver"
_IS_ANONYMOUS = re.compile(r"\[\d+\]$")  # socket:[4711] -> socket


class LeakFound(AssertionError):
    """Resources were left behind; the message lists them."""


class LeakCheck:
    """Compares threads, descriptors, shared memory, child processes, temporary folders, contexts, references,
    subscriptions of events, handlers of gradwire's log and the current worker with the start.

    As a context manager it raises `LeakFound` at the end, unless the block itself has failed.

    Args:
        timeout_s: Seconds until resources that are still there count as leaked.
    """

    def __init__(self, timeout_s: float = 2.0) -> None:
        self._timeout_s = timeout_s
        self._threads = set(threading.enumerate())
        self._before = _look()

    def __repr__(self) -> str:
        return f"<LeakCheck {self.leaks() or 'clean'}>"

    def __enter__(self) -> LeakCheck:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.check()

    def leaks(self) -> list[str]:
        """Return the resources that exist now and did not when the check began."""
        found = [f"thread {thread.name}" for thread in threading.enumerate() if self._is_leaked(thread)]
        for kind, there in _look().items():
            found += [f"{kind} {name}" for name in (there - self._before[kind]).elements()]
        return sorted(found)

    def check(self) -> None:
        """Wait until nothing is left.

        Raises:
            LeakFound: Resources are left after `timeout_s`.
        """
        if not self.leaks():
            return
        gc.collect()  # with torch loaded it takes long, so only where something is left
        try:
            wait_until(lambda: not self.leaks(), self._timeout_s)
        except TimeoutError:
            raise LeakFound(f"left behind: {', '.join(self.leaks())}{self._stacks()}") from None

    def _stacks(self) -> str:
        frames = sys._current_frames()
        left = [thread for thread in threading.enumerate() if self._is_leaked(thread) and thread.ident in frames]
        return "".join(
            f"\n\nthread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident or 0]))}"
            for thread in left
        )

    def _is_leaked(self, thread: threading.Thread) -> bool:
        if thread in self._threads:
            return False
        return thread.name.startswith("gradwire-") or not thread.daemon


def _look() -> dict[str, Counter[str]]:
    """Return the resources that exist now, by kind. A test run looks twice for each test, so this takes under 1 ms."""
    children = _child_names()
    processes = [name for name in children if not name.startswith(_TEMPLATE)]
    return {
        "descriptor": _descriptors(num_templates=len(children) - len(processes)),
        "shared memory": _mappings(),
        "shared file": _shared_files(),
        "folder": _folders(),
        "process": Counter(processes),
        "autograd context": contexts_left(),
        "reference": references_left(),
        "subscription of": Counter(getattr(item, "__qualname__", repr(item)) for item in events.all_subscribed()),
        "log handler": _log_handlers(),
        "current worker": _current_worker(),
    }


def _descriptors(num_templates: int) -> Counter[str]:
    """Return open descriptors by kind, and by path where they have one, without the two of each idle template."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of the listing itself
            continue
        if not target.startswith("/proc/"):
            found[_IS_ANONYMOUS.sub("", target).rstrip(":")] += 1
    found.subtract({"socket": num_templates, "pipe": num_templates})  # its channel, and the pipe of its output
    return found


def _mappings() -> Counter[str]:
    try:
        text = Path("/proc/self/maps").read_text()
    except OSError:
        return Counter()
    return Counter(line.split()[5] for line in text.splitlines() if _MEMFD in line) if _MEMFD in text else Counter()


def _shared_files() -> Counter[str]:
    own = ("gradwire", f"torch_{os.getpid()}_", "psm_")
    try:
        return Counter(f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith(own))
    except OSError:
        return Counter()


def _folders() -> Counter[str]:
    """Workers' folders among the temporary ones. Nothing tells whose they are: give each process that runs at the same
    time a ``tempfile.tempdir`` of its own."""
    found: Counter[str] = Counter()
    for path in Path(tempfile.gettempdir()).glob("gradwire-*"):
        try:
            if path.stat().st_uid == os.geteuid() and stat.S_ISDIR(path.stat().st_mode):
                found[str(path)] += 1
        except OSError:  # it has just been removed
            continue
    return found


def _child_names() -> list[str]:
    """Return name and pid of every process that this one started and has not reaped."""
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            children = Path(f"/proc/self/task/{task}/children").read_text().split()
        except OSError:  # the thread has just ended
            continue
        for pid in children:
            try:
                names.append(f"{Path(f'/proc/{pid}/comm').read_text().strip()} (pid {pid})")
            except OSError:  # reaped in between
                continue
    return names


def _log_handlers() -> Counter[str]:
    """Return the handlers of gradwire's log, without the one that prints for the rest of the process."""
    return Counter(type(item).__name__ for item in logging.getLogger(log.ROOT).handlers if item is not log.output)


def _current_worker() -> Counter[str]:
    try:
        return Counter([current_agent().info.name])
    except NotInitialized:
        return Counter()


def contexts_left() -> Counter[str]:
    """Return open autograd contexts on workers of this process, and backward passes running in them."""
    found: Counter[str] = Counter()
    for item in engine.all_open():
        for context in item.container:
            found[f"{context.context_id} on worker {item.worker}"] += 1
            found.update(f"pass {number:#x} on worker {item.worker}" for number in list(context.passes))
    return found


def references_left() -> Counter[str]:
    """Return references, and values that others refer to, on workers of this process that are not closed."""
    found: Counter[str] = Counter()
    for known in rref_context.all_open():
        counts = known.statistics()
        if counts.num_values or counts.num_forks or counts.num_children:
            found[f"{counts} on worker {known.agent.info.name}"] += 1
    return found
