"""`import gradwire` is quiet: no thread, no socket, no file, and nothing of torch's own rpc."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import json, os, sys, threading

opened = []
def watch(event, args):
    if event in ("socket.__new__", "socket.bind", "socket.connect", "subprocess.Popen", "os.fork", "os.exec"):
        opened.append(event)

import torch
before = set(sys.modules), len(os.listdir("/proc/self/task")), sorted(os.listdir("/proc/self/fd"))
sys.addaudithook(watch)
import gradwire
modules = set(sys.modules) - before[0]
print(json.dumps({
    "opened": opened,
    "threads": [thread.name for thread in threading.enumerate()],
    "num_tasks": [before[1], len(os.listdir("/proc/self/task"))],
    "fds": [before[2], sorted(os.listdir("/proc/self/fd"))],
    "modules": sorted(modules),
}))
"""


@pytest.fixture(scope="module")
def outcome() -> dict[str, Any]:
    """What happens in a fresh process that imports the package."""
    command = [sys.executable, "-W", "error", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{PROGRAM}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_no_thread_is_started(outcome: dict[str, Any]) -> None:
    assert outcome["threads"] == ["MainThread"]
    assert outcome["num_tasks"][0] == outcome["num_tasks"][1]


def test_nothing_is_opened(outcome: dict[str, Any]) -> None:
    assert outcome["opened"] == []
    assert outcome["fds"][0] == outcome["fds"][1]


def test_torch_s_own_rpc_and_autograd_stay_out(outcome: dict[str, Any]) -> None:
    peers = ("torch.distributed.rpc", "torch.distributed.autograd", "torch.distributed.optim")
    assert [name for name in outcome["modules"] if name.startswith(peers)] == []


def test_neither_tests_nor_optional_parts_come_along(outcome: dict[str, Any]) -> None:
    unwanted = ("gradwire.testing", "gradwire.cli", "gradwire.dashboard", "gradwire.compat", "pytest", "ray")
    assert [name for name in outcome["modules"] if name.startswith(unwanted)] == []
    assert "gradwire.rpc.agent" in outcome["modules"]
