"""What `import gradwire` leaves out is there when another worker, or `torch.load`, asks for it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from gradwire import runtime
from gradwire.rpc import functions
from gradwire.wire import _registry

PROGRAM = """
import io, json, sys
import gradwire, torch
from gradwire.rpc.functions import exposed_function
from gradwire.wire import _registry
from gradwire.wire.objects import import_home

functions, classes = json.loads(sys.argv[1])
left_out = [name for name in gradwire.runtime.DEFERRED if f"gradwire.{name}" not in sys.modules]
unknown = [exposed_function("gradwire.antigravity.x"), exposed_function("antigravity:x"), import_home("antigravity")]
lost = [name for name in functions if exposed_function(name) is None]
lost += [name for name in classes if name not in _registry.BY_NAME and not (import_home(name) and name in _registry.BY_NAME)]

class Pickled:
    def __reduce__(self):
        return gradwire.shard.travel.load_pickled, (1, 2, 3, 4, 5)

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


@pytest.fixture(scope="module")
def outcome() -> dict[str, Any]:
    """What a fresh process finds under the names that this one, which has imported everything, knows."""
    runtime.import_all()
    names = [
        [name for name in table if name.startswith("gradwire.")] for table in (functions._exposed, _registry.BY_NAME)
    ]
    assert {"gradwire.optim.make", "gradwire.checkpoint.write", "gradwire.nn.make"} <= set(names[0])
    assert {"gradwire.ShardedTensor", "gradwire.RemoteModule", "gradwire.RRef"} <= set(names[1])
    command = [sys.executable, "-c", PROGRAM, json.dumps(names)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_whatever_gradwire_registers_is_found_in_a_fresh_worker(outcome: dict[str, Any]) -> None:
    assert outcome["left_out"] == list(runtime.DEFERRED), "otherwise this shows nothing"
    assert outcome["lost"] == []


def test_nothing_else_is_imported_for_a_name(outcome: dict[str, Any]) -> None:
    assert outcome["unknown"] == [None, None, False]
    assert not outcome["is_antigravity"]


def test_torch_load_takes_a_sharded_tensor(outcome: dict[str, Any]) -> None:
    assert "initialize default process group" in outcome["loading"]
