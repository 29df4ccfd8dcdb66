"""`gradwire status`: the open clusters of this user, or the workers of one of them."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gradwire.cli.console import fail, make_console, say, say_note
from gradwire.cluster.status import ClusterStatus, format_duration
from gradwire.cluster.status_socket import (
    SUFFIX,
    ClusterGone,
    ClusterReport,
    NoReport,
    list_sockets,
    read_report,
    read_reports,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

_TIMEOUT_S = 3.0


def show_status(wanted: str | None, *, as_json: bool) -> None:
    """Print the status of one cluster, or a list of all if none is named."""
    if wanted is None:
        _show_list(as_json=as_json)
        return
    path = find_socket(wanted, list_sockets())
    try:
        report = read_report(path, _TIMEOUT_S)
    except NoReport as problem:
        fail(f"{name_of(path)}: {problem}")
    _print(_as_table(report), report, as_json=as_json)


def watch_status(wanted: str | None, interval_s: float, *, as_json: bool) -> None:
    """Print the status repeatedly until the cluster is closed."""
    path = choose_socket(wanted)
    if as_json:
        while (report := read_unless_gone(path)) is not None:
            print(msgspec.json.encode(_as_data(path, report)).decode(), flush=True)
            time.sleep(interval_s)
        return
    from rich.live import Live

    console = make_console()
    with Live(console=console, auto_refresh=False, transient=console.is_terminal) as live:
        last: RenderableType | None = None
        while (report := read_unless_gone(path)) is not None:
            last = f"{name_of(path)}: {report}" if isinstance(report, NoReport) else _as_table(report)
            live.update(last, refresh=True)
            time.sleep(interval_s)
    if last is not None:
        console.print(last)
    say(f"{name_of(path)} is closed.")


def choose_socket(wanted: str | None) -> Path:
    """Return the socket of the cluster that was named, or of the only one."""
    paths = list_sockets()
    if wanted is not None:
        return find_socket(wanted, paths)
    if len(paths) != 1:
        fail(f"name one of your clusters; {names_of(paths)}" if paths else names_of(paths))
    return paths[0]


def find_socket(wanted: str, paths: list[Path]) -> Path:
    """Return the socket of a cluster given by its name, a prefix of it, or the driver's process id."""
    names = {name_of(path): path for path in paths}
    if wanted in names:
        return names[wanted]
    found = [path for name, path in names.items() if name.startswith(wanted) or name.endswith(f"-{wanted}")]
    if not found:
        fail(f"no cluster matches {wanted!r}; {names_of(paths)}")
    if len(found) > 1:
        *others, last = map(name_of, found)
        fail(f"{wanted!r} matches {', '.join(others)} and {last}; name one of them")
    return found[0]


def names_of(paths: list[Path]) -> str:
    """Return a sentence with the names of clusters."""
    if not paths:
        return "you have no open clusters on this machine"
    return "open clusters: " + ", ".join(map(name_of, paths))


def name_of(path: Path) -> str:
    """Return the name of the cluster with that socket."""
    return path.name.removesuffix(SUFFIX)


def read_unless_gone(path: Path) -> ClusterReport | NoReport | None:
    """Return a report, or why there is none; None if the cluster is closed."""
    try:
        return read_report(path, _TIMEOUT_S)
    except ClusterGone:
        return None
    except NoReport as problem:
        return problem


def _show_list(*, as_json: bool) -> None:
    from rich.table import Table

    paths = list_sockets()
    answers = list(zip(paths, read_reports(paths, _TIMEOUT_S), strict=True))
    found = [(path, report) for path, report in answers if not isinstance(report, ClusterGone)]
    if as_json:
        say(_as_json([_as_data(path, report) for path, report in found]))
        return
    if not found:
        say("You have no open clusters on this machine.")
        return
    table = Table()
    for header in ("cluster", "driver", "workers", "uptime"):
        table.add_column(header, justify="left" if header == "cluster" else "right", no_wrap=True)
    table.add_column("program", overflow="fold")
    for path, report in found:
        if isinstance(report, NoReport):
            table.add_row(name_of(path), "-", "-", "-", str(report), style="yellow")
            continue
        num_alive = sum(worker.state in ("starting", "running") for worker in report.workers)
        alive = f"{num_alive} of {len(report.workers)}"
        style = "bold red" if any(worker.state == "lost" for worker in report.workers) else None
        uptime = format_duration(report.uptime_s)
        program = shlex.join([Path(report.command[0]).name, *report.command[1:]]) if report.command else ""
        table.add_row(report.name, str(report.pid), alive, uptime, program, style=style)
    make_console().print(table)
    if make_console().is_terminal:
        say_note(f"gradwire status {name_of(found[0][0])} shows its workers.", "next", "dim")


def _as_table(report: ClusterReport) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    title = Text(f"{report.name}  up {format_duration(report.uptime_s)}", style="bold")
    return Group(title, ClusterStatus(report.workers))


def _as_data(path: Path, report: ClusterReport | NoReport) -> Any:
    if isinstance(report, NoReport):
        return {"name": name_of(path), "error": str(report)}
    return msgspec.to_builtins(report)


def _as_json(data: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(data), indent=2).decode()


def _print(table: RenderableType, report: ClusterReport, *, as_json: bool) -> None:
    if as_json:
        say(_as_json(report))
    else:
        make_console().print(table)
