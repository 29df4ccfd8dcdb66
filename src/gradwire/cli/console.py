"""Output of the command line: colours on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH_OF_FILES = 120


def make_console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal; in files and pipes it has a fixed width.

    It does not read markup: names of programs and workers may have brackets.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _WIDTH_OF_FILES
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def say(text: str, style: str | None = None) -> None:
    """Print a line to stdout without wrapping or truncating it."""
    make_console().print(text, style=style, soft_wrap=True)


def say_note(text: str, label: str = "gradwire", style: str = "bold") -> None:
    """Print a line to stderr, with a label in front."""
    from rich.text import Text

    make_console(stderr=True).print(Text.assemble((f"{label}:", style), " ", text), soft_wrap=True)


def say_error(text: str) -> None:
    """Print an error message to stderr."""
    say_note(text, "error", "bold red")


def fail(text: str) -> NoReturn:
    """Print an error message and exit with code 1."""
    say_error(text)
    raise typer.Exit(1)
