"""Where only what gradwire declares is installed, it works and is quiet."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch
import gradwire

if __name__ == "__main__":
    with gradwire.Cluster.local(2) as cluster:
        module = cluster.workers[0].module(torch.nn.Linear, 2, 1)
        with gradwire.autograd.context() as ctx:
            ctx.backward(cluster.workers[1].call(torch.relu, module(torch.ones(2))).sum())
        print(cluster.map(abs, [-1, 2]))
"""
HIDING = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""


def declared() -> set[str]:
    """What `pip install gradwire` brings along."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    waiting, known = [Requirement(line) for line in re.findall(r'"(.+?)"', found[1])], set()
    while waiting:
        requirement = waiting.pop()
        name = requirement.name.lower().replace("_", "-")
        if name not in known and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            known.add(name)
            waiting.extend(Requirement(line) for line in importlib.metadata.requires(name) or ())
    return known


@pytest.mark.slow
def test_a_program_in_a_fresh_environment(tmp_path: Path) -> None:
    expected = declared()
    kept, others = set(), set()
    for package in importlib.metadata.distributions():
        is_kept = package.metadata["Name"].lower().replace("_", "-") in {*expected, "gradwire"}
        (kept if is_kept else others).update(file.parts[0].partition(".")[0] for file in package.files or ())
    hidden = {name for name in others - kept if name.isidentifier()}
    assert {"pytest", "hypothesis"} <= hidden
    (tmp_path / "sitecustomize.py").write_text(HIDING.format(names=hidden))
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}
    run = subprocess.run(
        [sys.executable, tmp_path / "program.py"],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "[1, 2]\n", "")
