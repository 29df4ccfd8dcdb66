"""Programs that use a cluster, and what becomes of the workers when such a program ends in one way or another."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from cluster.processes import is_there, processes_with, wait_until
from cluster.scripts import Script

_HEAD = """
import json, os, sys, threading
import gradwire as gw
from gradwire.cluster.api import Cluster
def show(value): print(json.dumps(value), flush=True)
"""

_WAITING = (
    _HEAD
    + """
with Cluster.local(2) as cluster:
    show([worker.pid for worker in cluster.workers])
    threading.Event().wait(60)
"""
)


def test_functions_of_the_main_module(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def triple(x): return 3 * x\n")
    text = (
        _HEAD
        + """
import beside, torch
from dataclasses import dataclass

@dataclass
class Point:
    x: int

FACTOR = 2
def double(point): return Point(FACTOR * point.x)

if __name__ == "__main__":
    with Cluster.local(2) as cluster:
        show(cluster.workers[0].call(double, Point(21)).x)
        show(cluster.map(beside.triple, [1, 2]))
        show(cluster.workers[1].call(sys.path.__getitem__, 0) == sys.path[0])
        cluster.workers[0].call(print, "hello")
"""
    )
    with Script(tmp_path, text) as script:
        status, out, err = script.finish()
    assert (status, err) == (0, "")
    assert out.splitlines() == ["42", "[3, 6]", "true", "[worker0] hello"]


def test_a_notebook(tmp_path: Path) -> None:
    """Cells run by exec in a module without a file; functions change between cells; nobody closes the cluster."""
    text = """
import types, sys, json
notebook = sys.modules["__main__"]
del notebook.__file__
cells = [
    "import gradwire, torch\\nfrom gradwire.cluster.api import Cluster",
    "cluster = Cluster.local(2)",
    "def f(x): return x + 1",
    "print(cluster.map(f, [1, 2, 3]))",
    "def f(x): return x + 10",
    "print(cluster.map(f, [1, 2, 3]))",
]
for cell in cells:
    exec(compile(cell, "<cell>", "exec"), notebook.__dict__)
"""
    with Script(tmp_path, text) as script:
        status, out, err = script.finish()
    assert (status, err) == (0, "")
    assert out.splitlines() == ["[2, 3, 4]", "[11, 12, 13]"]


def test_a_signal_that_ends_the_driver_ends_all(tmp_path: Path) -> None:
    with Script(tmp_path, _WAITING) as script:
        pids = json.loads(script.line())
        assert all(is_there(pid) for pid in pids)
        assert "gw-template" in processes_with(script.mark).values()
        script.process.terminate()
        assert wait_until(lambda: not processes_with(script.mark)), processes_with(script.mark)
        assert not any(is_there(pid) for pid in pids)
        assert script.finish()[0] == -signal.SIGTERM


def test_the_death_of_the_driver_ends_workers_that_cannot_notice(tmp_path: Path) -> None:
    """One holds the interpreter's lock, one has started a process of its own; and the driver has a fork of itself."""
    text = (
        _HEAD
        + """
def hold():
    import re
    print("holding", flush=True)
    re.match(r"(a+)+$", "a" * 60 + "b")
def spawn():
    import subprocess
    return subprocess.Popen(["sleep", "100"]).pid
with Cluster.local(2) as cluster:
    child = cluster.workers[1].call(spawn)
    cluster.workers[0].submit(hold)
    copy = os.fork()
    if copy:
        show([child, copy])
    threading.Event().wait(60)
"""
    )
    with Script(tmp_path, text) as script:
        lines = sorted([script.line(), script.line()])
        assert lines[1] == "[worker0] holding"
        child, copy = json.loads(lines[0])
        script.process.kill()
        try:
            assert wait_until(lambda: set(processes_with(script.mark)) == {copy}), processes_with(script.mark)
            assert wait_until(lambda: not is_there(child))
        finally:
            os.kill(copy, signal.SIGKILL)


def test_the_death_of_the_driver_during_the_start_ends_all(tmp_path: Path) -> None:
    text = _HEAD + "show(os.getpid())\ncluster = Cluster.local(2)\n"
    with Script(tmp_path, text) as script:
        script.line()
        assert wait_until(lambda: len(processes_with(script.mark)) > 1)
        script.process.kill()
        assert wait_until(lambda: not processes_with(script.mark), 20), processes_with(script.mark)


def test_ctrl_c_in_a_terminal(tmp_path: Path) -> None:
    """It interrupts every way to wait in the driver, reaches no worker, and at last ends the block in good order."""
    text = (
        _HEAD
        + """
def block(seconds):
    print("working", flush=True)
    threading.Event().wait(seconds)
try:
    with Cluster.local(2, names=["w0", "w1"]) as cluster:
        worker = cluster.workers[0]
        for wait in (
            lambda: worker.call(block, 60),
            lambda: worker.submit(block, 60).wait(),
            lambda: cluster.map(block, [60]),
        ):
            try:
                wait()
            except KeyboardInterrupt:
                show([worker.call(str, "alive") for worker in cluster.workers])
        show("last")
        threading.Event().wait(60)
except KeyboardInterrupt:
    show([worker.is_alive for worker in cluster.workers])
"""
    )
    with Script(tmp_path, text) as script:
        for _ in range(3):
            assert script.line() == "[w0] working"
            os.killpg(script.process.pid, signal.SIGINT)
            assert script.line() == '["alive", "alive"]'
        assert script.line() == '"last"'
        os.killpg(script.process.pid, signal.SIGINT)
        status, out, err = script.finish(20)
    assert (status, out, err) == (0, "[false, false]\n", "")


def test_ctrl_c_during_the_start(tmp_path: Path) -> None:
    text = _HEAD + "show('starting')\nwith Cluster.local(2): show('started')\n"
    with Script(tmp_path, text) as script:
        assert script.line() == '"starting"'
        assert wait_until(lambda: len(processes_with(script.mark)) > 1)
        script.process.send_signal(signal.SIGINT)
        status, out, err = script.finish(20)
    assert (status, out) == (-signal.SIGINT, "")
    assert err.rstrip().endswith("KeyboardInterrupt")
