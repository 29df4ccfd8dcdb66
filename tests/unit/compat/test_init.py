"""torch's names mean gradwire's between `install` and `uninstall`, wherever they are bound, and torch's afterwards."""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.rpc.api import rpc_sync

import gradwire
import quick_python
from gradwire import compat
from gradwire.compat import tables
from gradwire.compat.patching import MISSING
from gradwire.rpc.agent import Agent, attachments
from gradwire.testing import local_agents

PLACES = (
    "torch.distributed.rpc.rpc_async",
    "torch.distributed.rpc.api.rpc_async",
    "torch.distributed.rpc.functions.async_execution",
    "torch.distributed.rpc.backend_registry.BackendType",
    "torch.distributed.rpc.TensorPipeRpcBackendOptions",
    "torch.distributed.rpc.RRef",
    "torch._C._distributed_rpc.PyRRef",
    "torch._C._distributed_rpc.WorkerInfo",
    "torch._C._distributed_autograd.backward",
    "torch.distributed.autograd.context",
    "torch.distributed.optim.DistributedOptimizer",
    "torch.distributed.nn.RemoteModule",
    "torch.distributed.nn.api.remote_module.RemoteModule",
    "torch.distributed._shard.shard_module",
    "torch.distributed._shard._utils.narrow_tensor_by_index",
    "torch.distributed._shard.metadata.ShardMetadata",
    "torch.distributed._shard.sharded_tensor.ShardedTensor",
    "torch.distributed._shard.sharded_tensor.api.ShardedTensorBase",
    "torch.distributed._shard.sharded_tensor.utils._parse_and_validate_remote_device",
    "torch.distributed._shard.sharding_spec.ChunkShardingSpec",
    "torch.distributed._shard.sharding_spec.api.ShardingSpec",
    "torch.distributed._shard.sharding_plan.ShardingPlan",
    "torch.distributed._shard.sharder.Sharder",
    "torch.distributed._shard.sharded_optim.ShardedOptimizer",
)


def value_at(place: str) -> object:
    module, _, name = place.rpartition(".")
    return getattr(sys.modules[module], name)


def import_all() -> None:
    """Import all of torch's modules that are answered for."""
    with warnings.catch_warnings():  # torch warns of itself when its optimizers are imported
        warnings.simplefilter("ignore")
        for name in tables.NAMES:
            importlib.import_module(name)
        importlib.import_module("torch.distributed.nn")


def home_of(value: object) -> str:
    return str(value.__module__).partition(".")[0]


@pytest.mark.parametrize("place", PLACES)
def test_every_place_has_gradwire_s_object_and_then_the_old_one(place: str) -> None:
    import_all()
    before = value_at(place)
    assert home_of(before) == "torch"
    with compat.installed():
        assert home_of(value_at(place)) == "gradwire"
    assert value_at(place) is before


def test_uninstall_restores_the_identity_of_everything() -> None:
    import_all()
    patch = tables.make_patch()
    changes = list(patch._undo)
    patch.undo()
    patch.undo()
    assert len(changes) > 80
    for holder, name, old in changes:
        if old is MISSING:
            assert name not in vars(holder), (holder, name)
        elif name == "__name__":
            assert holder.__name__ == old
        else:
            assert vars(holder)[name] is old, (holder, name)


def test_modules_imported_later_get_gradwire_s() -> None:
    before = dist_autograd.backward
    with compat.installed():
        names: dict[str, object] = {}
        exec("from torch.distributed.autograd import backward, context", names)
        assert names["context"] is gradwire.autograd.context
        assert names["backward"] is not before
    assert dist_autograd.backward is before


LATER = """
import sys
from gradwire import compat

HEAVY = ("torch.distributed.optim", "torch.distributed.nn", "torch.distributed.fsdp", "torch.distributed.tensor", "sympy")

def home(value):
    return value.__module__.partition(".")[0]

compat.install()
print(*[name for name in HEAVY if name in sys.modules])
import importlib
import torch.distributed.nn, torch.distributed.optim
from torch.distributed.nn.api import remote_module
from torch.distributed.optim import optimizer
PLACES = ((torch.distributed.nn, "RemoteModule"), (remote_module, "_RemoteModule"), (optimizer, "DistributedOptimizer"),
    (torch.distributed.optim, "DistributedOptimizer"))
print(*[home(getattr(*place)) for place in PLACES])
print(type(optimizer.__loader__).__name__, type(optimizer.__spec__.loader).__name__)
print(home(importlib.reload(optimizer).DistributedOptimizer))
compat.uninstall()
print(*[home(getattr(*place)) for place in PLACES])
print(*[getattr(*place).__name__ for place in PLACES])
"""


def test_torch_s_modules_that_are_imported_later_are_changed_then_and_changed_back() -> None:
    run = quick_python.run([sys.executable, "-c", LATER], timeout=100)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "",
        "gradwire gradwire gradwire gradwire",
        "SourceFileLoader SourceFileLoader",
        "gradwire",
        "torch torch torch torch",
        "RemoteModule _RemoteModule DistributedOptimizer DistributedOptimizer",
    ]


def test_this_module_is_one_of_those() -> None:
    with compat.installed():
        assert home_of(rpc_sync) == "gradwire"
    assert home_of(rpc_sync) == "torch"


def test_installing_nests() -> None:
    compat.uninstall()  # without effect
    before = rpc.rpc_sync
    compat.install()
    compat.install()
    inside = rpc.rpc_sync
    compat.uninstall()
    assert compat.is_installed()
    assert rpc.rpc_sync is inside
    compat.uninstall()
    assert not compat.is_installed()
    assert rpc.rpc_sync is before


def test_torch_s_own_workers_must_be_gone(tmp_path: object) -> None:
    text = (
        "import torch.distributed.rpc as rpc, gradwire.compat\n"
        f"options = rpc.TensorPipeRpcBackendOptions(init_method='file://{tmp_path}/meeting')\n"
        "rpc.init_rpc('w', rank=0, world_size=1, rpc_backend_options=options)\n"
        "try:\n"
        "    gradwire.compat.install()\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
        "rpc.shutdown()\n"
        "gradwire.compat.install()\n"
        "print(rpc.rpc_sync.__module__)\n"
    )
    run = quick_python.run([sys.executable, "-c", text], timeout=60, check=True)
    first, second = (line for line in run.stdout.splitlines() if not line.startswith("[Gloo]"))  # torch 2.8 prints that
    assert "torch's own rpc is running" in first
    assert second.startswith("gradwire.")


def fail() -> None:
    raise ValueError("on purpose")


def test_failures_are_printed_between_install_and_uninstall(
    make_agents: Callable[..., list[Agent]], capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("gradwire.failures")
    before = logger.level, logger.propagate, list(logger.handlers)
    first, second = make_agents(2)
    compat.install()
    compat.install()
    try:
        with pytest.raises(ValueError, match="on purpose"):
            first.call(second.info.name, fail)
    finally:
        compat.uninstall()
        compat.uninstall()
    printed = capsys.readouterr().err
    assert f"on worker {second.info.name}" in printed
    assert "ValueError: on purpose" in printed
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
    with pytest.raises(ValueError, match="on purpose"):
        first.call(second.info.name, fail)
    assert "on purpose" not in capsys.readouterr().err


def test_profiles_have_the_rank_of_a_worker_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event of a call that came meanwhile would begin with one rank and end with another, which torch cannot read."""
    seen = []

    def profile(agent: Agent) -> None:
        with torch.autograd.profiler_legacy.profile() as events:
            torch.ones(1).add(1)
        seen.append((agent.info.id, {event.node_id for event in events.function_events}))

    with compat.installed():
        monkeypatch.setattr("gradwire.rpc.agent.attachments", [*attachments, profile])
        with local_agents(2, "inproc"):
            assert seen == [(0, {0}), (1, {1})]
    assert len(attachments) == 1
