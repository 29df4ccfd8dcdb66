"""Every way to start a cluster keeps the contract of `gradwire.testing.check_cluster`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import quick_python
from gradwire.testing import CLUSTER_CHECKS, check_cluster
from gradwire.testing.clusters import NUM_WORKERS

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_WORKERS + 1}"]
IN_ORDER = [check for check in CLUSTER_CHECKS if check not in ("ctrl_c", "driver_death")]


def groups(**checks: list[str]) -> pytest.MarkDecorator:
    """For each name a test with these checks; and a test for each check at which the driver ends."""
    checks |= {"ctrl_c": ["ctrl_c"], "driver_death": ["driver_death"]}
    return pytest.mark.parametrize("checks", checks.values(), ids=checks)


@pytest.fixture(autouse=True)
def surroundings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the programs of the checks need; the first check of each kind of cluster has fresh interpreters."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("JOB_FOLDER", str(tmp_path / "jobs"))
    if "works" not in request.node.callspec.params["checks"]:
        monkeypatch.setenv(quick_python.NESTED, "1")
        monkeypatch.setattr(subprocess, "Popen", quick_python.PopenOfPrograms)


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


@groups(in_order=IN_ORDER)
@pytest.mark.slow
def test_ray(checks: list[str]) -> None:
    check_cluster("cluster_starts:start_ray", checks=checks)
