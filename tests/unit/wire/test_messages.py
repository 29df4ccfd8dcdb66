"""Message types: what threads check notes against is known to msgspec before there are threads."""

from __future__ import annotations

import json
import subprocess
import sys

import quick_python

PROGRAM = """
import gc, json, msgspec, gradwire
import gradwire.autograd._backward_state
import gradwire.autograd.messages, gradwire.autograd.explanation, gradwire.rref.reliable, gradwire.rref.owner
modules = (gradwire.autograd.messages, gradwire.rref.reliable, gradwire.rref.owner)
kinds = [
    kind
    for module in modules
    for kind in vars(module).values()
    if isinstance(kind, type(msgspec.Struct)) and kind.__module__ == module.__name__
]
kinds += [gradwire.autograd.explanation.WorkerView, gradwire.autograd._backward_state.PassSnapshot]
def is_known(kind):
    return any(type(item).__name__ == "StructInfo" for item in gc.get_referents(kind))
print(json.dumps({kind.__qualname__: is_known(kind) for kind in kinds}))
"""


def test_every_type_of_a_note_is_prepared_on_import() -> None:
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{PROGRAM}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    known = json.loads(run.stdout)
    assert {"Batch", "Creates", "PropagateGradients", "WorkerView"} <= known.keys()
    assert [name for name, is_known in known.items() if not is_known] == []


THREADS = """
import sys, threading, msgspec
from typing import Annotated, Any
from gradwire.wire.messages import read_plain
sys.setswitchinterval(1e-6)
Small = Annotated[int, msgspec.Meta(ge=0, le=100)]
fields = [("a", Small), ("b", dict[int, dict[str, Any]] | None), ("c", tuple[Small, ...])]
for _ in range(100):
    kind = msgspec.defstruct("Order", fields, array_like=True)
    ready = threading.Barrier(4)
    threads = [
        threading.Thread(target=lambda: (ready.wait(), read_plain((1, None, (2, 3)), kind, ""))) for _ in range(4)
    ]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""


def test_threads_that_read_the_same_type_first_do_no_harm() -> None:
    """Two workers that ask an owner for the first step at the same moment, say."""
    run = quick_python.run([sys.executable, "-c", THREADS], timeout=100)
    assert (run.returncode, run.stderr) == (0, "")
