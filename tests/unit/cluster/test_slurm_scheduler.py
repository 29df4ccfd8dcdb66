"""What `Cluster.slurm` asks of submitit, checked with submitit's own writer of job scripts; Slurm is not needed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradwire.cluster.slurm_scheduler import SlurmOptions, SlurmScheduler, _Job, flags_of, job_parameters, minutes_of
from gradwire.errors import ConfigurationError, WorkerStartFailed
from gradwire.testing import wait_until

submitit = pytest.importorskip("submitit")


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [
        (90, 90),
        ("30", 30),
        ("30:30", 31),
        ("01:00:00", 60),
        ("1:30:01", 91),
        ("2-12", 60 * 60),
        ("2-12:30", 60 * 60 + 30),
        ("1-00:00:00", 24 * 60),
    ],
)
def test_time_limits_as_sbatch_takes_them(limit: str | int, minutes: int) -> None:
    assert minutes_of(limit) == minutes


@pytest.mark.parametrize("limit", ["", "an hour", "1:2:3:4", "-5", "0", "x-1", -3, 1.5])
def test_other_time_limits_are_refused(limit: Any) -> None:
    with pytest.raises(ConfigurationError, match="time must be"):
        minutes_of(limit)


def test_options_of_sbatch_by_name() -> None:
    assert flags_of(["--constraint=a100", "--exclusive", "--gres=gpu:a100:4"]) == {
        "constraint": "a100",
        "exclusive": True,
        "gres": "gpu:a100:4",
    }
    for wrong in ("-C a100", "constraint=a100", "--", "--mem 4G", "--x=1\n#SBATCH --y"):
        with pytest.raises(ConfigurationError, match="extra takes sbatch options"):
            flags_of([wrong])


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"nodes": 0}, "nodes must be an integer of at least 1"),
        ({"workers_per_node": True}, "workers_per_node must be"),
        ({"executor": "pbs"}, 'executor must be "slurm" or "local"'),
        ({"executor": "local", "nodes": 2}, "nodes must be 1"),
        ({"prologue": "module load cuda"}, "prologue must be a list"),
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        SlurmOptions(**{"nodes": 1, "workers_per_node": 1, **wrong})


def job_script(options: SlurmOptions, nodes: int, tasks: int, folder: Path) -> str:
    """What submitit writes for these options. Slurm is only looked for when its executor is made."""
    executor = submitit.AutoExecutor.__new__(submitit.AutoExecutor)
    executor.cluster = "slurm"
    executor._deprecated_args = {}
    executor._delayed_batch = None
    inner = submitit.SlurmExecutor.__new__(submitit.SlurmExecutor)
    submitit.core.core.PicklingExecutor.__init__(inner, folder)
    executor._executor, executor.parameters = inner, inner.parameters
    executor.update_parameters(**job_parameters(options, nodes, tasks))
    return str(inner._make_submission_file_text("python task.py", "uid"))


def test_the_job_script(tmp_path: Path) -> None:
    options = SlurmOptions(
        nodes=4,
        workers_per_node=8,
        time="1-06:00:00",
        partition="gpu",
        account="physics",
        prologue=["module load cuda", "source env.sh"],
        extra=["--constraint=a100", "--exclusive"],
    )
    lines = job_script(options, 4, 8, tmp_path / "%j").splitlines()
    for line in (
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --time=1800",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=physics",
        "#SBATCH --constraint=a100",
        "#SBATCH --exclusive",
        "#SBATCH --job-name=gradwire",
        "#SBATCH --no-requeue",
    ):
        assert line in lines
    setup, command = lines.index("module load cuda"), next(i for i, line in enumerate(lines) if line.startswith("srun"))
    assert lines[setup + 1] == "source env.sh"
    assert setup < command
    assert "--kill-on-bad-exit=0 --wait=0" in lines[command], "a worker that dies must not end the others"


def test_a_job_script_without_anything_extra_leaves_the_site_s_defaults(tmp_path: Path) -> None:
    script = job_script(SlurmOptions(nodes=1, workers_per_node=1), 1, 1, tmp_path)
    assert not any(word in script for word in ("--partition", "--account", "--mem", "--constraint", "# setup"))


def test_without_submitit_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigurationError, match=r"needs submitit .*pip install 'gradwire\[slurm\]'"):
        SlurmScheduler(SlurmOptions(nodes=1, workers_per_node=1, folder=tmp_path), 1.0)


def test_without_slurm_the_error_names_the_local_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"cannot reach Slurm: .*srun.* executor=.local."):
        SlurmScheduler(SlurmOptions(nodes=1, workers_per_node=1, folder=tmp_path / "logs"), 1.0)
    assert [path.name for path in (tmp_path / "logs").iterdir()] == []


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigurationError, match="is writable by other users"):
        SlurmScheduler(SlurmOptions(nodes=1, workers_per_node=1, folder=tmp_path / "%j", executor="local"), 1.0)


class SilentJob:
    """A job whose Slurm does not answer until `answers` is set."""

    job_id = "4711"

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.num_questions = 0

    def get_info(self, mode: str) -> dict[str, str]:
        self.num_questions += 1
        assert self.answers.wait(30.0)
        return {"State": "TIMEOUT"}


def test_a_slurm_that_does_not_answer_holds_up_nothing() -> None:
    silent = SilentJob()
    job = _Job(silent, range(1), "slurm")
    for _ in range(3):
        begun = time.monotonic()
        job._next_look = 0.0
        assert not job.is_over()
        assert time.monotonic() - begun < 25.0  # an answer is waited for 30 s
    assert silent.num_questions == 1, "it is asked again although it has not answered"
    silent.answers.set()
    wait_until(job.is_over, 10.0)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[SlurmScheduler]:
    options = SlurmOptions(nodes=1, workers_per_node=2, executor="local", folder=tmp_path / "logs")
    made = SlurmScheduler(options, 60.0)
    yield made
    made.close()


def test_a_job_whose_tasks_do_not_arrive_is_cancelled(scheduler: SlurmScheduler) -> None:
    with pytest.raises(WorkerStartFailed, match=r"tasks 0, 1 never arrived.*Job \d+ is RUNNING"):
        scheduler.launch(2, time.monotonic() + 0.01)
    (job,) = scheduler._jobs
    assert job.has_ended()


def test_no_job_is_submitted_once_it_is_closed(scheduler: SlurmScheduler) -> None:
    scheduler.close()
    with pytest.raises(WorkerStartFailed, match="the cluster is closed"):
        scheduler.launch(1, time.monotonic() + 5)
    assert not scheduler._jobs
