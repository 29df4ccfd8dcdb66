"""``python -m gradwire.compat script.py [arguments]``: runs a program written for torch on gradwire, unchanged.

Processes that the program starts, by fork or as fresh interpreters, run on gradwire, too.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from gradwire import compat

_BOOTSTRAP = str(Path(__file__).with_name("bootstrap"))
_USAGE = "usage: python -m gradwire.compat script.py [arguments of the script]"


def main(arguments: Sequence[str]) -> int:
    """Runs the script as ``__main__``; 2 if there is none."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if not os.path.isfile(arguments[0]):
        print(f"{_USAGE}\nno such file: {arguments[0]}", file=sys.stderr)
        return 2
    reach_children()
    compat.install()
    sys.argv = list(arguments)
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))  # as if Python had been given the script
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


def reach_children() -> None:
    """Sees to it that every Python that this process starts installs compat when it imports torch."""
    os.environ["GRADWIRE_COMPAT"] = "1"
    inherited = os.environ.get("PYTHONPATH", "")
    if _BOOTSTRAP not in inherited.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_BOOTSTRAP, inherited]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
