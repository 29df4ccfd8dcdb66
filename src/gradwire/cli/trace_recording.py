"""`gradwire trace`: asks a driver to record what happens on its workers."""

from __future__ import annotations

from pathlib import Path

from gradwire.cli.console import fail, say
from gradwire.cli.status_view import choose_socket, name_of
from gradwire.cluster.status_socket import NoReport, run_operation

_WRITE_S = 240.0  # for collecting and writing what was recorded


def record_trace(wanted: str | None, output: Path, seconds: float, *, profile: bool, max_events: int) -> None:
    """Record one cluster for that time, and print what the file has."""
    path = choose_socket(wanted)
    options: dict[str, str | int | float | bool] = {
        "path": str(output.absolute()),
        "seconds": seconds,
        "profile": profile,
        "max_events": max_events,
    }
    try:
        say(run_operation(path, "trace", seconds + _WRITE_S, options))
    except NoReport as problem:
        fail(f"{name_of(path)}: {problem}")
