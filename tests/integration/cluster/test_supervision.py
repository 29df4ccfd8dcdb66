"""Workers that are lost and started again, added and removed: what the driver and the other workers see of it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import gradwire
from cluster import tasks
from cluster.process_scheduler import ProcessScheduler, ScheduledProcess
from cluster.processes import is_there
from gradwire import autograd, rpc
from gradwire.cluster import Cluster, MembershipEvent, Worker, log_level
from gradwire.cluster._supervisor import LocalWorker
from gradwire.cluster.local_launcher import LocalLauncher
from gradwire.cluster.remote_launcher import RemoteOptions, start_remote
from gradwire.cluster.supervision import SupervisionOptions
from gradwire.config import WorkerConfig
from gradwire.errors import (
    BackwardFailed,
    ConfigurationError,
    OptimizerError,
    OwnerLost,
    RpcTimeout,
    UnknownWorker,
    WorkerLost,
    WorkerStartFailed,
)
from gradwire.optim import DistributedOptimizer
from gradwire.rref import remote
from gradwire.testing import wait_until


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster.local(2, restart="on-loss") as cluster:
        yield cluster


def kill(worker: Worker, signum: int = signal.SIGKILL) -> int:
    """Send a signal to a worker's process and return the process id."""
    pid = worker.pid
    assert pid is not None
    os.kill(pid, signum)
    return pid


def answers(worker: Worker) -> bool:
    """Whether a call reaches the worker; it does not while its process is being started again."""
    try:
        return worker.with_timeout(20).call(os.getpid) == worker.pid
    except WorkerLost:
        return False


def kill_and_wait(cluster: Cluster, worker: Worker) -> None:
    pid = kill(worker)
    wait_until(lambda: worker.pid != pid, 30.0, "another process")
    cluster.wait_for_workers(timeout=30.0)


def fork_server_of(cluster: Cluster) -> int:
    launcher = cluster._monitor.launcher
    assert isinstance(launcher, LocalLauncher)
    return launcher._fork_server.pid


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def ask_pid(name: str) -> int:
    """Lets one worker ask another one."""
    return rpc.rpc_sync(name, os.getpid)


# -- restarts ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_fork_servers")
def test_workers_come_back_when_their_fork_server_was_killed(cluster: Cluster) -> None:
    pids = [worker.pid for worker in cluster.workers]
    os.kill(fork_server_of(cluster), signal.SIGKILL)
    wait_until(lambda: all(worker.pid not in pids for worker in cluster.workers), 40.0, "other processes")
    first, second = cluster.wait_for_workers(timeout=30.0)
    assert first.call(ask_pid, second.name) == second.pid
    kill_and_wait(cluster, first)
    assert second.call(ask_pid, first.name) == first.pid
    assert [status.restarts for status in cluster.status()] == [2, 1]


def test_a_killed_worker_comes_back_under_its_name() -> None:
    rebuilt: list[tuple[str, int]] = []

    def rebuild(worker: Worker) -> None:
        rebuilt.append((worker.name, worker.call(os.getpid)))

    with Cluster.local(3, restart="on-loss", on_restart=rebuild) as cluster:
        events: list[MembershipEvent] = []
        cluster.on_membership(events.append)
        first, second, third = cluster.workers
        assert second.call(ask_pid, "worker0") == first.pid  # connected with the process that is about to end
        kill_and_wait(cluster, first)
        assert rebuilt == [("worker0", first.pid)]
        assert cluster.workers == (first, second, third), "it is the same worker for the program"
        assert [worker.rank for worker in cluster.workers] == [0, 1, 2]
        assert first.call(os.getpid) == first.pid
        for other in (second, third):  # the third has never met the first process
            assert other.call(ask_pid, "worker0") == first.pid
            assert first.call(ask_pid, other.name) == other.pid
        wait_until(lambda: len(events) == 2)
        assert [(event.kind, event.worker) for event in events] == [("lost", first), ("restarted", first)]
        assert "killed by SIGKILL" in (events[0].reason or "")
        assert [(row.state, row.restarts, row.exit_reason) for row in cluster.status()] == [
            ("running", 1, None),
            ("running", 0, None),
            ("running", 0, None),
        ]


def test_the_next_rebuild_of_a_worker_waits_for_the_last_one() -> None:
    pids: list[int | None] = []
    is_second_there, overlaps = threading.Event(), []

    def rebuild(worker: Worker) -> None:
        pids.append(worker.pid)
        if len(pids) == 1:
            kill(worker)
            wait_until(lambda: answers(worker), 30.0, "another process that answers")
            assert worker.pid not in pids
            overlaps.append(is_second_there.wait(1.5))
        else:
            is_second_there.set()

    with Cluster.local(1, restart="on-loss", on_restart=rebuild) as cluster:
        kill(cluster.workers[0])
        wait_until(is_second_there.is_set, 40.0, "the second rebuild")
        cluster.wait_for_workers(timeout=30.0)
        assert overlaps == [False]
        assert pids[1] == cluster.workers[0].pid


def test_a_new_process_counts_as_newer_where_the_clock_is_behind(cluster: Cluster) -> None:
    first, second = cluster.workers
    handle = cluster._monitor.members()[0].handle
    assert handle.address is not None
    an_hour_ns = 3600 * 10**9
    handle.address = msgspec.structs.replace(handle.address, incarnation=handle.address.incarnation + an_hour_ns)
    kill_and_wait(cluster, first)
    assert second.call(ask_pid, first.name) == first.pid


def hold_starts(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let every start from now on wait until the event is set."""
    may_start, start = threading.Event(), LocalLauncher.start

    def slow_start(self: LocalLauncher, *args: Any) -> Any:
        may_start.wait(30.0)
        return start(self, *args)

    monkeypatch.setattr(LocalLauncher, "start", slow_start)
    return may_start


def test_calls_fail_at_once_while_a_worker_is_restarted(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_start = hold_starts(monkeypatch)
    first, second = cluster.workers
    pending = first.submit(tasks.block_until_killed, str(tmp_path / "ready"))
    wait_until((tmp_path / "ready").exists)
    began = time.monotonic()
    kill(first)
    with pytest.raises(WorkerLost, match="worker0"):
        pending.wait()
    assert time.monotonic() - began < 10.0  # the start is held for 30 s
    wait_until(lambda: cluster.status()[0].state == "restarting")
    assert not first.is_alive

    def says_so(call: Callable[[], object]) -> bool:  # at first only that the connection has ended
        with pytest.raises(WorkerLost, match="worker0") as caught:
            call()
        return "killed by SIGKILL; it is being restarted, and Cluster.wait_for_workers()" in str(caught.value)

    wait_until(lambda: says_so(lambda: first.call(os.getpid)))
    wait_until(lambda: says_so(lambda: second.call(ask_pid, "worker0")))
    assert cluster.wait_for_workers(1) == (second,)
    with pytest.raises(
        RpcTimeout, match=r"1 of 2 workers were ready after 0.05 s; worker0: killed by SIGKILL; it is being"
    ):
        cluster.wait_for_workers(2, timeout=0.05)
    may_start.set()
    assert cluster.wait_for_workers(2) == (first, second)
    assert second.call(ask_pid, "worker0") == first.call(os.getpid)


def test_a_worker_that_cannot_be_rebuilt_is_tried_again_and_then_stays_lost(caplog: pytest.LogCaptureFixture) -> None:
    attempts: list[int | None] = []

    def rebuild(worker: Worker) -> None:
        attempts.append(worker.pid)
        raise FileNotFoundError("no checkpoint yet")

    with Cluster.local(2, restart="on-loss", on_restart=rebuild, max_restarts=2) as cluster:
        first, second = cluster.workers
        kill(first)
        with pytest.raises(
            WorkerLost, match=r"worker0: on_restart raised FileNotFoundError: no checkpoint yet; .*2 times"
        ):
            cluster.wait_for_workers()
        assert len(set(attempts)) == 2
        wait_until(lambda: not any(is_there(pid) for pid in attempts if pid is not None), what="that they are ended")
        assert [record.message for record in caplog.records if record.exc_text] == ["on_restart(worker0) failed"] * 2
        status = cluster.status()[0]
        assert status.state == "lost"
        assert "will not be restarted again" in (status.exit_reason or "")
        with pytest.raises(WorkerLost, match="no checkpoint yet"):
            second.call(ask_pid, "worker0")
        assert second.call(os.getpid) == second.pid


def test_a_start_that_fails_is_tried_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    start, num_failures = LocalLauncher.start, iter([True, False])

    def fail_once(self: LocalLauncher, *args: Any) -> Any:
        if next(num_failures, False):
            raise WorkerStartFailed("no room")
        return start(self, *args)

    monkeypatch.setattr(LocalLauncher, "start", fail_once)
    events: list[MembershipEvent] = []
    cluster.on_membership(events.append)
    kill_and_wait(cluster, cluster.workers[0])
    wait_until(lambda: len(events) == 3)
    assert [event.kind for event in events] == ["lost", "lost", "restarted"]
    assert "could not be restarted: no room" in (events[1].reason or "")


def test_two_workers_that_are_killed_at_once(cluster: Cluster) -> None:
    first, second = cluster.workers
    pids = [kill(worker) for worker in (first, second)]
    wait_until(lambda: first.pid != pids[0] and second.pid != pids[1])
    cluster.wait_for_workers()
    assert first.call(ask_pid, "worker1") == second.pid
    assert second.call(ask_pid, "worker0") == first.pid


def test_without_restarts_waiting_for_a_lost_worker_ends_at_once() -> None:
    with Cluster.local(2) as cluster:
        kill(cluster.workers[0])
        with pytest.raises(WorkerLost, match=r"only 1 of 2 workers are ready.*; worker0: killed by SIGKILL"):
            cluster.wait_for_workers()
        assert cluster.wait_for_workers(1) == cluster.workers[1:]


@pytest.mark.parametrize("is_rebuilding", [False, True])
def test_a_cluster_may_be_closed_while_a_worker_is_restarted(
    is_rebuilding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = threading.Event()

    def rebuild(worker: Worker) -> None:
        began.set()
        worker.with_timeout(0).call(tasks.wait_for_ever)

    with Cluster.local(1, restart="on-loss", on_restart=rebuild) as cluster:
        if not is_rebuilding:
            start = LocalLauncher.start
            monkeypatch.setattr(LocalLauncher, "start", lambda self, *args: began.set() or start(self, *args))
        kill(cluster.workers[0])
        assert began.wait(30.0)
        cluster.close(grace=0)


def test_callbacks_come_in_order_and_end(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    events: list[str] = []
    threads: set[str] = set()

    def fail(event: MembershipEvent) -> None:
        threads.add(threading.current_thread().name)
        raise ValueError("no")

    cluster.on_membership(fail)
    unregister = cluster.on_membership(lambda event: events.append(f"{event.kind} {event.worker.name}"))
    (third,) = cluster.add_workers(1)
    kill_and_wait(cluster, third)
    cluster.remove(third)
    expected = ["joined worker2", "lost worker2", "restarted worker2", "left worker2"]
    wait_until(lambda: len(events) == 4)
    assert events == expected
    assert len([record for record in caplog.records if "on_membership" in record.message]) == 4
    assert threads == {"gradwire-driver-events"}
    unregister()
    unregister()
    cluster.add_workers(1)
    wait_until(lambda: len([record for record in caplog.records if "on_membership" in record.message]) == 5)
    assert events == expected


# -- what the layers above make of it ------------------------------------------------------------------------------------


def test_references_end_with_the_process_and_new_ones_work(cluster: Cluster) -> None:
    first, second = cluster.workers
    old = remote("worker0", torch.ones, args=(2,))
    assert torch.equal(old.to_here(), torch.ones(2))
    with autograd.context():
        pass
    kill_and_wait(cluster, first)
    with pytest.raises(OwnerLost, match="worker0"):
        old.to_here()
    with pytest.raises(OwnerLost, match="worker0"):
        second.call(fetch, old)
    new = remote("worker0", torch.zeros, args=(2,))
    assert torch.equal(new.to_here(), torch.zeros(2))
    assert torch.equal(second.call(fetch, new), torch.zeros(2))


def fetch(reference: Any) -> torch.Tensor:
    value: torch.Tensor = reference.to_here()
    return value


def test_gradients_that_were_lost_are_told_and_later_contexts_work(cluster: Cluster) -> None:
    first, _ = cluster.workers
    x = torch.arange(3.0, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker0", square, args=(x,)).sum()
        kill_and_wait(cluster, first)
        with pytest.raises((BackwardFailed, WorkerLost), match="worker0"):
            autograd.backward(context_id, [loss])
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker0", square, args=(x,)).sum()
        autograd.backward(context_id, [loss])
        assert torch.equal(autograd.get_gradients(context_id)[x], 2 * x.detach())


def test_a_context_in_which_a_worker_was_restarted_takes_calls_to_the_new_process(cluster: Cluster) -> None:
    """What the old process knew of the context is gone; what is made after that has its gradients."""
    first, _ = cluster.workers
    x = torch.arange(3.0, requires_grad=True)
    with autograd.context() as context_id:
        rpc.rpc_sync("worker0", square, args=(x,))
        kill_and_wait(cluster, first)
        loss = rpc.rpc_sync("worker0", square, args=(x,)).sum()
        autograd.backward(context_id, [loss])
        assert torch.equal(autograd.get_gradients(context_id)[x], 2 * x.detach())


def test_optimizers_and_modules_are_made_again(cluster: Cluster) -> None:
    first, second = cluster.workers
    inputs = torch.ones(1, 2)

    def make() -> tuple[list[Any], DistributedOptimizer]:
        modules = [first.module(torch.nn.Linear, 2, 2), second.module(torch.nn.Linear, 2, 2)]
        parameters = [parameter for module in modules for parameter in module.remote_parameters()]
        return modules, DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)

    def step(modules: Sequence[Any], optimizer: DistributedOptimizer) -> None:
        with autograd.context() as context_id:
            autograd.backward(context_id, [modules[1](modules[0](inputs)).sum()])
            optimizer.step(context_id)

    modules, optimizer = make()
    step(modules, optimizer)
    kill_and_wait(cluster, first)
    with pytest.raises((OwnerLost, WorkerLost), match="worker0"):
        modules[0](inputs)
    with autograd.context() as context_id:
        autograd.backward(context_id, [modules[1](inputs).sum()])
        with pytest.raises((OptimizerError, WorkerLost), match="worker0"):
            optimizer.step(context_id)
    modules, optimizer = make()
    step(modules, optimizer)


def test_functions_and_large_tensors_travel_to_the_new_process(cluster: Cluster) -> None:
    """The old process had the functions already, and had lent and borrowed shared memory."""
    first, second = cluster.workers
    factor, large = 3, torch.ones(1 << 16)
    triple: Callable[[torch.Tensor], torch.Tensor] = lambda x: x * factor  # noqa: E731  (it travels by value)
    for _ in range(2):
        for _ in range(2):
            assert torch.equal(first.call(triple, large), large * 3)
            assert torch.equal(second.call(ask_for, "worker0", triple, large), large * 3)
        kept = first.call(triple, large)
        kill_and_wait(cluster, first)
        assert torch.equal(kept, large * 3), "what came from the old process stays"


def ask_for(name: str, function: Callable[[torch.Tensor], torch.Tensor], value: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = rpc.rpc_sync(name, function, args=(value,))
    return found


def meet(names: Sequence[str] | None) -> list[str]:
    from gradwire.rpc.api import _all_gather

    return sorted(_all_gather(os.getpid(), names, 20.0))


def meet_everywhere(cluster: Cluster) -> list[list[str]]:
    """Let all members gather, the driver too."""
    futures = [worker.submit(meet, None) for worker in cluster.workers]
    return [meet(None), *(future.wait() for future in futures)]


def test_gatherings_follow_the_membership(cluster: Cluster) -> None:
    assert meet_everywhere(cluster) == [["driver", "worker0", "worker1"]] * 3
    kill_and_wait(cluster, cluster.workers[0])
    assert meet_everywhere(cluster) == [["driver", "worker0", "worker1"]] * 3
    cluster.add_workers(1)
    assert meet_everywhere(cluster) == [["driver", "worker0", "worker1", "worker2"]] * 4
    cluster.remove("worker0")
    assert meet_everywhere(cluster) == [["driver", "worker1", "worker2"]] * 3


# -- adding and removing -------------------------------------------------------------------------------------------------


def test_workers_are_added_and_removed() -> None:
    with Cluster.local(3, roles={"ps": 1, "trainer": 2}) as cluster:
        assert [(worker.name, worker.rank, worker.role) for worker in cluster.workers] == [
            ("ps0", 0, "ps"),
            ("trainer0", 1, "trainer"),
            ("trainer1", 2, "trainer"),
        ]
        server, first, second = cluster.workers
        (third,) = cluster.add_workers(1, role="trainer")
        (extra,) = cluster.add_workers(1, names=["extra"])
        assert [(worker.name, worker.rank, worker.role) for worker in (third, extra)] == [
            ("trainer2", 4, "trainer"),
            ("extra", 5, "worker"),
        ]
        assert cluster.workers == (server, first, second, third, extra)
        assert server.call(ask_pid, "trainer2") == third.pid
        assert third.call(ask_pid, "extra") == extra.pid
        assert extra.call(ask_pid, "driver") == os.getpid()
        held = remote("trainer0", torch.ones, args=(2,))
        held.to_here()
        pid = first.pid
        cluster.remove(first)
        assert not is_there(pid or 0)
        assert cluster.workers == (server, second, third, extra)
        for caller in (server, third):
            with pytest.raises(WorkerLost, match="trainer0 is lost: it was removed from the cluster"):
                caller.call(ask_pid, "trainer0")
        with pytest.raises(WorkerLost, match="removed"):
            first.call(os.getpid)
        with pytest.raises(OwnerLost, match="trainer0"):
            held.to_here()
        with pytest.raises(UnknownWorker, match="cannot remove 'trainer0'"):
            cluster.remove(first)
        (again,) = cluster.add_workers(1, names=["trainer0"])
        assert (again.name, again.rank) == ("trainer0", 6)
        assert server.call(ask_pid, "trainer0") == again.pid
        (fourth,) = cluster.add_workers(1, role="trainer")
        assert fourth.name == "trainer3"
        text = cluster.describe()
        assert all(
            word in text for word in ("trainer3: rank 7", f"process {fourth.pid}", "ps0: rank 0, ps", torch.__version__)
        )


def test_removing_lets_calls_under_way_end_and_wins_over_a_restart(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = cluster.workers
    future = second.submit(tasks.add_slowly, 1)
    cluster.remove(second)
    assert future.wait() == 2
    may_start = hold_starts(monkeypatch)
    kill(first)
    wait_until(lambda: cluster.status()[0].state == "restarting")
    cluster.remove(first, grace=0)
    may_start.set()
    assert cluster.workers == ()
    with pytest.raises(WorkerLost, match="removed"):
        first.call(os.getpid)


def test_wrong_changes(cluster: Cluster) -> None:
    with pytest.raises(ConfigurationError, match="already has a worker named worker0"):
        cluster.add_workers(1, names=["worker0"])
    with pytest.raises(ConfigurationError, match="letters, digits"):
        cluster.add_workers(1, role="a b")
    with pytest.raises(ConfigurationError, match="n must be"):
        cluster.add_workers(0)
    with pytest.raises(ConfigurationError, match='restart must be "never" or "on-loss"'):
        Cluster.local(1, restart="always", replace=True)  # type: ignore[arg-type]


def test_a_callback_that_would_never_be_called_is_refused() -> None:
    with pytest.raises(ConfigurationError, match='on_restart is never called with restart="never"'):
        Cluster.local(1, on_restart=print)


def test_a_worker_that_cannot_be_added_leaves_the_cluster_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fragile.py").write_text(
        "import os\nif os.path.exists(os.environ['BROKEN']): raise ValueError('broken')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with Cluster.local(1, imports=["fragile"], env={"BROKEN": str(tmp_path / "broken")}) as cluster:
        (tmp_path / "broken").touch()
        with pytest.raises(WorkerStartFailed, match=r"(?s)worker\d exited before it was ready.*ValueError: broken"):
            cluster.add_workers(2)
        assert [worker.name for worker in cluster.workers] == ["worker0"]
        (tmp_path / "broken").unlink()
        (added,) = cluster.add_workers(1)
        assert added.name == "worker1"
        assert cluster.workers[0].call(ask_pid, "worker1") == added.pid


# -- workers that are stopped --------------------------------------------------------------------------------------------


def test_a_worker_that_is_stopped_too_long_is_replaced() -> None:
    with Cluster.local(2, restart="on-loss", lost_after=2.0) as cluster:
        first, second = cluster.workers
        assert second.call(ask_pid, "worker0") == first.pid
        pending = first.submit(tasks.wait_for_ever)
        old = kill(first, signal.SIGSTOP)
        with pytest.raises(WorkerLost, match=r"worker0 failed: it has not responded for \d s"):
            pending.wait()
        wait_until(lambda: first.pid != old)
        cluster.wait_for_workers()
        assert not is_there(old)
        assert second.call(ask_pid, "worker0") == first.pid
        assert second.is_alive


def test_a_stopped_worker_that_cannot_be_killed_is_refused_and_ends_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As behind a network that is cut: the launcher cannot reach the process."""
    signal_workers, spared = LocalLauncher._signal, set()

    def spare(self: LocalLauncher, workers: Sequence[LocalWorker], signum: int) -> None:
        signal_workers(self, [worker for worker in workers if worker.handle.pid not in spared], signum)

    monkeypatch.setattr(LocalLauncher, "_signal", spare)
    monkeypatch.setattr("gradwire.cluster.local_launcher._KILL_TIMEOUT_S", 0.2)
    with Cluster.local(2, restart="on-loss", lost_after=2.0) as cluster:
        first, second = cluster.workers
        mark = str(tmp_path / "mark")
        late = second.submit(tasks.call_and_mark, "worker0", mark)  # the old process is to answer after it was replaced
        wait_until(Path(mark).exists)
        spared.add(old := kill(first, signal.SIGSTOP))
        wait_until(lambda: first.pid != old, 20.0)
        cluster.wait_for_workers()
        with pytest.raises(WorkerLost, match="has not responded"):
            late.wait()
        assert is_there(old)
        assert "cannot be stopped" in caplog.text
        Path(mark).unlink()  # what the old process waits for
        os.kill(old, signal.SIGCONT)
        wait_until(lambda: not is_there(old), 10.0, "the end of the old process")
        assert second.call(ask_pid, "worker0") == first.pid == first.call(os.getpid)
        spared.clear()


@pytest.mark.slow
def test_a_stopped_worker_of_a_scheduler_that_cannot_kill_it_ends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    kill_process, spared = ScheduledProcess.kill, set()
    monkeypatch.setattr(ScheduledProcess, "kill", lambda self: None if self.pid in spared else kill_process(self))
    monkeypatch.setattr("gradwire.cluster.remote_launcher._KILL_S", 0.2)
    options = RemoteOptions(num_workers=2, config=WorkerConfig(trust="code"), start_timeout_s=60.0)
    supervision = SupervisionOptions(restart="on-loss", lost_after_s=3.0)
    scheduler = ProcessScheduler()
    with Cluster(*start_remote(scheduler, options, supervision)) as cluster:
        first, second = cluster.workers
        assert second.call(ask_pid, "worker0") == first.pid
        spared.add(old := kill(first, signal.SIGSTOP))
        wait_until(lambda: first.pid != old, 60.0)
        cluster.wait_for_workers()
        (process,) = [item for item in scheduler.processes if item.pid == old]
        assert process.end_reason() is None
        os.kill(old, signal.SIGCONT)
        wait_until(lambda: process.end_reason() is not None, 20.0, "the end of the old process")
        assert second.call(ask_pid, "worker0") == first.pid == first.call(os.getpid)
        spared.clear()


def test_a_driver_that_is_stopped_itself_keeps_its_workers() -> None:
    """Time in which the driver did not run does not count: here its threads, which ask, do not run for a while."""
    with Cluster.local(1, restart="on-loss", lost_after=2.0) as cluster:
        (worker,) = cluster.workers
        pid = worker.pid
        wait_until(lambda: cluster._monitor._supervision._last_tick is not None)
        with cluster._monitor._changed:
            signal.sigtimedwait([], 4.0)  # nobody can ask or take an answer
        assert worker.call(os.getpid) == pid
        assert cluster.status()[0].restarts == 0


def test_losses_are_logged(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gradwire"):
        kill_and_wait(cluster, cluster.workers[0])
    assert "worker worker0 is lost: killed by SIGKILL; it is being restarted" in caplog.text


@pytest.fixture
def _unchanged_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(log_level, "_of_workers", None)
    logger = logging.getLogger("gradwire")
    before = logger.level, list(logger.handlers)
    yield
    logger.setLevel(before[0])
    logger.handlers[:] = before[1]


@pytest.mark.usefixtures("_unchanged_logger")
def test_the_log_level_is_set_on_workers_also_after_a_restart() -> None:
    gradwire.set_log_level("info")
    with Cluster.local(2, restart="on-loss") as cluster:
        assert [worker.call(_log_level) for worker in cluster.workers] == [logging.INFO] * 2
        gradwire.set_log_level("warning")
        assert [worker.call(_log_level) for worker in cluster.workers] == [logging.WARNING] * 2
        kill_and_wait(cluster, cluster.workers[0])
        cluster.wait_for_workers()
        wait_until(lambda: cluster.workers[0].call(_log_level) == logging.WARNING)


def _log_level() -> int:
    return logging.getLogger("gradwire").level
