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
    "used": [gradwire.Cluster.__module__, *(getattr(gradwire, name).__name__ for name in
        ("checkpoint", "cluster", "nn", "optim", "rref", "shard"))],
    "names": [gradwire.nn.RemoteModule.__module__, gradwire.rpc.RRef.__module__, gradwire.rpc.remote.__module__],
    "rpc": sorted(set(gradwire.rpc.__all__) - set(dir(gradwire.rpc))),
    "after_use": (gradwire.Cluster.ray, sorted(sys.modules))[1],
}), flush=True)
"""


HEAVY = (
    "cryptography",
    "jinja2",
    "networkx",
    "pandas",
    "psutil",
    "rich",
    "safetensors",
    "scipy",
    "sympy",
    "torch._dynamo",
    "torch._export",
    "torch._functorch",
    "torch._inductor",
    "torch.distributed._shard",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic",
    "torch.distributed.fsdp",
    "torch.distributed.nn",
    "torch.distributed.optim",
    "torch.distributed.tensor",
    "torch.fx.experimental",
    "torch.onnx",
    "torch.testing",
)
DEFERRED = (
    "gradwire.checkpoint",
    "gradwire.cluster",
    "gradwire.nn",
    "gradwire.optim",
    "gradwire.rref",
    "gradwire.shard",
)
# What only a worker needs: imported when one starts.
WORKER_ONLY = (
    "gradwire.autograd.backward_pass",
    "gradwire.autograd.engine",
    "gradwire.autograd.interceptor",
    "gradwire.autograd.local_engine",
    "gradwire.autograd.rref_backward",
    "gradwire.params.snapshots",
)
LIBRARIES = {"cloudpickle", "gradwire", "msgspec"}
MAX_OWN_MODULES = 100


IMPORTS = ("import gradwire\n", "import gradwire.compat\ngradwire.compat.install()\n")
# One process for each import: copies of one that has torch and nothing of gradwire.
EACH = """
import os, torch
for program in {programs!r}:
    if os.fork() == 0:
        exec(program)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    """What happens in processes that import the package, and compat."""
    return run(EACH.format(programs=[PROGRAM.replace(IMPORTS[0], text) for text in IMPORTS]))


@pytest.fixture
def outcome(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """What happens in a process that imports the package."""
    return outcomes[0]


def run(program: str) -> list[Any]:
    """The lines that a fresh interpreter prints."""
    command = [sys.executable, "-W", "error", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{program}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


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
    unwanted = ("gradwire.testing", "gradwire.cli", "gradwire.dashboard", "gradwire.compat", "pytest", "ray", "typer")
    assert [name for name in outcome["modules"] if name.startswith(unwanted)] == []
    assert "gradwire.rpc.agent" in outcome["modules"]


def test_libraries_and_packages_that_many_programs_do_not_use_stay_out(outcome: dict[str, Any]) -> None:
    assert loaded(outcome, (*HEAVY, *DEFERRED)) == []


def test_what_only_a_worker_needs_stays_out(outcome: dict[str, Any]) -> None:
    assert loaded(outcome, WORKER_ONLY) == []


def test_few_modules_are_loaded(outcome: dict[str, Any]) -> None:
    """Launchers and data loaders import gradwire, too: what they do without is imported where it is used."""
    outside = {name.partition(".")[0] for name in outcome["modules"]} - set(sys.stdlib_module_names)
    assert outside <= LIBRARIES
    assert len([name for name in outcome["modules"] if name.startswith("gradwire")]) <= MAX_OWN_MODULES


def test_compat_brings_nothing_but_itself(outcomes: list[dict[str, Any]]) -> None:
    """Every rank of a program under compat pays for it."""
    _, found = outcomes
    assert "gradwire.compat.tables" in found["modules"]
    others = tuple(name for name in DEFERRED if name != "gradwire.rref")
    assert loaded(found, (*HEAVY, *others)) == []


def test_schedulers_are_imported_when_they_are_used(outcome: dict[str, Any]) -> None:
    assert [name for name in outcome["after_use"] if name.split(".")[0] in ("ray", "submitit")] == []


def test_the_command_line_does_without_torch() -> None:
    """`gradwire --help` has to appear at once; `run`, `status` and `keys` must not take a second to begin, either."""
    (found,) = run(
        "import json, gradwire_command, gradwire.cli.app\n"
        "names = {'torch', 'numpy', 'cryptography', 'rich.console'}\n"
        "first = sorted(names & set(sys.modules))\n"
        "import gradwire.cli.doctor, gradwire.cli.keys, gradwire.cli.status_view, gradwire.cluster.rank_processes\n"
        "import gradwire.cluster.message_auth, gradwire.transports.certificates\n"
        "print(json.dumps([first, sorted({'torch', 'numpy'} & set(sys.modules))]))"
    )
    assert found == [[], []]


def test_packages_are_imported_when_they_are_used(outcome: dict[str, Any]) -> None:
    assert outcome["used"] == ["gradwire.cluster.api", *DEFERRED]
    assert outcome["names"] == ["gradwire.nn.remote_module", "gradwire.rref.api", "gradwire.rref.api"]
    assert outcome["rpc"] == [], "dir() shows public names before they are imported"
    assert set(outcome["dir"]) > {"Cluster", "nn", "optim", "rpc"}


def loaded(outcome: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    """Modules of these packages that the import has brought."""
    return [module for module in outcome["modules"] if f"{module}.".startswith(tuple(f"{name}." for name in names))]
