"""The launcher for this machine: it starts, watches and ends processes."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cluster import tasks
from cluster.processes import is_there
from gradwire import _progress_bar
from gradwire.cluster import _forkserver
from gradwire.cluster._control import ForkWorker, SendSignal
from gradwire.cluster._forkserver import (
    ForkServerProcess,
    borrow_fork_server,
    close_idle_fork_server,
    return_fork_server,
)
from gradwire.cluster.api import Cluster
from gradwire.cluster.launcher import Launcher, WorkerHandle, WorkerSpec, WorkerState
from gradwire.cluster.local_launcher import LocalLauncher
from gradwire.config import WorkerConfig
from gradwire.errors import WorkerStartFailed
from gradwire.testing import wait_until
from gradwire.types import WorkerInfo


def _specs(count: int, **changes: object) -> list[WorkerSpec]:
    return [
        WorkerSpec(
            info=WorkerInfo(f"worker{rank}", rank),
            config=WorkerConfig(token=b"t" * 32, transports=("unix",)),
            addresses=(),
            **{"num_threads": 1, "environment": {}, **changes},  # type: ignore[arg-type]
        )
        for rank in range(count)
    ]


def _ignore(handle: WorkerHandle) -> None:
    """For tests in which no worker is lost."""


@pytest.fixture
def launcher() -> Iterator[LocalLauncher]:
    launcher = LocalLauncher(60)
    yield launcher
    launcher.close()


def test_it_is_a_launcher(launcher: LocalLauncher) -> None:
    seam: Launcher = launcher
    assert repr(seam).startswith("<LocalLauncher fork server pid=")


def test_workers_start_and_leave_in_good_order(launcher: LocalLauncher) -> None:
    handles = launcher.start(_specs(2), _ignore, 30)
    pids = [handle.pid for handle in handles if handle.pid is not None]
    assert [handle.state for handle in handles] == [WorkerState.RUNNING] * 2
    assert len(set(pids)) == 2
    assert sorted(os.listdir(launcher.folder)) == ["worker0.sock", "worker1.sock"]
    assert os.stat(launcher.folder).st_mode & 0o777 == 0o700
    assert not launcher.wait_exit(handles[0], 0.0)
    launcher.terminate(handles[:1], 10)
    assert (handles[0].state, handles[0].exit_reason) == (WorkerState.ENDED, "exited with code 0")
    assert handles[1].state is WorkerState.RUNNING
    launcher.close()
    launcher.close()
    assert handles[1].exit_reason == "killed by SIGKILL"
    assert not any(is_there(pid) for pid in pids)
    assert not os.path.exists(launcher.folder)
    assert repr(launcher) == "<LocalLauncher closed, 0 workers>"


def test_the_fork_server_is_kept_for_the_next_launcher() -> None:
    first = borrow_fork_server(60)
    second = borrow_fork_server(60)
    assert second.pid != first.pid
    return_fork_server(first)
    return_fork_server(second)  # one is enough
    assert not second.is_alive
    assert borrow_fork_server(60) is first
    return_fork_server(first)


def test_a_fork_server_may_import_more_beforehand() -> None:
    with pytest.raises(WorkerStartFailed, match="no_such_module"):
        borrow_fork_server(60, ["no_such_module"])
    return_fork_server(borrow_fork_server(60, ["colorsys", "pytest"]))
    kept = borrow_fork_server(60)
    assert kept.modules == {"colorsys", "pytest"}
    return_fork_server(kept)
    return_fork_server(borrow_fork_server(60, ["colorsys"]))
    with Cluster.local(1) as cluster:
        assert cluster.workers[0].call(tasks.is_imported, "colorsys")
        assert not cluster.workers[0].call(tasks.is_imported, "torch._dynamo")
    assert kept.is_alive


def test_a_lost_worker_is_reported_once_with_its_reason(launcher: LocalLauncher) -> None:
    lost: list[tuple[str, str | None]] = []
    handles = launcher.start(_specs(2), lambda handle: lost.append((handle.info.name, handle.exit_reason)), 30)
    assert handles[1].pid is not None
    os.kill(handles[1].pid, signal.SIGKILL)
    assert launcher.wait_exit(handles[1], 10)
    wait_until(lambda: bool(lost))
    launcher.terminate(handles, 10)
    assert lost == [("worker1", "killed by SIGKILL")]
    assert handles[1].state is WorkerState.LOST
    ended_at = handles[1].uptime_s
    assert handles[1].uptime_s == ended_at


def test_a_handler_that_fails_does_not_stop_the_supervisor(
    launcher: LocalLauncher, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(handle: WorkerHandle) -> None:
        raise ValueError("cannot cope")

    handles = launcher.start(_specs(2), fail, 30)
    for handle in handles:
        assert handle.pid is not None
        os.kill(handle.pid, signal.SIGKILL)
        assert launcher.wait_exit(handle, 10)
    wait_until(lambda: caplog.text.count("could not be handled") == 2)


def test_a_worker_that_cannot_start_shows_its_traceback(launcher: LocalLauncher) -> None:
    with pytest.raises(WorkerStartFailed) as caught:
        launcher.start([*_specs(1), *_specs(2, num_threads=-1)[1:]], _ignore, 30)
    text = str(caught.value)
    assert text.startswith("worker1 exited before it was ready (exited with code 1). worker1 printed:\nTraceback")
    assert "set_num_threads" in text


def test_a_worker_that_is_too_slow_is_named(launcher: LocalLauncher) -> None:
    with pytest.raises(WorkerStartFailed, match=r"not ready after 0 s: worker0, worker1; raise start_timeout_s"):
        launcher.start(_specs(2), _ignore, 0.0)


@pytest.mark.parametrize(
    ("function", "num_before"),
    [("os.memfd_create", 0), ("socket.socketpair", 0), ("os.pipe2", 0), ("os.pipe2", 1)],
)
def test_descriptors_that_run_out_are_told_and_none_is_left_open(
    launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch, function: str, num_before: int
) -> None:
    module, _, name = function.partition(".")
    original, num_calls = getattr(sys.modules[module], name), 0

    def run_out(*args: object) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls > num_before:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return original(*args)

    monkeypatch.setattr(function, run_out)
    with pytest.raises(WorkerStartFailed, match=r"cannot start worker0: .*Too many open files"):
        launcher.start(_specs(1), _ignore, 30)


def test_the_death_of_the_fork_server_is_the_death_of_its_workers(launcher: LocalLauncher) -> None:
    handles = launcher.start(_specs(2), _ignore, 30)
    os.kill(launcher._fork_server.pid, signal.SIGKILL)
    for handle in handles:
        assert launcher.wait_exit(handle, 10)
        assert handle.exit_reason == "killed because the fork server exited"
        assert handle.pid is not None
        wait_until(lambda pid=handle.pid: not is_there(pid))


@pytest.mark.usefixtures("fresh_fork_servers")
def test_another_fork_server_takes_the_place_of_one_that_was_killed(launcher: LocalLauncher) -> None:
    handles = launcher.start(_specs(2), _ignore, 30)
    first = launcher._fork_server.pid
    os.kill(first, signal.SIGKILL)
    for handle in handles:
        assert launcher.wait_exit(handle, 10)
    (again,) = launcher.start(_specs(1), _ignore, 30)
    assert again.state is WorkerState.RUNNING
    assert launcher._fork_server.pid != first
    assert launcher.terminate([again], 1.0)
    launcher.close()
    assert not launcher.folder.exists()


@pytest.mark.parametrize("is_forked", [True, False])
def test_a_start_ends_when_the_launcher_is_closed_meanwhile(
    is_forked: bool, launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, begun, signalled = ForkServerProcess.send, threading.Event(), threading.Event()
    failures: list[WorkerStartFailed] = []
    monkeypatch.setattr("gradwire.cluster.local_launcher._KILL_TIMEOUT_S", 1.0)

    def send_late(self: ForkServerProcess, message: Any, fds: tuple[int, ...] = ()) -> None:
        if isinstance(message, ForkWorker):
            begun.set()
            assert signalled.wait(10.0)
            if not is_forked:
                return
        send(self, message, fds)
        if isinstance(message, SendSignal):
            signalled.set()

    def start() -> None:
        try:
            launcher.start(_specs(1), _ignore, 30)
        except WorkerStartFailed as error:
            failures.append(error)

    monkeypatch.setattr(ForkServerProcess, "send", send_late)
    thread = threading.Thread(target=start, name="start")
    thread.start()
    assert begun.wait(10.0)
    launcher.close()
    thread.join(5.0)
    assert not thread.is_alive()
    assert len(failures) == 1


@pytest.mark.usefixtures("fresh_fork_servers")
def test_a_fork_server_that_cannot_be_started_shows_why(monkeypatch: pytest.MonkeyPatch) -> None:
    close_idle_fork_server()
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(
        WorkerStartFailed, match=r"(?s)fork server exited before it was ready.*No module named 'gradwire'"
    ):
        LocalLauncher(60)


@pytest.mark.usefixtures("fresh_fork_servers")
def test_a_fork_server_that_is_too_slow_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    close_idle_fork_server()
    with pytest.raises(WorkerStartFailed, match="did not import torch in time"):
        LocalLauncher(0.0)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("gradwire-")] == []


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("fresh_fork_servers")
def test_the_import_of_torch_is_part_of_the_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(_progress_bar, "_DELAY_S", 0.0)
    monkeypatch.setattr(_forkserver, "REFRESH_S", 0.01)
    close_idle_fork_server()
    with pytest.raises(WorkerStartFailed, match="did not import torch in time"):
        Cluster.local(2, start_timeout_s=0.5)
    shown = terminal.getvalue()
    assert "starting 2 workers (importing torch)" in shown
    assert shown.endswith("\x1b[?25h"), "the bar has ended, and the cursor is shown again"


def test_there_may_be_no_limit_to_the_time_of_a_start() -> None:
    close_idle_fork_server()
    with Cluster.local(1, start_timeout_s=float("inf")) as cluster:
        assert cluster.workers[0].call(tasks.add, 1) == 2


def test_a_base_folder_that_cannot_be_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with pytest.raises(WorkerStartFailed, match="cannot create a folder for the workers' sockets"):
        LocalLauncher(60)


def test_a_long_base_folder_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "x" * 60)
    launcher = LocalLauncher(60)
    launcher.close()
    assert launcher.folder.parent.as_posix() == "/tmp"
