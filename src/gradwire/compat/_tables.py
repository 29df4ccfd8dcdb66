"""Which names of which torch modules gradwire answers for.

One line for each torch module, with the function that makes its table. The function is called when a program has imported
the module, so what only this table needs (`gradwire.optim`, say) is imported inside the function. A name is listed at the
module that people find it in; wherever else the same object is bound (torch's submodules, its C modules, programs),
`_patching` finds it.
"""

from __future__ import annotations

import importlib

from torch.autograd import profiler_legacy

from gradwire.compat import _autograd, _futures, _modules, _profiling, _rpc, _rref, _shard
from gradwire.compat._patching import MakeTable, Patch, Table
from gradwire.rref import RRef

MODULES: dict[str, MakeTable] = {
    "torch.distributed.rpc": _rpc.make_package_table,
    "torch.distributed.rpc.api": _rpc.make_api_table,
    "torch.distributed.rpc.functions": _rpc.make_functions_table,
    "torch.distributed.rpc.backend_registry": _rpc.make_registry_table,
    "torch.distributed.autograd": _autograd.make_table,
    "torch.distributed.optim.optimizer": _modules.make_optimizer_table,
    "torch.distributed.nn.api.remote_module": _modules.make_remote_module_table,
    "torch.futures": _futures.make_table,
    "torch.distributed._shard": _shard.make_table,
    "torch.distributed._shard.sharded_optim": _shard.make_optimizer_table,
}


def make_patch() -> Patch:
    """Replace the names of all modules that are imported, and see to the others when they are.

    Raises:
        RuntimeError: torch's own rpc is running in this process.
    """
    _check_quiet()
    return Patch(MODULES, _make_class_tables())


def _make_class_tables() -> dict[type, Table]:
    return {
        RRef: _rref.METHODS,
        profiler_legacy.profile: {"__enter__": _profiling.enter, "__exit__": _profiling.leave},
        **{kind: {"__name__": name} for kind, name in _autograd.make_node_names().items()},
    }


def _check_quiet() -> None:
    inner = importlib.import_module("torch._C._distributed_rpc")
    if inner._is_current_rpc_agent_set():
        raise RuntimeError(
            "torch's own rpc is running in this process; call torch.distributed.rpc.shutdown() before compat.install()"
        )
