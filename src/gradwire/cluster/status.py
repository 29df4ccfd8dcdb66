"""`Cluster.status`: a frozen record for each worker, shown as a table, and how its numbers are collected."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec

if TYPE_CHECKING:
    from rich.table import Table

    from gradwire.rpc.agent import Agent

_STYLES = {"running": "green", "starting": "yellow", "restarting": "yellow", "leaving": "yellow", "lost": "bold red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """Snapshot of one worker.

    Attributes:
        name: Name of the worker.
        rank: Rank of the worker.
        role: Role of the worker.
        pid: Process id, or None if no process was started.
        state: ``starting``, ``running``, ``leaving``, ``ended`` (as requested), ``lost`` (unexpectedly) or ``restarting``.
        uptime_s: Seconds from its start until now or its end.
        rss_bytes: Resident memory; None if the worker did not respond.
        device_bytes: Memory of its tensors on accelerators; None if it uses none, or the backend does not report it.
        calls_served: Number of calls answered; None if the worker did not respond.
        restarts: Number of restarts.
        exit_reason: How its process ended, e.g. ``killed by SIGKILL``; None while it runs.
    """

    name: str
    rank: int
    role: str
    pid: int | None
    state: str
    uptime_s: float
    rss_bytes: int | None
    calls_served: int | None
    restarts: int
    exit_reason: str | None
    device_bytes: int | None = None


class ClusterStatus(tuple[WorkerStatus, ...]):
    """Status of all workers in order of rank. ``print`` and rich show it as a table."""

    __slots__ = ()

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(pad_edge=False, collapse_padding=True)  # all of it fits into 80 characters
        has_devices = any(worker.device_bytes is not None for worker in self)
        devices = ("on devices",) if has_devices else ()
        for header in ("rank", "name", "pid", "state", "uptime", "memory", *devices, "calls", "restarts"):
            table.add_column(header, justify="left" if header in ("name", "state") else "right", no_wrap=True)
        table.add_column("ended by")
        for worker in self:
            table.add_row(*_cells(worker, has_devices), style=_STYLES.get(worker.state))
        return table

    def __str__(self) -> str:
        from rich.console import Console

        file = io.StringIO()
        Console(file=file, width=120, color_system=None, force_jupyter=False).print(self)
        return file.getvalue().rstrip("\n")

    __repr__ = __str__


def _cells(worker: WorkerStatus, has_devices: bool) -> list[str]:
    return [
        str(worker.rank),
        worker.name,
        "-" if worker.pid is None else str(worker.pid),
        worker.state,
        format_duration(worker.uptime_s),
        _show_bytes(worker.rss_bytes),
        *([_show_bytes(worker.device_bytes)] if has_devices else []),
        "-" if worker.calls_served is None else str(worker.calls_served),
        str(worker.restarts),
        worker.exit_reason or "",
    ]


def _show_bytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**20:,.0f} MiB"


def format_duration(seconds: float) -> str:
    """Format a duration: ``3.2 s``, or ``0:01:15`` from a minute on."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def describe_exit(status: int) -> str:
    """Describe how a process ended, from the status of `os.waitpid`."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"  # real-time signals have no name


def rss_of(pid: int) -> int | None:
    """Return the resident memory of a process in bytes, or None if it has exited."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return None


def device_bytes() -> int | None:
    """Return the memory that the tensors of this process have on all devices of its accelerator.

    None if there is no accelerator, if this process has not used it (asking would initialize it), or if the backend does not
    tell.
    """
    import torch  # the command line shows a status without it

    found = torch.accelerator.current_accelerator()
    backend = None if found is None else torch.get_device_module(found.type)
    allocated = getattr(backend, "memory_allocated", None)
    if backend is None or allocated is None or not backend.is_initialized():
        return None
    try:
        return sum(int(allocated(index)) for index in range(backend.device_count()))
    except RuntimeError:  # some have the function, and an allocator that does not count
        return None


USAGE = "cluster.usage"


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Numbers that a worker reports about itself."""

    calls_served: Annotated[int, msgspec.Meta(ge=0)]
    rss_bytes: Annotated[int, msgspec.Meta(ge=0)] | None
    device_bytes: Annotated[int, msgspec.Meta(ge=0)] | None


def serve_usage(agent: Agent) -> None:
    """Let this worker answer `ask_usage`."""
    pid = os.getpid()
    agent.server.register_control(USAGE, lambda _: [agent.statistics().num_calls_served, rss_of(pid), device_bytes()])


def ask_usage(agent: Agent, names: Sequence[str], timeout_s: float) -> dict[str, Usage]:
    """Return how many calls each worker has served, and its memory, for those that answer within `timeout_s`.

    The question travels on the control lane: it does not count as a call, and a worker whose threads are all busy answers.
    """
    return agent.ask_all(names, USAGE, (), timeout_s, Usage)
