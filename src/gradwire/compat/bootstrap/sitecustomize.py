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
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class AfterTorch:
    """Finds torch as ever, and has compat installed when its import has ended."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """The import system's question; answered for torch alone, and once."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _then_install(spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _then_install(execute: Any) -> Any:
    def exec_module(module: ModuleType) -> None:
        execute(module)
        from gradwire import compat

        compat.install()

    return exec_module


def _run_other_sitecustomize() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    others = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("GRADWIRE_COMPAT") == "1":
    sys.meta_path.insert(0, AfterTorch())
_run_other_sitecustomize()
