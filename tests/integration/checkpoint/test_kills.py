"""A process that dies at any point of a save: the old checkpoint or the new one is whole, and the next save tidies up."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import quick_python
from checkpoint.programs import Training, die_at, limit_files, save_there, wait_at
from cluster.scripts import Script
from gradwire import checkpoint, rpc
from gradwire.cluster.api import Cluster
from gradwire.errors import CheckpointError, CheckpointWriteFailed
from gradwire.testing import wait_until

POINTS = (
    "locked",
    "announced",
    "described",
    "opened",
    "half",
    "synced",
    "files-written",
    "index-written",
    "index-renamed",
    "cleaned",
)
TESTS = str(Path(__file__).parents[1])
LOCKS = {".gradwire-writer", ".gradwire-readers"}

SAVE_AND_DIE = """
import os, sys, torch
sys.path.insert(0, {tests!r})
from checkpoint.programs import die_at
from gradwire import checkpoint

def state(step):
    return {{"a": torch.full((1000,), float(step)), "b": torch.full((7,), step), "step": step}}

for point in {points!r}:
    folder = os.path.join({folder!r}, point)
    checkpoint.save(folder, state(1))
    pid = os.fork()  # this process has one thread: nothing of gradwire runs before a cluster is made
    if pid == 0:
        die_at(point)
        checkpoint.save(folder, state(2))
        os._exit(3)
    print(point, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""

DRIVER_IS_KILLED = """
import os, sys
os.environ["TORCHINDUCTOR_CACHE_DIR"] = {folder!r} + "-torch"  # torch leaves its folder behind
sys.path.insert(0, {tests!r})
from checkpoint.programs import Training, kill_at
from gradwire import checkpoint
from gradwire.cluster.api import Cluster

if __name__ == "__main__":
    with Cluster.local(2) as cluster:
        training = Training([worker.name for worker in cluster.workers])
        training.step(0)
        checkpoint.save({folder!r}, {{**training.state, "step": 1}})
        cluster.workers[1].call(kill_at, {point!r}, os.getpid())
        checkpoint.save({folder!r}, {{**training.state, "step": 2}})
        print("not reached")
"""


def visible(folder: Path) -> set[str]:
    return set(os.listdir(folder)) - LOCKS


def check_tidy(folder: Path) -> None:
    """The next save works and leaves nothing but its own files."""
    summary = checkpoint.save(folder, {"a": torch.zeros(3), "step": 9})
    assert visible(folder) == {"index.json", *(file.name for file in summary.files)}
    assert checkpoint.load(folder, {"a": torch.ones(3)}) == {"step": 9}


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A save in one process, killed at every point: the folder with a checkpoint for each, and how each process ended."""
    folder = tmp_path_factory.mktemp("died")
    text = SAVE_AND_DIE.format(tests=TESTS, points=POINTS, folder=str(folder))
    run = quick_python.run([sys.executable, "-c", text], timeout=100, check=True)
    return folder, run.stdout


@pytest.mark.parametrize("point", POINTS)
def test_a_process_that_is_killed_leaves_a_whole_checkpoint(died: tuple[Path, str], point: str) -> None:
    folder, output = died
    assert f"{point} {-signal.SIGKILL}" in output.splitlines()
    summary = checkpoint.verify(folder / point)
    found = checkpoint.read(folder / point)
    expected = 2 if point in ("index-renamed", "cleaned") else 1
    assert found["step"] == expected
    assert found["a"].eq(expected).all()
    assert {file.name for file in summary.files} <= visible(folder / point)
    check_tidy(folder / point)


@pytest.mark.slow
def test_a_driver_that_is_killed_while_workers_write(tmp_path: Path) -> None:
    points = {point: tmp_path / point for point in ("half", "synced")}
    with contextlib.ExitStack() as stack:  # at the same time: each imports torch most of the time
        scripts = []
        for point, folder in points.items():
            folder.mkdir()
            text = DRIVER_IS_KILLED.format(tests=TESTS, folder=str(folder / "checkpoint"), point=point)
            scripts.append(stack.enter_context(Script(folder, text)))
        ended = [script.finish(60.0)[:2] for script in scripts]
    assert ended == [(-signal.SIGKILL, "")] * 2
    for folder in points.values():
        checkpoint.verify(folder / "checkpoint")
        assert checkpoint.load(folder / "checkpoint") == {"step": 1}
        check_tidy(folder / "checkpoint")


@pytest.mark.parametrize("point", ["opened", "half", "synced"])
def test_a_worker_that_is_killed_is_named_and_the_old_checkpoint_stays(
    own_cluster: Cluster, tmp_path: Path, point: str
) -> None:
    first, second = own_cluster.workers
    training = Training([first.name, second.name])
    training.step(0)
    before = checkpoint.save(tmp_path, {**training.state, "step": 1})
    second.call(die_at, point)
    with pytest.raises(CheckpointError, match=rf"saving to {tmp_path} failed on worker {second.name}: "):
        checkpoint.save(tmp_path, {**training.state, "step": 2})
    assert visible(tmp_path) == {"index.json", *(file.name for file in before.files)}
    assert checkpoint.verify(tmp_path) == before
    other = Training([first.name, first.name])
    assert checkpoint.load(tmp_path, other.state) == {"step": 1}
    check_tidy(tmp_path)


def test_a_worker_that_is_gone_already_is_named(own_cluster: Cluster, tmp_path: Path) -> None:
    first, second = own_cluster.workers
    references = [rpc.remote(worker.name, torch.ones, args=(10,)) for worker in (first, second)]
    checkpoint.save(tmp_path, {"all": [torch.zeros(10), torch.zeros(10)], "step": 1})
    os.kill(second.pid or 0, signal.SIGKILL)
    wait_until(lambda: not second.is_alive, what="the end of the worker")
    with pytest.raises(CheckpointError, match=rf"loading from {tmp_path} failed on worker {second.name}: "):
        checkpoint.load(tmp_path, {"all": references})
    assert references[0].to_here().tolist() == [1] * 10
    with pytest.raises(CheckpointError, match=rf"saving to {tmp_path} failed on worker {second.name}: "):
        checkpoint.save(tmp_path, {"all": references, "step": 2})
    assert checkpoint.load(tmp_path, {"all": [references[0], torch.ones(10)]}) == {"step": 1}
    assert references[0].to_here().tolist() == [0] * 10


def test_a_full_disk_names_the_worker_and_its_file(own_cluster: Cluster, tmp_path: Path) -> None:
    first, second = own_cluster.workers
    references = [rpc.remote(worker.name, torch.ones, args=(100_000,)) for worker in (first, second)]
    before = checkpoint.save(tmp_path, {"all": references, "step": 1})
    second.call(limit_files, 50_000)
    with pytest.raises(
        CheckpointWriteFailed, match=rf"{second.name} cannot write .*-{second.name}\.safetensors"
    ) as caught:
        checkpoint.save(tmp_path, {"all": references, "step": 2})
    assert caught.value.tensor == "all/1"
    assert visible(tmp_path) == {"index.json", *(file.name for file in before.files)}
    assert checkpoint.load(tmp_path, {"all": references}) == {"step": 1}


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounts a small file system")
def test_a_file_system_without_room(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("nothing can be mounted here")
    try:
        before = checkpoint.save(tmp_path, {"a": torch.ones(100_000), "step": 1})
        with pytest.raises(CheckpointWriteFailed, match=r"worker local cannot write .*No space left on device"):
            checkpoint.save(tmp_path, {"a": torch.ones(200_000), "step": 2})
        assert visible(tmp_path) == {"index.json", *(file.name for file in before.files)}
        assert checkpoint.verify(tmp_path) == before
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_two_workers_that_save_to_one_directory(own_cluster: Cluster, tmp_path: Path) -> None:
    """The first is stopped in the middle by a worker that waits; the second is told the name of the first."""
    gate = tmp_path / "gate"
    folder = tmp_path / "checkpoint"
    os.mkfifo(gate)
    first, second = own_cluster.workers
    first.call(wait_at, "half", str(gate))
    reference = rpc.remote(first.name, torch.ones, args=(10,))
    saving = second.submit(save_there, str(folder), reference)
    with open(gate, "w") as opened:  # returns when the worker has come to the point
        with pytest.raises(
            CheckpointError, match=rf"worker {second.name} \(process {second.pid} on .*\) is saving to {folder}"
        ):
            checkpoint.save(folder, {"step": 2})
        opened.write("go on")
    assert saving.wait() == 1
    wait_until(lambda: checkpoint.load(folder) == {"step": 1}, what="the first save's end")
    assert checkpoint.save(folder, {"step": 2}).num_tensors == 0
