"""`gradwire dashboard` and `gradwire trace`: ask a driver to do something with its cluster, and print what it answers."""

from __future__ import annotations

import webbrowser
from collections.abc import Mapping
from pathlib import Path

from gradwire.cli.console import fail, make_console, say, say_note
from gradwire.cli.status_view import choose_socket, name_of
from gradwire.cluster.status_socket import NoReport, run_operation

_LINK_S = 15.0  # the driver may have to import the server first
_WRITE_S = 240.0  # for collecting and writing what was recorded


def show_link(wanted: str | None, *, opens_browser: bool) -> None:
    """Print a link to the page of one cluster, and open it if that is wanted."""
    link = _run(wanted, "dashboard", _LINK_S)
    say(link)
    if opens_browser:
        if not webbrowser.open(link):
            say_note("no browser was found on this machine", "note")
    elif make_console().is_terminal:
        say_note("the link works once, in a browser on this machine; from another one, forward the port with ssh -L")


def record_trace(wanted: str | None, output: Path, seconds: float, *, profile: bool, max_events: int) -> None:
    """Record one cluster for that time, and print what the file has."""
    options: dict[str, str | int | float | bool] = {
        "path": str(output.absolute()),
        "seconds": seconds,
        "profile": profile,
        "max_events": max_events,
    }
    say(_run(wanted, "trace", seconds + _WRITE_S, options))


def _run(
    wanted: str | None,
    operation: str,
    timeout_s: float,
    options: Mapping[str, str | int | float | bool] | None = None,
) -> str:
    path = choose_socket(wanted)
    try:
        return run_operation(path, operation, timeout_s, options)
    except NoReport as problem:
        fail(f"{name_of(path)}: {problem}")
