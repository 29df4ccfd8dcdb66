"""Workers of a scheduler that fail at their start, die, are replaced, or outlive their driver."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import quick_python
from cluster import tasks
from cluster.process_scheduler import Machine, ProcessScheduler
from cluster.processes import is_there
from cluster.scripts import Script
from gradwire.cluster.api import Cluster
from gradwire.cluster.remote_launcher import RemoteOptions, start_remote
from gradwire.cluster.supervision import SupervisionOptions
from gradwire.config import WorkerConfig
from gradwire.errors import WorkerLost, WorkerStartFailed
from gradwire.testing import wait_until

TESTS = Path(__file__).parents[1]
CODE = WorkerConfig(trust="code")


@contextlib.contextmanager
def cluster_of(
    count: int, scheduler: ProcessScheduler | None = None, restart: Any = "never", **options: Any
) -> Iterator[tuple[Cluster, ProcessScheduler]]:
    scheduler = scheduler or ProcessScheduler()
    options = {"config": CODE, "start_timeout_s": 60.0, **options}
    supervision = SupervisionOptions(restart=restart)
    with Cluster(*start_remote(scheduler, RemoteOptions(num_workers=count, **options), supervision)) as cluster:
        yield cluster, scheduler
    wait_until(lambda: not any(is_there(process.pid) for process in scheduler.processes), 10.0, "the end of processes")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """``module(text)``: a module of that text, which workers find because the driver does."""

    def write(text: str) -> str:
        (tmp_path / "start_module.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        return "start_module"

    return write


def fail_to_start(scheduler: ProcessScheduler, timeout_s: float = 60.0, **options: Any) -> str:
    with pytest.raises(WorkerStartFailed) as caught:
        start_remote(scheduler, RemoteOptions(num_workers=1, config=CODE, start_timeout_s=timeout_s, **options))
    assert scheduler.is_closed
    assert not any(is_there(process.pid) for process in scheduler.processes)
    return str(caught.value)


# The start


@pytest.mark.parametrize("statement", ["raise LookupError('no licence')", "raise SystemExit('no licence')"])
def test_import_that_fails_shows_its_traceback_and_what_it_printed(
    module: Callable[[str], str], statement: str
) -> None:
    name = module(f"print('looking for a licence')\n{statement}\n")
    text = fail_to_start(ProcessScheduler(), imports=[name])
    assert text.startswith("worker0 (machine0, slot 0) could not start:\nTraceback")
    assert 'start_module.py", line 2' in text
    assert "no licence" in text
    assert "It printed:\nlooking for a licence" in text


def test_crash_while_importing_shows_what_was_printed(module: Callable[[str], str]) -> None:
    name = module("import ctypes\nprint('about to crash', flush=True)\nimport time\nctypes.string_at(0)\n")
    text = fail_to_start(ProcessScheduler(), imports=[name])
    assert text.startswith("worker0 (machine0, slot 0) exited before it was ready: killed by SIGSEGV; it printed:")
    assert "Segmentation fault" in text
    assert 'start_module.py", line 4' in text


@pytest.mark.slow
def test_import_that_hangs_is_given_up_at_the_deadline(module: Callable[[str], str]) -> None:
    name = module("import threading\nprint('waiting for a licence', flush=True)\nthreading.Event().wait()\n")
    scheduler = ProcessScheduler()
    began = time.monotonic()
    text = fail_to_start(scheduler, 4.0, imports=[name])
    assert time.monotonic() - began < 20.0
    assert "worker0 (machine0, slot 0) was not ready after" in text
    assert "raise start_timeout_s" in text
    assert "waiting for a licence" in text


def test_program_that_does_not_run_at_all(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys\nprint('cannot find libcuda')\nsys.exit(7)\n")
    text = fail_to_start(ProcessScheduler([Machine(program=str(program))]))
    assert text == "machine0, slot 0 exited before it was ready: exited with code 7; it printed:\ncannot find libcuda\n"


def test_ctrl_c_while_workers_start_ends_them(module: Callable[[str], str]) -> None:
    name = module("import threading\nprint('waiting', flush=True)\nthreading.Event().wait()\n")
    scheduler = ProcessScheduler()

    def press() -> None:
        wait_until(lambda: any("waiting" in process.printed() for process in scheduler.processes), 60.0)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    presser = threading.Thread(target=press)
    presser.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            start_remote(scheduler, RemoteOptions(num_workers=2, config=CODE, imports=[name]))
    finally:
        presser.join()
        signal.signal(signal.SIGINT, before)
    assert len(scheduler.processes) == 2
    assert not any(is_there(process.pid) for process in scheduler.processes)


# Losses


@pytest.mark.slow
def test_lost_worker_is_told_to_all_and_started_again_in_its_place() -> None:
    machines = [Machine(host="node1"), Machine(host="node2")]
    with cluster_of(2, ProcessScheduler(machines), restart="on-loss") as (cluster, scheduler):
        first, second = cluster.workers
        assert first.call(tasks.ask_who, "worker1") == "worker1"
        assert second.pid is not None
        old = second.pid
        os.kill(old, signal.SIGKILL)
        wait_until(lambda: second.pid != old, 60.0, "a new process")
        cluster.wait_for_workers(2, 60.0)
        assert second.call(tasks.who_am_i) == "worker1"
        assert first.call(tasks.ask_who, "worker1") == "worker1"
        new = scheduler.processes[-1]
        assert (new.machine.host, new.local_index, new.pid) == ("node2", 0, second.pid)
        assert cluster.status()[1].restarts == 1
        (third,) = cluster.add_workers(1)
        assert first.call(tasks.ask_who, third.name) == third.name


def test_lost_worker_has_the_schedulers_reason_everywhere() -> None:
    with cluster_of(2) as (cluster, _):
        first, second = cluster.workers
        first.call(tasks.ask_who, "worker1")
        assert second.pid is not None
        os.kill(second.pid, signal.SIGKILL)
        wait_until(lambda: not second.is_alive, 10.0, "that the loss is noticed")

        def has_reason(call: Callable[[], object]) -> bool:
            with pytest.raises(WorkerLost) as caught:
                call()
            return "killed by SIGKILL" in str(caught.value)

        wait_until(lambda: has_reason(lambda: second.call(tasks.who_am_i)), 10.0, "that the driver knows the reason")
        wait_until(
            lambda: has_reason(lambda: first.call(tasks.ask_who, "worker1")), 10.0, "that the other worker is told"
        )


@pytest.mark.slow
def test_worker_that_does_not_leave_is_killed(tmp_path: Path) -> None:
    with cluster_of(1) as (cluster, scheduler):
        cluster.workers[0].submit(tasks.hold_interpreter, str(tmp_path / "ready"))
        wait_until((tmp_path / "ready").exists, 30.0, "that it holds the interpreter")
        began = time.monotonic()
        cluster.close(grace=0.5)
        assert time.monotonic() - began < 10.0
    assert scheduler.processes[0].end_reason() == "killed by SIGKILL"


def test_output_of_the_last_moment_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with cluster_of(1) as (cluster, _):
        cluster.workers[0].call(tasks.print_without_end, "no line end")
    assert "[worker0] no line end\n" in capfd.readouterr().out


READS_SLOWLY = """
import time
from gradwire.cluster import _output_relay
read = _output_relay._read
def read_slowly(fd):
    data = read(fd)
    time.sleep(0.2 if data else 0.0)
    return data
_output_relay._read = read_slowly
capture = _output_relay.OutputCapture()
print("what is wrong")
text = capture.kept()
capture.close(5.0)
print([text])
"""


def test_output_that_is_being_read_is_part_of_what_was_printed() -> None:
    done = quick_python.run([sys.executable, "-c", READS_SLOWLY], timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == repr(["what is wrong\n"])


UNTIL_READ = """
import array, fcntl, sys, termios, time
unread = array.array("i", [1])
while unread[0]:
    sys.stdout.flush()
    fcntl.ioctl(1, termios.FIONREAD, unread)
    time.sleep(0.001)
"""


def test_output_of_imports_is_shown_with_the_workers_name(
    module: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    name = module(
        f"import sys\nprint('x' * 20_000)\nprint('loaded')\nprint('half', file=sys.stderr, end='')\n{UNTIL_READ}"
    )
    with cluster_of(1, imports=[name]) as (cluster, _):
        cluster.workers[0].call(print, "after")
    out, err = capfd.readouterr()
    *early, loaded, after = out.splitlines()
    assert (loaded, after) == ("[worker0] loaded", "[worker0] after")
    assert 10_000 < sum(map(len, early)) < 20_000, "the end of what was printed, and not all of it"
    assert "[worker0] half" in err


def test_output_goes_where_it_went_before_once_the_driver_has_let_the_worker_go() -> None:
    with cluster_of(1) as (cluster, scheduler):
        cluster.workers[0].call(print, "to the driver")
        cluster.workers[0].call(tasks.print_at_exit, "to the scheduler")
        cluster.close(60.0)  # taking an interpreter with torch apart can take seconds on a busy machine
        process = scheduler.processes[0]
        assert process.end_reason() == "exited with code 0"
    assert process.last_words == "to the scheduler\n"


DRIVER = f"""
import os, sys, threading
sys.path[:0] = [{str(TESTS)!r}]
from cluster import tasks
from cluster.process_scheduler import ProcessScheduler
from gradwire.cluster.api import Cluster
from gradwire.cluster.remote_launcher import RemoteOptions, start_remote
from gradwire.config import WorkerConfig
if __name__ == "__main__":
    scheduler = ProcessScheduler()
    config = WorkerConfig(trust="code", transports=("TRANSPORT",))
    cluster = Cluster(*start_remote(scheduler, RemoteOptions(num_workers=2, config=config)))
    print(" ".join(str(worker.pid) for worker in cluster.workers), flush=True)
    threading.Event().wait(60)
"""


@pytest.mark.parametrize("transport", ["unix", pytest.param("tcp", marks=pytest.mark.slow)])
def test_death_of_the_driver_ends_the_workers(tmp_path: Path, transport: str) -> None:
    text = DRIVER.replace("TRANSPORT", transport)
    with Script(tmp_path, text if transport == "tcp" else text.replace('("unix",)', "None")) as script:
        pids = [int(pid) for pid in script.line().split()]
        assert len(pids) == 2
        os.kill(script.process.pid, signal.SIGKILL)
        killed_at = time.monotonic()
        wait_until(lambda: not any(is_there(pid) for pid in pids), 20.0, "the end of the workers")
        assert time.monotonic() - killed_at < 10.0
        left = {path.name.partition("-")[0] for path in script.temp.iterdir()}
        assert left == {"logs", "gradwire"}  # of the scheduler of the tests and of the driver, which was killed
        for path in script.temp.iterdir():
            shutil.rmtree(path)


@pytest.mark.slow
def test_workers_end_although_the_driver_was_reported_to_be_back(tmp_path: Path) -> None:
    """What counts is whether there is a connection, not what was reported last."""
    tell = "    for worker in cluster.workers: worker.call(tasks.report_lost_workers_as_connected)\n"
    text = DRIVER.replace('("TRANSPORT",)', "None").replace("    print(", f"{tell}    print(")
    with Script(tmp_path, text) as script:
        pids = [int(pid) for pid in script.line().split()]
        os.kill(script.process.pid, signal.SIGKILL)
        wait_until(lambda: not any(is_there(pid) for pid in pids), 30.0, "the end of the workers")
        for path in script.temp.iterdir():
            shutil.rmtree(path)
