"""`import gradwire` is quiet and light: no thread, no socket, no file, and nothing that many programs do not use."""

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
    "dir": dir(gradwire),
    "used": [gradwire.Cluster.__module__, gradwire.checkpoint.__name__, gradwire.cluster.__name__, gradwire.optim.__name__,
        gradwire.shard.__name__],
}))
"""


HEAVY = (
    "cryptography",
    "rich",
    "safetensors",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed._shard",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.nn",
    "torch.distributed.optim",
    "torch.distributed.tensor",
)
DEFERRED = ("gradwire.checkpoint", "gradwire.cluster", "gradwire.optim", "gradwire.shard")


@pytest.fixture(scope="module")
def outcome() -> dict[str, Any]:
    """What happens in a fresh process that imports the package."""
    found: dict[str, Any] = run(PROGRAM)
    return found


def run(program: str) -> Any:
    command = [sys.executable, "-W", "error", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{program}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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


def test_libraries_and_packages_that_many_programs_do_not_use_stay_out(outcome: dict[str, Any]) -> None:
    assert [name for name in outcome["modules"] if name.startswith((*HEAVY, *DEFERRED))] == []


def test_compat_brings_nothing_but_itself() -> None:
    """Every rank of a program under compat pays for it."""
    found = run(PROGRAM.replace("import gradwire\n", "import gradwire.compat\ngradwire.compat.install()\n"))
    assert "gradwire.compat._rpc" in found["modules"]
    assert [name for name in found["modules"] if name.startswith((*HEAVY, *DEFERRED))] == []


def test_packages_are_imported_when_they_are_used(outcome: dict[str, Any]) -> None:
    assert outcome["used"] == ["gradwire.cluster.api", *DEFERRED]
    assert set(outcome["dir"]) > {"Cluster", "optim", "rpc"}
