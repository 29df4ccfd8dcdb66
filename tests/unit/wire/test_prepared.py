"""Types that threads check notes against are known to msgspec before there are threads."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import gc, json, msgspec, gradwire
import gradwire.autograd.messages, gradwire.autograd.probing, gradwire.rref._outbox, gradwire.rref.creation
modules = (gradwire.autograd.messages, gradwire.rref._outbox, gradwire.rref.creation)
kinds = [
    kind
    for module in modules
    for kind in vars(module).values()
    if isinstance(kind, type(msgspec.Struct)) and kind.__module__ == module.__name__
]
kinds += [gradwire.autograd.probing.WorkerView, gradwire.autograd.probing.PassSnapshot]
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
