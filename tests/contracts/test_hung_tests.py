"""What is printed about a test that takes too long (`hung_tests`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = "from hung_tests import pytest_configure, pytest_timeout_set_timer"
TEST = """
import os, time

def wait_in_the_test():
    time.sleep(60)

def wait_in_its_child(parent):
    while os.getppid() == parent:
        time.sleep(0.01)
    os._exit(0)

def test_that_hangs():
    parent = os.getpid()
    if os.fork() == 0:
        wait_in_its_child(parent)
    wait_in_the_test()
"""


def test_stacks_of_all_processes_are_printed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_hang.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-n", "1", "-o", "timeout=1", "-p", "no:cacheprovider", "test_hang.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "test_hang.py::test_that_hangs has not ended within 1 s" in done.stderr
    assert "wait_in_the_test" in done.stderr
    assert "wait_in_its_child" in done.stderr
    assert "1 failed" in done.stdout
