"""Every way to start a cluster keeps the contract of `gradwire.testing.check_cluster`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import quick_python
from cluster.ray_nodes import nodes_of_a_program
from gradwire.testing import CLUSTER_CHECKS, check_cluster
from gradwire.testing.clusters import NUM_WORKERS

pytestmark = pytest.mark.timeout(180)  # the program of a check fails after 120 s, with its output

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_WORKERS + 1}"]
IN_ORDER = [check for check in CLUSTER_CHECKS if check not in ("ctrl_c", "driver_death")]


def each(**checks: list[str]) -> pytest.MarkDecorator:
    """For each name a test with these checks."""
    return pytest.mark.parametrize("checks", checks.values(), ids=checks)


def groups(**checks: list[str]) -> pytest.MarkDecorator:
    """For each name a test with these checks; and a test for each check at which the driver ends."""
    return each(**checks, ctrl_c=["ctrl_c"], driver_death=["driver_death"])


@pytest.fixture(autouse=True)
def surroundings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the programs of the checks need; the first check of each kind of cluster starts fresh interpreters."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("JOB_FOLDER", str(tmp_path / "jobs"))
    monkeypatch.setattr(subprocess, "Popen", quick_python.PopenOfPrograms)
    if "works" not in request.node.callspec.params["checks"]:
        monkeypatch.setenv(quick_python.NESTED, "1")


@groups(in_order=IN_ORDER)
def test_local(checks: list[str]) -> None:
    check_cluster("gradwire:Cluster.local", checks=checks)


@groups(**{check: [check] for check in IN_ORDER if check != "worker_death"})
def test_from_env_under_torchrun(checks: list[str]) -> None:
    """Without the death of a worker: torchrun ends all ranks then, the driver included."""
    check_cluster("cluster_starts:start_from_env", TORCHRUN, checks=checks)


@groups(works=["works"], others_in_order=[check for check in IN_ORDER if check != "works"])
def test_slurm_on_this_machine(checks: list[str]) -> None:
    check_cluster("cluster_starts:start_slurm", checks=checks)


@each(works=["works"], ctrl_c=["ctrl_c"], driver_death=["driver_death"])
@pytest.mark.slow
def test_ray_that_the_driver_starts(checks: list[str]) -> None:
    """Ray ends with the driver."""
    check_cluster("cluster_starts:start_ray", checks=checks)


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    with nodes_of_a_program({"num_cpus": 2}) as address:
        yield address


@each(others_in_order=[check for check in IN_ORDER if check != "works"])
@pytest.mark.slow
def test_ray_that_the_driver_joins(checks: list[str], ray_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    check_cluster("cluster_starts:start_ray", checks=checks)
