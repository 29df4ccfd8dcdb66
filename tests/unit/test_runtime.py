"""What `import gradwire` leaves out is there when another worker, or `torch.load`, asks for it."""

from __future__ import annotations

import json
import subprocess
import sys

from gradwire import runtime
from gradwire.rpc import functions
from gradwire.wire import _registry

PROGRAM = """
import json, sys
import gradwire, torch
from gradwire.rpc.functions import exposed_function
from gradwire.wire import _registry
from gradwire.wire.objects import import_home

functions, classes = json.loads(sys.argv[1])
left_out = [name for name in gradwire.runtime.DEFERRED if f"gradwire.{name}" in sys.modules]
unknown = [exposed_function("gradwire.antigravity.x"), exposed_function("antigravity:x"), import_home("antigravity")]
lost = [name for name in functions if exposed_function(name) is None]
lost += [name for name in classes if name not in _registry.BY_NAME and not (import_home(name) and name in _registry.BY_NAME)]
print(json.dumps([left_out, unknown, lost, "antigravity" in sys.modules]))
"""


def fresh(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_whatever_gradwire_registers_is_found_in_a_fresh_worker() -> None:
    runtime.import_all()
    names = [
        [name for name in table if name.startswith("gradwire.")] for table in (functions._exposed, _registry.BY_NAME)
    ]
    assert {"gradwire.optim.make", "gradwire.checkpoint.write", "gradwire.nn.make"} <= set(names[0])
    assert {"gradwire.ShardedTensor", "gradwire.RemoteModule", "gradwire.RRef"} <= set(names[1])
    assert json.loads(fresh(PROGRAM, json.dumps(names))) == [[], [None, None, False], [], False]


def test_torch_load_imports_what_a_sharded_tensor_needs() -> None:
    program = (
        "import io, torch, gradwire\n"
        "class Pickled:\n"
        "    def __reduce__(self):\n"
        "        from gradwire.shard.travel import load_pickled\n"
        "        return load_pickled, (1, 2, 3, 4, 5)\n"
        "buffer = io.BytesIO()\n"
        "torch.save(Pickled(), buffer)\n"
        "buffer.seek(0)\n"
        "try:\n"
        "    torch.load(buffer)\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    assert "initialize the default process group" in fresh(program)
