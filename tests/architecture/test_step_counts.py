"""How many functions the path of one step enters: it is easy to make longer, and times on a busy machine do not show it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import quick_python

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "count_step.py"

# Of a warm step in both processes, with a margin: on a busy machine a few more threads are woken.
MOST = {
    "context": {"own_calls": 450, "own_files": 31, "all_calls": 1260},
    "echo": {"own_calls": 90, "own_files": 17, "all_calls": 290},
    "noop": {"own_calls": 80, "own_files": 16, "all_calls": 230},
}


@pytest.mark.parametrize("case", MOST)
def test_a_step_enters_few_functions(case: str) -> None:
    command = [sys.executable, str(SCRIPT), "--case", case, "--json"]
    run = quick_python.run(command, timeout=100, env={**os.environ, quick_python.NESTED: "1"})
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["own_calls"] > 20, "otherwise nothing was counted"
    assert {name: found[name] for name in MOST[case] if found[name] > MOST[case][name]} == {}
