"""`gradwire dashboard`: asks a driver to open the page of its cluster, and prints the link."""

from __future__ import annotations

import webbrowser

from gradwire.cli.console import fail, make_console, say, say_note
from gradwire.cli.status_view import choose_socket, name_of
from gradwire.cluster.status_socket import NoReport, run_operation

_TIMEOUT_S = 15.0  # the driver may have to import the server first


def show_link(wanted: str | None, *, opens_browser: bool) -> None:
    """Print a link to the page of one cluster, and open it if that is wanted."""
    path = choose_socket(wanted)
    try:
        link = run_operation(path, "dashboard", _TIMEOUT_S)
    except NoReport as problem:
        fail(f"{name_of(path)}: {problem}")
    say(link)
    if opens_browser:
        if not webbrowser.open(link):
            say_note("no browser was found on this machine", "note")
    elif make_console().is_terminal:
        say_note("the link works once, in a browser on this machine; from another one, forward the port with ssh -L")
