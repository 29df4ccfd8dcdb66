"""``python -m gradwire.compat (script.py | -m module) [arguments]``: run a program written for torch on gradwire.

The program is not changed. Processes that the program starts, by fork or as fresh interpreters, run on gradwire, too.

The program runs as Python itself would run it: with its own ``__main__`` until the process ends (functions that
`atexit` runs, and calls from other workers, look for names there), ``sys.argv``, ``sys.path[0]``, tracebacks without
the frames of this file, and the same exit codes.
"""

from __future__ import annotations

import builtins
import os
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import FileFinder, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from gradwire import compat

_BOOTSTRAP = str(Path(__file__).with_name("bootstrap"))
_USAGE = "usage: python -m gradwire.compat (script.py | -m module) [arguments of the program]"
_run_module_as_main: Any = runpy._run_module_as_main  # type: ignore[attr-defined]  # what the interpreter itself calls


def main(arguments: Sequence[str]) -> int:
    """Run the program as ``__main__``; return 2 if there is none."""
    first = arguments[0] if arguments else ""
    if first in ("-h", "--help"):
        print(_USAGE)
        return 0
    if not arguments or list(arguments) == ["-m"]:
        print(_USAGE, file=sys.stderr)
        return 2
    is_module = first.startswith("-m")
    if is_module and first != "-m":  # python accepts this, too: -mpytest
        arguments = ["-m", first.removeprefix("-m"), *arguments[1:]]
    if not is_module and not os.path.exists(first):
        print(f"{_USAGE}\nno such file: {first}", file=sys.stderr)
        return 2
    reach_children()
    compat.install()
    try:
        if is_module:
            run_module(arguments[1], arguments[2:])
        else:
            run_path(first, arguments[1:])
    except SystemExit:
        raise
    except BaseException as error:
        # The interpreter calls the hook again when the error reaches it, and sets the exit code.
        shown = error.with_traceback(_without_runner(error.__traceback__))
        sys.excepthook(type(error), shown, shown.__traceback__)
        sys.excepthook = lambda *_: None
        raise
    return 0


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module, or the ``__main__`` of a package, as ``python -m`` does."""
    _make_main()
    sys.argv = ["-m", *arguments]  # the file name is set when it is known
    _run_module_as_main(name)


def run_path(path: str, arguments: Sequence[str]) -> None:
    """Run a script, or a folder or archive with a ``__main__.py``, as ``python path`` does."""
    sys.argv = [path, *arguments]
    is_script = not os.path.isdir(path) and isinstance(pkgutil.get_importer(path), FileFinder | None)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path)) if is_script else os.path.abspath(path)
    module = _make_main()
    if not is_script:
        _run_module_as_main("__main__", alter_argv=False)
        return
    file = os.path.abspath(path)
    is_compiled = file.endswith(".pyc")
    loader = (SourcelessFileLoader if is_compiled else SourceFileLoader)("__main__", file)
    vars(module).update(__file__=file, __cached__=None, __loader__=loader)
    code: Any = loader.get_code("__main__") if is_compiled else compile(loader.get_data(file), file, "exec", 0, True)
    exec(code, vars(module))


def _make_main() -> ModuleType:
    """Replace this ``__main__`` by an empty one, until the process ends."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__builtins__ = builtins  # type: ignore[attr-defined]
    if sys.version_info < (3, 14):
        module.__annotations__ = {}
    return module


def _without_runner(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return traceback


def reach_children() -> None:
    """Make every Python that this process starts install compat when it imports torch."""
    os.environ["GRADWIRE_COMPAT"] = "1"
    inherited = os.environ.get("PYTHONPATH", "")
    if _BOOTSTRAP not in inherited.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_BOOTSTRAP, inherited]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
