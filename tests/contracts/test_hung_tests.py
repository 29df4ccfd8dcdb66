"""What is printed about a test that takes too long (`hung_tests`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = """
import hung_tests
from hung_tests import pytest_configure, pytest_timeout_set_timer

hung_tests.GRACE_S = 1.0
"""
TEST = """
import ctypes, os, time

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

def test_that_keeps_the_gil():
    ctypes.PyDLL(None).sleep(60)
"""


def run_test(folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_hang.py").write_text(TEST)
    options = ["-n", "1", "-o", "timeout=1", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, f"test_hang.py::{name}"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_stacks_of_all_processes_are_printed(tmp_path: Path) -> None:
    done = run_test(tmp_path, "test_that_hangs")
    assert done.returncode == 1
    assert "test_hang.py::test_that_hangs has not ended within 1 s" in done.stderr
    assert "wait_in_the_test" in done.stderr
    assert "wait_in_its_child" in done.stderr or "Permission Denied" in done.stderr  # of the system, for py-spy
    assert "1 failed" in done.stdout


def test_a_process_ends_in_which_no_thread_can_run(tmp_path: Path) -> None:
    done = run_test(tmp_path, "test_that_keeps_the_gil")
    assert done.returncode == 1
    assert "in test_that_keeps_the_gil" in done.stderr
    assert "1 failed" in done.stdout
