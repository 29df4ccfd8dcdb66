"""`gradwire top`: workers, calls and backward passes of a running cluster, live in the terminal."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwire.cli.console import fail, make_console, say
from gradwire.cli.status_view import choose_socket, name_of, read_unless_gone
from gradwire.cluster.status import WorkerStatus, format_bytes, format_duration, format_rate
from gradwire.cluster.status_socket import ClusterReport, NoReport

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_MOST_ROWS = 200  # of workers, in output that is not a terminal
_FRAME_LINES = 17  # titles, headers, empty lines, and three that say how much more there is
_QUIT_KEYS = (b"q", b"Q", b"\x1b", b"\x03")
_SLOW_S = 5.0  # calls and passes of this age are shown in yellow
_BAR_CELLS = 8
_WIDE = 92  # characters that the table of workers needs with everything in it
_CALL_HEADERS = ("function", "caller", "waits for")
_PASS_HEADERS = ("root", "context", "waits for")
_PHASES = {"run": "green", "wait": "yellow", "queue": "red", "reply": "cyan"}
_STATES = {"running": "green", "lost": "bold red", "ended": "dim"}


def show_top(wanted: str | None, interval_s: float) -> None:
    """Show one cluster until it is closed or the user quits; a single time if the output is not a terminal."""
    path = choose_socket(wanted)
    report = read_unless_gone(path)
    console = make_console()
    if report is None:
        fail(f"{name_of(path)} is closed")
    if not (console.is_terminal and sys.stdin.isatty()):
        if isinstance(report, NoReport):
            fail(f"{name_of(path)}: {report}")
        console.print(render(report, console.width, None))
        return
    from rich.live import Live

    with _keys() as pressed, Live(console=console, auto_refresh=False, screen=True) as live:
        while report is not None:
            live.update(_frame(path, report, console.width, console.height), refresh=True)
            if pressed(interval_s):
                return
            report = read_unless_gone(path)
    say(f"{name_of(path)} is closed.")


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Read keys without echo; yield a function that waits and returns whether a key to quit was pressed."""
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)

    def pressed(timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while (left_s := until - time.monotonic()) > 0:
            if select.select([stdin], [], [], left_s)[0]:
                data = os.read(stdin, 64)
                if not data or data in _QUIT_KEYS:  # the terminal is gone, or the user quits
                    return True
                if data == b" ":
                    return False  # look at once
        return False

    try:
        tty.setcbreak(stdin)
        yield pressed
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


def _frame(path: Path, report: ClusterReport | NoReport, width: int, num_lines: int) -> RenderableType:
    from rich.text import Text

    if isinstance(report, NoReport):
        return Text(f"{name_of(path)}: {report}\n\nq quits", style="yellow")
    return render(report, width, num_lines)


def render(report: ClusterReport, width: int, num_lines: int | None) -> RenderableType:
    """Return what a cluster does, in about that many lines; all of it if the number is None."""
    from rich.console import Group
    from rich.text import Text

    members = [*report.workers, report.driver]
    parts: list[RenderableType] = [_title(report), Text()]
    calls = sorted(((worker, call) for worker in members for call in worker.calls), key=lambda pair: -pair[1].seconds)
    passes = sorted(((worker, item) for worker in members for item in worker.passes), key=lambda pair: -pair[1].seconds)
    num_notes = sum(worker.exit_reason is not None for worker in members)
    room = _MOST_ROWS if num_lines is None else max(3, num_lines - num_notes - _FRAME_LINES)
    num_passes = min(len(passes), max(2, room // 4))
    num_calls = min(len(calls), max(3, (room - num_passes) // 2))
    num_workers = max(1, room - num_passes - num_calls)
    parts.append(_workers(members, num_workers, width))
    parts += [Text(), Text("Calls in progress, the longest first", style="bold")]
    parts.append(_calls(calls[:num_calls]) if calls else Text("none", style="dim"))
    _add_rest(parts, len(calls) - num_calls, "calls")
    parts += [Text(), Text("Backward passes in progress", style="bold")]
    parts.append(_passes(passes[:num_passes]) if passes else Text("none", style="dim"))
    _add_rest(parts, len(passes) - num_passes, "passes")
    if num_lines is not None:
        parts += [Text(), Text("q quits, space refreshes", style="dim")]
    return Group(*parts)


def _add_rest(parts: list[RenderableType], count: int, what: str) -> None:
    from rich.text import Text

    if count > 0:
        parts.append(Text(f"and {count} more {what}", style="dim"))


def _title(report: ClusterReport) -> RenderableType:
    from rich.text import Text

    alive = [worker for worker in report.workers if worker.state == "running"]
    rate = sum(worker.calls_per_s or 0.0 for worker in report.workers)
    num_queued = sum(worker.num_queued or 0 for worker in report.workers)
    return Text.assemble(
        (report.name, "bold"),
        f"  up {format_duration(report.uptime_s)}  ",
        (
            f"{len(alive)} of {len(report.workers)} workers",
            "green" if len(alive) == len(report.workers) else "bold red",
        ),
        f"  {format_rate(rate)} calls/s  ",
        (f"{num_queued} queued", "red" if num_queued else ""),
    )


def _table(*headers: tuple[str, str], gap: int = 2) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0), header_style="dim")
    for header, justify in headers:
        is_wide = header in ("function", "waits for")
        table.add_column(header, justify=justify, no_wrap=True, overflow="ellipsis", ratio=1 if is_wide else None)  # type: ignore[arg-type]
    return table


def _workers(members: list[WorkerStatus], most: int, width: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    shown = sorted(members, key=_importance)[:most]
    busiest = max((worker.calls_per_s or 0.0 for worker in members), default=0.0)
    is_narrow = width < _WIDE
    has_devices = not is_narrow or any(worker.device not in (None, "cpu") for worker in members)
    table = _table(
        ("worker", "left"),
        ("state", "left"),
        *((("device", "left"),) if has_devices else ()),
        ("memory", "right"),
        ("calls/s", "right"),
        *(() if is_narrow else (("", "left"),)),
        *((header, "right") for header in ("running", "queued", "sent", "received")),
        gap=1 if is_narrow else 2,
    )
    for worker in sorted(shown, key=lambda worker: worker.rank):
        is_silent = worker.state == "running" and worker.num_running is None
        table.add_row(
            Text(worker.name, style="bold" if worker.num_running else ""),
            Text("no answer", "red") if is_silent else Text(worker.state, _STATES.get(worker.state, "yellow")),
            *((Text(worker.device or "-"),) if has_devices else ()),
            format_bytes(worker.rss_bytes),
            format_rate(worker.calls_per_s),
            *(() if is_narrow else (Text(_bar(worker.calls_per_s or 0.0, busiest), "cyan"),)),
            "-" if worker.num_running is None else str(worker.num_running),
            Text("-" if worker.num_queued is None else str(worker.num_queued), "red" if worker.num_queued else ""),
            format_bytes(worker.bytes_sent),
            format_bytes(worker.bytes_received),
        )
    parts: list[RenderableType] = [table]
    _add_rest(parts, len(members) - len(shown), "workers")
    parts += [
        Text(f"{worker.name}: {worker.exit_reason}", style="bold red")
        for worker in shown
        if worker.exit_reason and worker.state != "ended"
    ]
    return Group(*parts)


def _importance(worker: WorkerStatus) -> tuple[Any, ...]:
    """Order workers: those in trouble first, then the busiest ones."""
    return (
        worker.state == "running" and worker.num_running is not None,
        -(worker.num_queued or 0),
        -(worker.calls_per_s or 0.0),
        worker.rank,
    )


def _bar(value: float, most: float) -> str:
    num_eighths = round(8 * _BAR_CELLS * value / most) if most > 0 else 0
    whole, rest = divmod(num_eighths, 8)
    return ("█" * whole + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(_BAR_CELLS)


def _calls(calls: list[tuple[WorkerStatus, Any]]) -> RenderableType:
    from rich.text import Text

    table = _table(
        ("time", "right"),
        ("worker", "left"),
        ("phase", "left"),
        ("function", "left"),
        ("caller", "left"),
        ("waits for", "left"),
    )
    table.expand = True
    for worker, call in calls:
        table.add_row(
            _age(call.seconds),
            Text(worker.name),
            Text(call.phase, style=_PHASES.get(call.phase, "")),
            Text(call.function),
            Text(call.caller),
            Text(call.waits_for or ("a free thread" if call.phase == "queue" else "")),
        )
    return table


def _passes(passes: list[tuple[WorkerStatus, Any]]) -> RenderableType:
    from rich.text import Text

    table = _table(
        ("time", "right"),
        ("worker", "left"),
        ("phase", "left"),
        ("root", "left"),
        ("context", "left"),
        ("waits for", "left"),
    )
    table.expand = True
    for worker, item in passes:
        waits_for = "; ".join(item.waits_for) or ("computes" if item.num_running else "the end of the pass elsewhere")
        table.add_row(
            _age(item.seconds),
            Text(worker.name),
            Text(item.phase),
            Text(item.root),
            Text(str(item.context_id)),
            Text(waits_for, style="red" if item.waits_for and item.seconds >= _SLOW_S else ""),
        )
    return table


def _age(seconds: float) -> Any:
    from rich.text import Text

    return Text(format_duration(seconds), style="yellow" if seconds >= _SLOW_S else "")
