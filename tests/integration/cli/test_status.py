"""`gradwire status` in another terminal than the cluster's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import quick_python
from cli.commands import Running, run_command, run_in_terminal, write_program

DRIVER = """
    import os, signal, sys, time
    import gradwire

    if __name__ == "__main__":
        with gradwire.Cluster.local(2, names=["ps", "trainer"]) as cluster:
            os.kill(cluster.workers[1].pid, signal.SIGKILL)
            while cluster.workers[1].is_alive:
                time.sleep(0.001)
            cluster.workers[0].call(int, 1)
            print(cluster.name, flush=True)
            sys.stdin.readline()
    """


@pytest.fixture
def folder() -> Iterator[str]:
    """Where the driver has its socket: with a short path."""
    path = tempfile.mkdtemp(prefix="gwr-", dir="/tmp")
    yield path
    shutil.rmtree(path)


def test_status_shows_clusters_and_their_workers_until_they_are_closed(tmp_path: Path, folder: str) -> None:
    place = {"XDG_RUNTIME_DIR": folder}
    program = write_program(tmp_path, DRIVER, "train.py")
    quick = {**place, quick_python.NESTED: "1"}
    with Running("--lr", "0.1", program=program, variables=quick, stdin=subprocess.PIPE) as driver:
        (name,) = driver.lines(1)
        assert name == f"train-{driver.process.pid}"

        listed = run_command("status", **place)
        (row,) = [line for line in listed.stdout.splitlines() if name in line]
        assert "1 of 2" in row
        assert "train.py --lr 0.1" in row

        shown = run_command("status", "train", **place)
        assert shown.returncode == 0
        assert "killed by SIGKILL" in shown.stdout
        assert "\x1b" not in shown.stdout

        top = run_command("top", "train", **place)
        assert top.returncode == 0
        assert "1 of 2 workers" in top.stdout
        assert "trainer: killed by SIGKILL" in top.stdout
        assert "\x1b" not in top.stdout
        assert run_in_terminal("top", name, press=b"q", after=b"q quits", **place) == 0

        report = json.loads(run_command("status", str(driver.process.pid), "--json", **place).stdout)
        assert (report["name"], report["pid"]) == (name, driver.process.pid)
        states = [(worker["name"], worker["state"], worker["calls_served"]) for worker in report["workers"]]
        assert states == [("ps", "running", 1), ("trainer", "lost", None)]

        with Running("status", name, "--watch", "--json", "--interval", "0.1", variables=place) as watch:
            for _ in range(2):
                assert json.loads(watch.lines(1)[0])["name"] == name
            assert driver.process.stdin is not None
            driver.process.stdin.write("\n")
            driver.process.stdin.flush()
            assert watch.finish()[0] == 0
        assert driver.finish()[0] == 0
        assert os.listdir(f"{folder}/gradwire") == []


def test_without_a_cluster_that_is_said(folder: str) -> None:
    other = run_command("status", "other", XDG_RUNTIME_DIR=folder)
    assert other.returncode == 1
    assert "error: no cluster matches 'other'; " in other.stderr
