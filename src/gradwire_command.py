"""The `gradwire` command, as installed: it runs `gradwire.cli`.

It lives outside the package because `import gradwire` imports torch, which takes more than a second. If this module is
loaded, `gradwire/__init__.py` leaves the import to the commands that need it. `python -m gradwire` pays for it.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process."""
    sys.modules.setdefault("gradwire_command", sys.modules[__name__])  # also if this file runs as __main__
    try:
        from gradwire.cli import main as run

        run()
    except KeyboardInterrupt:  # during imports; later, typer handles it
        sys.exit(130)


if __name__ == "__main__":
    main()
