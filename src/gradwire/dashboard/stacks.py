"""The stacks of a worker, from py-spy or from the worker itself.

py-spy reads the memory of the process, so it also shows a worker that does not answer because native code holds the GIL. It
needs the worker on this machine, and the right to look into it (ptrace).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sysconfig
from typing import TYPE_CHECKING, Any

import msgspec

from gradwire.dashboard.worker_report import STACKS, Frame, ThreadStack, ThreadStacks, own_stacks
from gradwire.errors import GradwireError
from gradwire.types import short

if TYPE_CHECKING:
    from gradwire.rpc.agent import Agent

_SPY_S = 5.0
_ANSWER_S = 3.0


class _SpyFrame(msgspec.Struct):
    name: str
    filename: str = ""
    line: int = 0


class _SpyThread(msgspec.Struct):
    frames: list[_SpyFrame]
    thread_id: int = 0
    thread_name: str | None = None
    active: bool = False


def find_stacks(agent: Agent, worker: str, pid: int | None, host: str) -> dict[str, Any]:
    """Return the stacks of a worker for the page, and how they were found.

    Raises:
        GradwireError: The worker does not answer, and py-spy cannot look at it either.
    """
    spied = spy(pid) if pid is not None and host in ("", socket.gethostname()) else None
    if spied is not None:
        return {"worker": worker, "by": "py-spy", "threads": _as_objects(spied)}
    if worker == agent.info.name:
        found: tuple[ThreadStack, ...] = own_stacks()
    else:
        found = agent.ask(worker, STACKS, (), _ANSWER_S, ThreadStacks).wait()
    return {"worker": worker, "by": "the worker", "threads": _as_objects(found)}


def _as_objects(threads: tuple[ThreadStack, ...]) -> list[dict[str, Any]]:
    return [
        {
            "name": item.name,
            "state": item.state,
            "frames": [{"function": f.function, "file": f.file, "line": f.line} for f in item.frames],
        }
        for item in threads
    ]


def spy(pid: int) -> tuple[ThreadStack, ...] | None:
    """Return the stacks of a process on this machine by py-spy; None if that is not possible here."""
    program = _find_spy()
    if program is None:
        return None
    command = [program, "dump", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SPY_S, check=True, stdin=subprocess.DEVNULL)
        threads = msgspec.json.decode(done.stdout, type=list[_SpyThread])
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError):  # not allowed, or the process has ended
        return None
    return tuple(
        ThreadStack(
            short(item.thread_name or f"thread {item.thread_id}"),
            tuple(Frame(short(f.name), short(f.filename), max(0, f.line)) for f in item.frames[:100]),
            "running" if item.active else "waiting",
        )
        for item in threads
    )


def _find_spy() -> str | None:
    places = os.pathsep.join((os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")))
    return os.environ.get("PYSPY_BIN") or shutil.which("py-spy", path=places)


def explain_failure(worker: str, error: GradwireError) -> str:
    """Return what the dashboard shows where there are no stacks."""
    return (
        f"{worker} did not send its stacks ({error}), and py-spy could not read them from here: it is not installed, not "
        "permitted, or the worker is on another machine. Run `py-spy dump --pid <pid>` there"
    )
