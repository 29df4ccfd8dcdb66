"""The `gradwire` command, as installed: it runs `gradwire.cli`.

It is outside of the package because `import gradwire` imports torch, which takes more than a second. With this module
loaded, `gradwire/__init__.py` leaves that to the commands that need it. `python -m gradwire` takes that second.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process."""
    sys.modules.setdefault("gradwire_command", sys.modules[__name__])  # also where this file runs as __main__
    try:
        from gradwire.cli import main as run

        run()
    except KeyboardInterrupt:  # while it was still importing; later, typer takes it
        sys.exit(130)


if __name__ == "__main__":
    main()
