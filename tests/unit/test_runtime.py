"""What `import gradwire` leaves out is there when another worker, or `torch.load`, asks for it."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

import quick_python
from gradwire import runtime
from gradwire.rpc import functions
from gradwire.wire import plain as _registry

PROGRAM = """
import io, json, sys
import gradwire, torch
from gradwire.rpc.functions import exposed_function
from gradwire.wire import plain as _registry
from gradwire.wire.serialization import import_home

functions, classes = json.loads(sys.argv[1])
left_out = [name for name in gradwire.runtime.DEFERRED if f"gradwire.{name}" not in sys.modules]
unknown = [exposed_function("gradwire.antigravity.x"), exposed_function("antigravity:x"), import_home("antigravity")]
lost = [name for name in functions if exposed_function(name) is None]
lost += [name for name in classes if name not in _registry.BY_NAME and not (import_home(name) and name in _registry.BY_NAME)]

class Pickled:
    def __reduce__(self):
        return gradwire.shard.serialization.load_pickled, (1, 2, 3, 4, 5)

buffer = io.BytesIO()
torch.save(Pickled(), buffer)
buffer.seek(0)
try:
    torch.load(buffer)
except RuntimeError as error:
    loading = str(error)
is_antigravity = "antigravity" in sys.modules
print(json.dumps({name: globals()[name] for name in ("left_out", "unknown", "lost", "is_antigravity", "loading")}))
"""
START_WORKERS = """
import json, secrets, sys
import gradwire
from gradwire.config import WorkerConfig
from gradwire.rpc.peers import StaticDirectory

def own_modules():
    return {name for name in sys.modules if name.startswith("gradwire")}

if sys.argv[1] == "import_all":
    gradwire.runtime.import_all()
known = own_modules()
config = WorkerConfig(transports=("unix",), token=secrets.token_bytes(16))
directory = StaticDirectory()
agents = [gradwire.runtime.start_worker(gradwire.WorkerInfo(name, i), config, directory) for i, name in enumerate("ab")]
late = own_modules() - known
for agent in agents:
    agent.close()
print(json.dumps(sorted(late)))
"""
OWNER = """
import json, sys
import gradwire
from gradwire import rpc

had = "gradwire.nn" in sys.modules
rpc.init_rpc("owner", rank=1, world_size=2, rpc_backend_options=rpc.RpcOptions(init_method=f"file://{sys.argv[1]}"))
rpc.shutdown()
print(json.dumps([had, "gradwire.nn" in sys.modules]))
"""
USER = """
import json, sys
import gradwire, torch
from gradwire import rpc

rpc.init_rpc("user", rank=0, world_size=2, rpc_backend_options=rpc.RpcOptions(init_method=f"file://{sys.argv[1]}"))
module = gradwire.nn.RemoteModule("owner/cpu", torch.nn.Linear, args=(2, 3))
shape = list(module(torch.ones(1, 2)).shape)
rref = rpc.remote("owner", torch.ones, args=(2,))
value = rref.to_here().tolist()
del module, rref  # a shutdown waits for references
rpc.shutdown()
print(json.dumps([shape, value]))
"""
# Processes for one program after the other: copies of one that has torch and nothing of gradwire.
EACH = """
import json, os, sys, torch
for program, *arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    if os.fork() == 0:
        exec(program, {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0
"""


class Outcomes(NamedTuple):
    """What programs print, each in a process that has not imported gradwire before."""

    names: dict[str, Any]  # that this process knows, which has imported everything
    late: list[str]
    late_otherwise: list[str]
    owner: list[bool]
    user: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    runtime.import_all()
    names = [
        [name for name in table if name.startswith("gradwire.")] for table in (functions.exposed, _registry.BY_NAME)
    ]
    assert {"gradwire.optim.make", "gradwire.checkpoint.write", "gradwire.nn.make"} <= set(names[0])
    assert {"gradwire.ShardedTensor", "gradwire.RemoteModule", "gradwire.RRef"} <= set(names[1])
    meeting = str(tmp_path_factory.mktemp("runtime") / "meeting")
    programs = [
        (PROGRAM, json.dumps(names)),
        (START_WORKERS, "import_all"),
        (START_WORKERS, "nothing"),
        (OWNER, meeting),
    ]
    with ThreadPoolExecutor(1) as pool:
        user = pool.submit(quick_python.run, [sys.executable, "-c", USER, meeting], timeout=100)
        done = subprocess.run(
            [sys.executable, "-c", EACH, json.dumps(programs)], capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        found, late, late_otherwise, owner = map(json.loads, done.stdout.splitlines())
        return Outcomes(found, late, late_otherwise, owner, user.result())


@pytest.fixture
def outcome(outcomes: Outcomes) -> dict[str, Any]:
    """What a fresh process finds under the names that this one knows."""
    return outcomes.names


def test_whatever_gradwire_registers_is_found_in_a_fresh_worker(outcome: dict[str, Any]) -> None:
    assert outcome["left_out"] == list(runtime.DEFERRED), "otherwise this shows nothing"
    assert outcome["lost"] == []


def test_nothing_else_is_imported_for_a_name(outcome: dict[str, Any]) -> None:
    assert outcome["unknown"] == [None, None, False]
    assert not outcome["is_antigravity"]


def test_torch_load_takes_a_sharded_tensor(outcome: dict[str, Any]) -> None:
    assert "initialize default process group" in outcome["loading"]


def test_import_all_leaves_nothing_to_import_for_a_worker_that_starts(outcomes: Outcomes) -> None:
    """A process that forks workers imports everything once, for all of them."""
    some = {"gradwire.autograd.engine", "gradwire.rref.context"}
    assert some <= set(outcomes.late_otherwise), "otherwise this shows nothing"
    assert outcomes.late == []


def test_a_worker_serves_operations_of_a_package_that_it_has_not_imported(outcomes: Outcomes) -> None:
    assert outcomes.owner == [False, True]
    assert (outcomes.user.stdout, outcomes.user.stderr) == ("[[1, 3], [1.0, 1.0]]\n", "")
