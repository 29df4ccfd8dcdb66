"""Found by every Python that a program under ``python -m gradwire.compat`` starts: installs compat once torch is imported.

Programs written for torch start their ranks with `torch.multiprocessing.spawn`, as fresh interpreters that know nothing of
what their parent has installed. Nothing is imported here before the program imports torch itself. A `sitecustomize` that
would have been found without this one is run, too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


def _install_after_torch() -> None:
    # By its path: importing it as a part of gradwire would import torch now.
    path = os.path.join(os.path.dirname(_HERE), "import_hook.py")
    spec = importlib.util.spec_from_file_location("_gradwire_import_hook", path)
    assert spec is not None
    hooks: Any = _execute(spec)

    def on_imported(module: ModuleType) -> None:
        if module.__name__ == "torch" and "gradwire" in sys.modules:
            return  # gradwire is being imported, and has just imported torch: the hook is called again when it is complete
        hook.remove()
        from gradwire import compat

        compat.install()

    hook = hooks.ImportHook(("torch", "gradwire"), on_imported)
    hook.install()


def _run_other_sitecustomize() -> None:
    others = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None:
        _execute(spec)


def _execute(spec: importlib.machinery.ModuleSpec) -> ModuleType:
    module = importlib.util.module_from_spec(spec)
    if spec.loader is not None:
        spec.loader.exec_module(module)
    return module


if os.environ.get("GRADWIRE_COMPAT") == "1":
    _install_after_torch()
_run_other_sitecustomize()
