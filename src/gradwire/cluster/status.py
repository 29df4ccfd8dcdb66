"""`Cluster.status`: a frozen record for each worker, shown as a table.

The command line shows one without torch; `usage` has how the numbers are collected.
"""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec

from gradwire.types import Id, Seconds, Text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

_STYLES = {"running": "green", "starting": "yellow", "restarting": "yellow", "leaving": "yellow", "lost": "bold red"}


class CallStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call that a worker is serving.

    Attributes:
        function: Name of the function.
        caller: The worker that made the call.
        phase: ``queue`` (for a free thread), ``run``, ``wait`` (for a call of its own) or ``reply``.
        seconds: How long it has been running; for a queued call, how long it has waited.
        waits_for: The call that the function itself waits for, ``<function> on <worker>``; empty for none.
    """

    function: Text
    caller: Text
    phase: Literal["queue", "run", "wait", "reply"]
    seconds: Seconds
    waits_for: Text = ""


class PassStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A backward pass in which a worker takes part.

    Attributes:
        context_id: Context of the pass.
        root: The worker that called ``backward``.
        phase: How far the pass has got on this worker.
        seconds: How long this worker has been taking part in it.
        num_running: Runs of torch's engine that compute here now.
        waits_for: What this worker waits for, ``<worker>: gradient of <function>``; the first four.
    """

    context_id: Id
    root: Text
    phase: Text
    seconds: Seconds
    num_running: Id = 0
    waits_for: Annotated[tuple[Text, ...], msgspec.Meta(max_length=4)] = ()


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
        device: The device that it computes on: ``cpu``, or an accelerator that it has used, such as ``cuda:0``.
        device_bytes: Memory of its tensors on accelerators; None if it uses none, or the backend does not report it.
        calls_served: Number of calls answered; None if the worker did not respond.
        calls_per_s: Calls answered per second, over about the last five seconds, or since the previous status (at first,
            since the start) if that is longer ago.
        bytes_sent: Bytes sent to other workers and the driver, through sockets and shared memory.
        bytes_received: Bytes received from them.
        num_running: Calls that are running, or wait for calls of their own.
        num_queued: Calls that wait for a free thread, or until the worker serves calls.
        calls: The calls in progress, the oldest first, at most 16.
        passes: The backward passes in progress, the oldest first, at most 16.
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
    device: str | None = None
    device_bytes: int | None = None
    calls_per_s: float | None = None
    bytes_sent: int | None = None
    bytes_received: int | None = None
    num_running: int | None = None
    num_queued: int | None = None
    calls: tuple[CallStatus, ...] = ()
    passes: tuple[PassStatus, ...] = ()


class ClusterStatus(tuple[WorkerStatus, ...]):
    """Status of all workers in order of rank. ``print`` and rich show it as a table."""

    __slots__ = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        columns = [column for column in _COLUMNS if column.is_wanted(self)]
        for dispensable in _DISPENSABLE:  # on a terminal that is too narrow for all
            if sum(column.width(self) + 1 for column in columns) - 1 > options.max_width:
                columns = [column for column in columns if column.header != dispensable]
        has_room = sum(column.width(self) + 2 for column in columns) - 2 <= options.max_width
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, int(has_room), 0, 0))
        for column in columns:
            table.add_column(column.header, justify=column.justify, no_wrap=True)
        for worker in self:
            table.add_row(*(Text(column.cell(worker)) for column in columns), style=_STYLES.get(worker.state))
        yield table
        for worker in self:
            notes = [] if worker.exit_reason is None else [worker.exit_reason]
            if worker.restarts:
                notes.append("restarted once" if worker.restarts == 1 else f"restarted {worker.restarts} times")
            if notes:
                yield Text(f"{worker.name}: {', '.join(notes)}", style=_STYLES.get(worker.state, ""))

    def __str__(self) -> str:
        from rich.console import Console

        file = io.StringIO()
        Console(file=file, width=120, color_system=None, force_jupyter=False).print(self)
        return file.getvalue().rstrip("\n")

    __repr__ = __str__


class _Column(NamedTuple):
    header: str
    cell: Callable[[WorkerStatus], str]
    justify: Literal["left", "right"] = "right"
    is_wanted: Callable[[ClusterStatus], bool] = lambda _: True

    def width(self, workers: ClusterStatus) -> int:
        return max(len(self.header), *(len(self.cell(worker)) for worker in workers), 0)


def format_bytes(num_bytes: int | None) -> str:
    """Format a number of bytes: ``170 MiB``; ``-`` if it is not known."""
    if num_bytes is None:
        return "-"
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 9.95 else f"{value:.1f} {unit}"


def format_rate(per_s: float | None) -> str:
    """Format a rate: ``0.5``, ``12``, ``14.2k``; ``-`` if it is not known."""
    if per_s is None:
        return "-"
    if per_s >= 9_999.5:
        return f"{per_s / 1000:.1f}k"
    return f"{per_s:.0f}" if per_s >= 9.95 or per_s == 0 else f"{per_s:.1f}"


_COLUMNS = (
    _Column("rank", lambda worker: str(worker.rank)),
    _Column("name", lambda worker: worker.name, "left"),
    _Column("pid", lambda worker: "-" if worker.pid is None else str(worker.pid)),
    _Column("state", lambda worker: worker.state, "left"),
    _Column("uptime", lambda worker: format_duration(worker.uptime_s)),
    _Column("memory", lambda worker: format_bytes(worker.rss_bytes)),
    _Column(
        "device",
        lambda worker: worker.device or "-",
        "left",
        lambda all_: any(worker.device not in (None, "cpu") for worker in all_),
    ),
    _Column(
        "on devices",
        lambda worker: format_bytes(worker.device_bytes),
        is_wanted=lambda all_: any(worker.device_bytes is not None for worker in all_),
    ),
    _Column("calls", lambda worker: "-" if worker.calls_served is None else str(worker.calls_served)),
    _Column("calls/s", lambda worker: format_rate(worker.calls_per_s)),
    _Column("sent", lambda worker: format_bytes(worker.bytes_sent)),
    _Column("received", lambda worker: format_bytes(worker.bytes_received)),
)
_DISPENSABLE = ("calls", "pid", "uptime")


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
