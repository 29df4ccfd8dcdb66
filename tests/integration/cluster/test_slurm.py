"""`Cluster.slurm` with submitit's local executor, and with stand-ins for the commands of Slurm that run a job here."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest
import torch

import gradwire as gw
from cluster.processes import is_there
from gradwire.errors import WorkerStartFailed
from gradwire.testing import wait_until

submitit = pytest.importorskip("submitit")

COMMANDS = {
    # Runs a copy of the job in the background, as the next job number: submitit renames the job's file at once.
    "sbatch": """
        id=$(( $(cat $FAKE/last) + 1 )); echo $id > $FAKE/last
        echo "Submitted batch job $id"
        export SLURM_JOB_ID=$id SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0
        export SLURM_NTASKS=$(sed -n 's/^#SBATCH --ntasks-per-node=//p' $1)
        cp $1 $FAKE/$id.sh
        setsid bash $FAKE/$id.sh > /dev/null 2>&1 &
        echo $! > $FAKE/$id.pid
    """,
    # Runs one process for each task, with its output where the options say.
    "srun": """
        while [ "${1#--}" != "$1" ]; do
            case $1 in --output) out=$2; shift;; --error) err=$2; shift;; esac; shift
        done
        fill() { echo $1 | sed "s/%j/$SLURM_JOB_ID/g; s/%t/$2/g"; }
        for task in $(seq 0 $(( SLURM_NTASKS - 1 ))); do
            SLURM_PROCID=$task SLURM_LOCALID=$task "$@" > $(fill $out $task) 2> $(fill $err $task) &
        done
        wait
    """,
    "sacct": """
        echo "JobID|State|NodeList"
        for file in $FAKE/*.pid; do
            id=$(basename $file .pid)
            state=${FAKE_STATE:-RUNNING}; kill -0 $(cat $file) 2> /dev/null || state=FAILED
            echo "$id|$state|here"
        done
    """,
    "squeue": "echo Resources",
    "scancel": "kill -KILL -- -$(cat $FAKE/$1.pid)",
}


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of PATH with commands that do on this machine what Slurm does on a cluster."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    (folder / "last").write_text("4710")
    for name, body in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("FAKE", str(folder))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    submitit.SlurmJob.watcher.clear()  # it remembers the jobs of this process that have ended, and numbers begin anew
    return folder


def greet(name: str) -> str:
    print(f"greeted {name}", flush=True)
    return f"hello {name}"


@pytest.mark.slow
def test_workers_in_a_job_on_this_machine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "logs"
    with gw.Cluster.slurm(1, 2, executor="local", folder=folder / "%j", roles={"ps": 1, "trainer": 1}) as cluster:
        pids = [worker.pid or 0 for worker in cluster.workers]
        assert [worker.name for worker in cluster.workers] == ["ps0", "trainer0"]
        assert cluster.workers[1].call(greet, "you") == "hello you"
        x = torch.ones(2, requires_grad=True)
        with gw.autograd.context() as context:
            loss = cluster.workers[0].call(torch.exp, x).sum()
            gw.autograd.backward(context, [loss])
            assert torch.equal(gw.autograd.get_gradients(context)[x], torch.exp(x.detach()))
        assert f"2 tasks, logs in {folder}" in cluster.describe()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert not [path for path in files if b"PRIVATE KEY" in path.read_bytes()], "a key was written"
    assert "trainer0" in capfd.readouterr().out
    wait_until(lambda: not any(map(is_there, pids)), 10.0)
    assert not list(folder.glob("exchange-*"))


@pytest.mark.slow
def test_a_job_of_slurm_with_a_worker_that_dies_and_is_started_again(fake_slurm: Path, tmp_path: Path) -> None:
    restarted = []
    with gw.Cluster.slurm(
        1, 2, folder=tmp_path / "logs", time="10:00", interface="lo", restart="on-loss", on_restart=restarted.append
    ) as cluster:
        assert "#SBATCH --ntasks-per-node=2" in cluster.describe()
        assert "Slurm job 4711" in cluster.describe()
        first, second = cluster.workers
        pid, other = first.pid or 0, second.call(os.getpid)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: bool(restarted), 30.0)
        assert first.call(os.getpid) not in (pid, other)
        assert second.call(os.getpid) == other, "a worker that dies must not end the others"
        assert "Slurm job 4712, 1 task" in cluster.describe()
        pids = [worker.pid or 0 for worker in cluster.workers]
    wait_until(lambda: not any(map(is_there, pids)), 10.0)


@pytest.mark.slow
def test_a_job_that_fails_shows_its_id_its_state_and_its_log(fake_slurm: Path, tmp_path: Path) -> None:
    command = fake_slurm / "srun"
    command.write_text(command.read_text().replace('"$@" >', "bash -c 'echo no such module >&2; exit 1' >"))
    with pytest.raises(WorkerStartFailed) as caught:
        gw.Cluster.slurm(1, 1, folder=tmp_path / "logs", interface="lo", start_timeout_s=30)
    text = str(caught.value)
    assert "Job 4711 is FAILED" in text
    assert str(tmp_path / "logs" / "4711_0_log.err") in text
    assert text.endswith("no such module")


@pytest.mark.slow
def test_a_job_that_stays_in_the_queue_is_named_with_the_reason(
    fake_slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = fake_slurm / "srun"
    command.write_text("#!/bin/bash\nsleep 60\n")
    monkeypatch.setenv("FAKE_STATE", "PENDING")
    with pytest.raises(
        WorkerStartFailed, match=r"never arrived.*Job 4711 is PENDING \(Resources\); raise start_timeout_s"
    ):
        gw.Cluster.slurm(1, 2, folder=tmp_path / "logs", interface="lo", start_timeout_s=1.5)
    wait_until(lambda: not is_there(int((fake_slurm / "4711.pid").read_text())), 10.0)
