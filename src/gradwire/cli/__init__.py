"""The `gradwire` command. `gradwire_command` and `python -m gradwire` start it here."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process and exit with its exit code."""
    from gradwire.cli.app import app
    from gradwire.cli.console import say_error
    from gradwire.errors import GradwireError

    try:
        app(prog_name="gradwire")
    except GradwireError as error:
        say_error(str(error))
        sys.exit(1)
