"""Which names of which torch modules gradwire answers for.

One function for each part of gradwire. A name is listed at the module that people find it in; wherever else the same object
is bound (torch's submodules, its C modules, programs), `_patching` finds it.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch.autograd import profiler_legacy

from gradwire.compat import _autograd, _futures, _modules, _profiling, _rpc, _rref
from gradwire.rref import RRef

Table = Mapping[str, Any]


def make_tables() -> dict[ModuleType | type, Table]:
    """By torch module, the values of its names; imports all of them. By class, its name.

    Raises:
        RuntimeError: torch's own rpc is running in this process.
    """
    parts = (_rpc, _autograd, _futures, _modules)
    named: dict[str, Table] = {name: table for part in parts for name, table in part.make_tables().items()}
    with warnings.catch_warnings():  # torch warns of itself when its optimizers are imported
        warnings.simplefilter("ignore")
        tables: dict[ModuleType | type, Table] = {importlib.import_module(name): item for name, item in named.items()}
    _check_quiet()
    tables[RRef] = _rref.METHODS
    tables[profiler_legacy.profile] = {"__enter__": _profiling.enter, "__exit__": _profiling.leave}
    return {**tables, **{kind: {"__name__": name} for kind, name in _autograd.make_node_names().items()}}


def _check_quiet() -> None:
    inner = importlib.import_module("torch._C._distributed_rpc")
    if inner._is_current_rpc_agent_set():
        raise RuntimeError(
            "torch's own rpc is running in this process; call torch.distributed.rpc.shutdown() before compat.install()"
        )
