"""Every example runs as people run it, and ends with the line it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LAST_LINES = {
    "exposed_only.py": r"exposed_only: prediction is right: True, refused: 3 of 3",
    "parameter_average.py": r"parameter_average: loss fell from 0\.\d+ to 0\.0[01]\d",
    "remote_calls.py": r"remote_calls: \d+ calls answered, no worker left behind",
    "torch_style.py": r"torch_style: the sum is \[30\.0, 36\.0\], expected \[30\.0, 36\.0\]",
    "two_hosts_tls.py": r"two_hosts_tls: both workers ended with \[0, 0\]",
}
RUN_BY_MAKE = {"demo.py"}  # `make demo` runs it
DEADLINE_S = 90  # each takes seconds; a busy machine may need more


def test_no_example_is_left_out() -> None:
    found = {path.name for path in EXAMPLES.glob("*.py")}
    assert found - RUN_BY_MAKE == set(LAST_LINES)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LAST_LINES))
def test_example(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},  # works without an installed package, too
        cwd=tmp_path,  # an example must not depend on where it is started, nor leave anything there
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.fullmatch(LAST_LINES[name], done.stdout.splitlines()[-1]), done.stdout
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []
