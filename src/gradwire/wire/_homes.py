"""Names of gradwire's own functions and classes whose module is imported when another worker first uses one of them.

Most workers never save a checkpoint or shard a tensor, so these parts are not imported with `gradwire`. A peer may still ask
for their functions, or send their objects. The names are fixed: nothing that a peer chooses is imported.
"""

from __future__ import annotations

import importlib
from typing import Final

_OWN: Final = "gradwire."
_homes: dict[str, str] = {}  # modules, by a name or by what a name has before its last dot


def set_home(name: str, module: str) -> None:
    """Say which module registers a name, or all names that begin with ``name.``."""
    _homes[name] = module


def import_home(name: str) -> bool:
    """Import the module that registers a name; whether there is one."""
    if not name.startswith(_OWN):
        return False
    module = _homes.get(name) or _homes.get(name.rpartition(".")[0])
    if module is None:
        return False
    importlib.import_module(module)
    return True
