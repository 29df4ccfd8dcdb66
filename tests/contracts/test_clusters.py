"""Every way to start a cluster keeps the contract of `gradwire.testing.check_cluster`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gradwire.testing import CLUSTER_CHECKS, check_cluster
from gradwire.testing.clusters import NUM_WORKERS

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_WORKERS + 1}"]
GROUPS = pytest.mark.parametrize(
    "checks",
    [[check for check in CLUSTER_CHECKS if check not in ("ctrl_c", "driver_death")], ["ctrl_c"], ["driver_death"]],
    ids=["in order", "ctrl_c", "driver_death"],
)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the programs of the checks need."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("JOB_FOLDER", str(tmp_path / "jobs"))


@GROUPS
def test_local(checks: list[str]) -> None:
    check_cluster("gradwire:Cluster.local", checks=checks)


@pytest.mark.parametrize("check", [check for check in CLUSTER_CHECKS if check != "worker_death"])
def test_from_env_under_torchrun(check: str) -> None:
    """Without the death of a worker: torchrun ends all ranks then, the driver included."""
    check_cluster("cluster_starts:start_from_env", TORCHRUN, checks=[check])


@GROUPS
def test_slurm_on_this_machine(checks: list[str]) -> None:
    check_cluster("cluster_starts:start_slurm", checks=checks)


@GROUPS
@pytest.mark.slow
def test_ray(checks: list[str]) -> None:
    check_cluster("cluster_starts:start_ray", checks=checks)
