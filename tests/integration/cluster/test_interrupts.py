"""Ctrl-C while a cluster starts, works or ends: the wait is given up, and no process is left."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import tasks
from cluster.processes import children_of, is_there, stopped
from gradwire import _interrupts
from gradwire.cluster._forkserver import ForkServerProcess, close_idle_fork_server
from gradwire.cluster._supervisor import Supervisor
from gradwire.cluster.api import Cluster
from gradwire.cluster.local_launcher import LocalLauncher
from gradwire.cluster.map import MapRun
from gradwire.errors import WorkerLost
from gradwire.rpc.agent import Agent
from gradwire.testing import wait_until

Interrupt = Callable[[Any, str], None]


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupt]:
    """``interrupt(owner, "name")``: Ctrl-C when the main thread enters that function for the first time."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it for its background jobs

    def prepare(owner: Any, name: str) -> None:
        original, has_hit = getattr(owner, name), False

        def entered(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_hit
            if not has_hit and threading.current_thread() is threading.main_thread():
                has_hit = True
                _press_in_gradwire()
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, entered)

    yield prepare
    signal.signal(signal.SIGINT, before)


def _press_in_gradwire() -> None:
    """Interrupt code of gradwire: where this module's function is the inner one, the marked caller must not count."""
    exec("press()", {"__name__": "gradwire.example", "press": lambda: signal.raise_signal(signal.SIGINT)})


@pytest.mark.usefixtures("fresh_fork_servers")
def test_while_the_fork_server_starts(interrupt: Interrupt) -> None:
    close_idle_fork_server()
    before = set(children_of(os.getpid()))  # of other tests in this process
    interrupt(ForkServerProcess, "_wait_ready")
    with pytest.raises(KeyboardInterrupt):
        Cluster.local(1)
    assert set(children_of(os.getpid())) <= before
    assert Cluster.current() is None


@pytest.mark.parametrize(
    ("owner", "name"),
    [(LocalLauncher, "_make_folder"), (LocalLauncher, "_fork"), (Supervisor, "watch"), (Supervisor, "wait_until")],
)
def test_while_workers_start(interrupt: Interrupt, owner: type, name: str) -> None:
    interrupt(owner, name)
    with pytest.raises(KeyboardInterrupt):
        Cluster.local(2)
    assert [worker for server in children_of(os.getpid()) for worker in children_of(server)] == []
    assert Cluster.current() is None
    with Cluster.local(1) as cluster:
        assert cluster.workers[0].call(tasks.add, 1) == 2


@pytest.mark.parametrize(("owner", "name"), [(MapRun, "_submit_all_that_fit"), (MapRun, "_take_one")])
def test_map_is_given_up(interrupt: Interrupt, tmp_path: Path, owner: type, name: str) -> None:
    with Cluster.local(1) as cluster:
        interrupt(owner, name)
        with _interrupts.installed(), pytest.raises(KeyboardInterrupt):
            cluster.map(tasks.block_until_killed, [str(tmp_path / "ready")])
        assert cluster.map(tasks.add, [1]) == [2]
        assert cluster.workers[0].is_alive


def test_status_is_given_up(interrupt: Interrupt) -> None:
    with Cluster.local(1) as cluster:
        wait_until(lambda: cluster.status()[0].calls_served == 0, 10.0, "that it is connected")
        with stopped(cluster.workers[0].pid):  # and does not answer any more
            interrupt(Agent, "ask_all")
            with _interrupts.installed(), pytest.raises(KeyboardInterrupt):
                cluster.status()
        assert cluster.status()[0].state == "running"


def test_closing_does_not_wait_any_longer_and_ends_all(interrupt: Interrupt, tmp_path: Path) -> None:
    cluster = Cluster.local(2)
    cluster.workers[0].submit(tasks.block_until_killed, str(tmp_path / "ready"))
    wait_until((tmp_path / "ready").exists)
    interrupt(_interrupts, "sleep")
    with pytest.raises(KeyboardInterrupt):
        cluster.close(grace=100)
    assert not any(is_there(worker.pid) for worker in cluster.workers if worker.pid is not None)
    assert Cluster.current() is None
    cluster.close()


def test_leaving_ends_workers_that_do_not_leave(interrupt: Interrupt) -> None:
    cluster = Cluster.local(2)
    interrupt(Supervisor, "expect_end_of")
    with pytest.raises(KeyboardInterrupt):
        cluster.close()
    assert not any(is_there(worker.pid) for worker in cluster.workers if worker.pid is not None)
    assert Cluster.current() is None


def test_while_a_worker_is_removed(interrupt: Interrupt, tmp_path: Path) -> None:
    with Cluster.local(2) as cluster:
        first, second = cluster.workers
        pid = first.pid
        assert pid is not None
        call = first.submit(tasks.block_until_killed, str(tmp_path / "ready"))
        wait_until((tmp_path / "ready").exists)
        interrupt(_interrupts, "sleep")
        with pytest.raises(KeyboardInterrupt):
            cluster.remove(first, grace=30.0)
        wait_until(lambda: not is_there(pid), 5.0, "the end of the worker that was removed")
        assert cluster.workers == (second,)
        with pytest.raises(WorkerLost):
            call.wait()
        assert second.call(tasks.add, 1) == 2
