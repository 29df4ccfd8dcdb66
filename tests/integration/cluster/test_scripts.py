"""Programs that use a cluster, and what becomes of the workers when such a program ends in one way or another."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import re
import select
import signal
import termios
import time
from pathlib import Path

import pytest

from cluster.processes import is_there, processes_with
from cluster.scripts import Script
from gradwire.testing import wait_until

pytestmark = pytest.mark.slow

_HEAD = """
import json, os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
import gradwire as gw
from gradwire.cluster.api import Cluster
def show(value): print(json.dumps(value), flush=True)
"""


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
    with Script(tmp_path, text, fresh=True) as script:
        status, out, err = script.finish()
    assert (status, err) == (0, "")
    assert out.splitlines() == ["42", "[3, 6]", "true", "[worker0] hello"]


@pytest.mark.parametrize(
    "use",
    [
        "import beside",  # which imports this script
        "multiprocessing.get_context('spawn').Process(target=print).start()",
    ],
    ids=["by itself", "by multiprocessing"],
)
def test_a_script_without_a_guard_that_is_imported(tmp_path: Path, use: str) -> None:
    (tmp_path / "beside.py").write_text("from program import FACTOR\n")
    text = f"import multiprocessing\nimport gradwire as gw\nFACTOR = 2\nwith gw.Cluster.local(1):\n    {use}\n"
    with Script(tmp_path, text) as script:
        _, _, err = script.finish()
    assert "ConfigurationError: the program's script was imported and would start a second cluster" in err
    assert "program.py, line 4, runs because" in err
    assert '    if __name__ == "__main__":\n        with gradwire.Cluster.local(...) as cluster:\n' in err


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


def test_the_death_of_the_driver_ends_workers_that_cannot_notice(tmp_path: Path) -> None:
    """One holds the interpreter's lock, one has started a process of its own; and the driver has a fork of itself."""
    text = (
        _HEAD
        + """
def hold():
    import ctypes
    print("holding", flush=True)
    ctypes.PyDLL(None).sleep(100)  # unlike CDLL, it keeps the lock in a call
def spawn():
    import subprocess
    return subprocess.Popen(["sleep", "100"]).pid
with Cluster.local(2) as cluster:
    child = cluster.workers[1].call(spawn)
    copy = os.fork()
    if copy:
        show([child, copy])
        cluster.workers[0].submit(hold)  # now: what it prints must not come into the middle of that line
    threading.Event().wait(60)
"""
    )
    with Script(tmp_path, text) as script:
        child, copy = json.loads(script.line())
        assert script.line() == "[worker0] holding"
        assert {"gw-forkserver", "gw-worker0", "gw-worker1"} <= set(processes_with(script.mark).values())
        script.process.kill()
        try:
            wait_until(lambda: set(processes_with(script.mark)) == {copy})
            wait_until(lambda: not is_there(child))
        finally:
            os.kill(copy, signal.SIGKILL)


def test_the_death_of_the_driver_during_the_start_ends_all(tmp_path: Path) -> None:
    text = _HEAD + "show(os.getpid())\ncluster = Cluster.local(2)\n"
    with Script(tmp_path, text, starts_fresh=True) as script:
        script.line()
        wait_until(lambda: len(processes_with(script.mark)) > 1)
        script.process.kill()
        wait_until(lambda: not processes_with(script.mark), 20)
        assert script.finish()[0] == -signal.SIGKILL


def test_ctrl_c_during_the_start(tmp_path: Path) -> None:
    text = _HEAD + "show('starting')\nwith Cluster.local(2):\n    show('started')\n    threading.Event().wait(60)\n"
    with Script(tmp_path, text, starts_fresh=True) as script:
        assert script.line() == '"starting"'
        wait_until(lambda: len(processes_with(script.mark)) > 1)
        script.process.send_signal(signal.SIGINT)
        status, out, err = script.finish(20)
    assert status == -signal.SIGINT
    assert out in ("", '"started"\n')  # on a busy machine this process may be the slower one
    assert err.rstrip().endswith("KeyboardInterrupt")


def test_on_a_terminal(tmp_path: Path) -> None:
    """Names have colours, a long map has a progress bar, and ^C interrupts every way to wait but reaches no worker."""
    text = (
        _HEAD
        + """
def work(number):
    threading.Event().wait(0.5)
    print("item", number)
    return number
def block(seconds):
    print("working", flush=True)
    threading.Event().wait(seconds)
try:
    with Cluster.local(2) as cluster:
        print(cluster.map(work, range(12)))
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
    keyboard, terminal = os.openpty()
    screen = _Screen(keyboard)
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    try:
        with Script(tmp_path, text, **streams, preexec_fn=_take_terminal) as script:
            shown = screen.read_until(", 11]")
            for _ in range(3):
                shown += screen.read_until("working")
                os.write(keyboard, b"\x03")
                shown += screen.read_until('["alive", "alive"]')
            shown += screen.read_until("last")
            os.write(keyboard, b"\x03")
            shown += screen.read_until("[false, false]")  # what a worker prints may come until then
            assert script.finish()[0] == 0
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert re.search(r"\b(4|8)/12\b", shown)
    assert "\x1b[36m[worker0]\x1b[0m item 0\r\n" in shown
    assert "\x1b[32m[worker1]\x1b[0m item 1\r\n" in shown
    assert sorted(int(number) for number in re.findall(r"item (\d+)\r\n", shown)) == list(range(12))


_take_terminal = functools.partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0)


class _Screen:
    """Reads what a program shows on its terminal, up to a text and no further."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._unread = b""

    def read_until(self, text: str, timeout_s: float = 30.0) -> str:
        deadline = time.monotonic() + timeout_s
        while text.encode() not in self._unread:
            readable, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, (text, self._unread)
            self._unread += os.read(self._fd, 4096)
        shown, found, self._unread = self._unread.partition(text.encode())
        return (shown + found).decode()
