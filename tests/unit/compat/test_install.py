"""torch's names mean gradwire's between `install` and `uninstall`, wherever they are bound, and torch's afterwards."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator

import pytest
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.rpc.api import rpc_sync

import gradwire
from gradwire import compat
from gradwire.compat import tables as _tables
from gradwire.compat.import_hook import ImportHook
from gradwire.compat.patching import MISSING, Patch, has_identity

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


@pytest.fixture(autouse=True)
def _nothing_installed() -> Iterator[None]:
    assert not compat.is_installed()
    yield
    while compat.is_installed():
        compat.uninstall()


@pytest.fixture
def program() -> Iterator[types.ModuleType]:
    """A module that has imported torch's names before."""
    made = types.ModuleType("program_of_before")
    sys.modules[made.__name__] = made
    exec(
        "from torch.distributed.rpc import rpc_sync, RRef as Reference\n"
        "import torch.distributed.rpc as rpc\n"
        "UNSET = rpc.constants.UNSET_RPC_TIMEOUT\n"
        "class Caller:\n"
        "    call = rpc_sync\n"
        "    plain = staticmethod(rpc_sync)\n",
        made.__dict__,
    )
    yield made
    del sys.modules[made.__name__]


def value_at(place: str) -> object:
    module, _, name = place.rpartition(".")
    return getattr(sys.modules[module], name)


def import_all() -> None:
    """Import all of torch's modules that are answered for."""
    with warnings.catch_warnings():  # torch warns of itself when its optimizers are imported
        warnings.simplefilter("ignore")
        for name in _tables.NAMES:
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
    patch = _tables.make_patch()
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


def test_a_patch_that_fails_leaves_nothing(program: types.ModuleType) -> None:
    program.first = before = object()  # type: ignore[attr-defined]
    tables = {program.__name__: lambda: {"first": 1, "second": 2}}
    with pytest.raises(TypeError):
        Patch(tables, {int: {"real": 3}})  # a built-in class cannot be changed
    assert vars(program)["first"] is before
    assert "second" not in vars(program)
    assert [hook for hook in sys.meta_path if isinstance(hook, ImportHook)] == []


def test_modules_imported_before_are_reached(program: types.ModuleType) -> None:
    torch_s_own, constant = program.rpc_sync, program.UNSET
    with compat.installed():
        assert program.rpc_sync is rpc.rpc_sync
        assert program.rpc_sync is not torch_s_own
        assert program.Reference is gradwire.rpc.RRef
        assert program.Caller.__dict__["call"] is rpc.rpc_sync
        assert program.Caller.plain is rpc.rpc_sync
        assert program.UNSET is constant, "numbers stay"
    assert program.rpc_sync is torch_s_own
    assert program.Caller.__dict__["call"] is torch_s_own
    assert program.Caller.plain is torch_s_own


def test_classes_with_ideas_of_their_own_are_left_alone(program: types.ModuleType) -> None:
    class Hostile(type):
        @property
        def __module__(cls) -> str:  # type: ignore[override]
            raise ValueError("no module")

    program.strange = Hostile("Strange", (), {})  # type: ignore[attr-defined]
    with compat.installed():
        assert home_of(program.rpc_sync) == "gradwire"


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
    run = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, timeout=100, check=False)
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


def test_gradwire_s_own_modules_are_left_alone() -> None:
    before = {name: dict(vars(module)) for name, module in sys.modules.items() if name.startswith("gradwire.")}
    with compat.installed():
        for name, names in before.items():
            changed = [
                key for key, value in vars(sys.modules[name]).items() if key in names and names[key] is not value
            ]
            assert [key for key in changed if not key.startswith("_")] == [], name


@pytest.mark.parametrize("value", [1, 1.5, "text", None, (), sys])
def test_plain_values_have_no_identity(value: object) -> None:
    assert not has_identity(value)
    assert has_identity(has_identity)
    assert has_identity(object())


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
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True)
    first, second = run.stdout.splitlines()
    assert "torch's own rpc is running" in first
    assert second.startswith("gradwire.")
