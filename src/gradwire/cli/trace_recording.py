"""`gradwire trace`: asks a driver to record what happens on its workers."""

from __future__ import annotations

from pathlib import Path

from gradwire.cli.console import fail, say
from gradwire.cli.status_view import find_socket, name_of, names_of
from gradwire.cluster.status_socket import NoReport, list_sockets, run_operation

_WRITE_S = 240.0  # for collecting and writing what was recorded


def record_trace(wanted: str | None, output: Path, seconds: float, *, profile: bool, max_events: int) -> None:
    """Record one cluster for that time, and print what the file has."""
    paths = list_sockets()
    if wanted is None and len(paths) != 1:
        fail(f"name one of your clusters; {names_of(paths)}" if paths else names_of(paths))
    path = paths[0] if wanted is None else find_socket(wanted, paths)
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
