"""What accelerators cost programs that have none."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import gradwire

_SOURCE = Path(gradwire.__file__).parent
_PROGRAM = """
import sys
import torch
import gradwire as gw
from gradwire.testing import local_agents

with local_agents(2) as (a, b):
    for size in (1, 100_000):
        for _ in range(3):
            assert torch.equal(a.call("b", torch.neg, (torch.ones(size),)), -torch.ones(size))
            a.call("a", torch.neg, (torch.ones(size),))
print("gradwire.wire.device_copies" in sys.modules)
"""


def test_programs_on_the_cpu_never_import_what_copies_to_devices() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_no_code_waits_for_a_whole_device_or_stream() -> None:
    found = [
        f"{path.relative_to(_SOURCE)}:{node.lineno}"
        for path in _SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "synchronize"
    ]
    assert found == []
