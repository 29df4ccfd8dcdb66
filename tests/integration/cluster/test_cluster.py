"""A cluster on this machine, as its user sees it."""

from __future__ import annotations

import importlib
import io
import itertools
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cluster import tasks
from cluster.processes import is_there
from cluster.shown import Shown
from gradwire import _progress_bar, rpc
from gradwire.cluster import api, local_launcher
from gradwire.cluster._forkserver import borrow_fork_server, close_idle_fork_server, return_fork_server
from gradwire.cluster.api import Cluster
from gradwire.config import GIB, KIB, MIB, Limits
from gradwire.errors import (
    AlreadyInitialized,
    CannotSend,
    ConfigurationError,
    LimitExceeded,
    NotExposed,
    NotInitialized,
    RpcError,
    RpcTimeout,
    WorkerLost,
    WorkerStartFailed,
)
from gradwire.testing import wait_until


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster.local(2) as cluster:
        yield cluster


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_start_that_takes_long_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(_progress_bar, "_DELAY_S", 0.0)
    monkeypatch.setattr(local_launcher, "REFRESH_S", 0.001)
    with Cluster.local(2):
        shown = terminal.getvalue()
    assert "starting 2 workers" in shown
    assert "/2" in shown
    assert terminal.getvalue() == shown, "the bar has ended"


def test_calls(cluster: Cluster) -> None:
    first, second = cluster.workers
    assert first.call(tasks.add, 3, right=4) == 7
    assert second.submit(tasks.add, 3).wait() == 4
    assert isinstance(first.submit(tasks.add, 1), torch.futures.Future)
    assert torch.equal(second.call(torch.add, torch.ones(3), 1), torch.full((3,), 2.0))
    assert first.call(lambda number: number * 2, 21) == 42
    with pytest.raises(ValueError, match="no luck"):
        first.call(tasks.fail, "no luck")


def test_workers_know_themselves_each_other_and_the_driver(cluster: Cluster) -> None:
    first, second = cluster.workers
    assert (first.name, first.rank, second.name, second.rank) == ("worker0", 0, "worker1", 1)
    assert first.call(tasks.who_am_i) == "worker0"
    assert first.call(tasks.ask_who, "worker1") == "worker1"
    assert second.call(tasks.ask_who, "driver") == "driver"
    assert rpc.rpc_sync("worker1", tasks.who_am_i) == "worker1"
    assert rpc.get_worker_info().name == "driver"


def test_a_worker_takes_over_what_the_driver_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/only/for/this/test")
    monkeypatch.setenv("TEST_COLOUR", "red")
    with Cluster.local(2, env={"TEST_COLOUR": "blue"}, threads_per_worker=2) as cluster:
        process = cluster.workers[0].call(tasks.describe_process)
    assert process["pid"] == cluster.workers[0].pid == process["session"]
    assert process["folder"] == str(tmp_path)
    assert process["path"] == sys.path
    assert process["argv"] == sys.argv
    assert process["colour"] == "blue"
    assert process["threads"] == 2
    assert process["sigint_is_ignored"]
    named = [name for name in process["thread_names"] if name != "MainThread"]
    assert named
    assert all(name.startswith("gradwire-worker0-") for name in named), named


def test_processes_have_the_names_of_their_workers() -> None:
    long_name = "parameter-server-with-a-long-name"
    with Cluster.local(2, names=["left", long_name]) as cluster:
        pids = [worker.pid for worker in cluster.workers]
        server = cluster.workers[0].call(tasks.parent_id, None)
        comms, titles = (
            [Path(f"/proc/{pid}/{file}").read_bytes().rstrip(b"\0\n").decode() for pid in (server, *pids)]
            for file in ("comm", "cmdline")
        )
    assert comms == ["gw-forkserver", "gw-left", "gw-parameter-se"]
    assert titles == ["gradwire:forkserver", "gradwire:left", f"gradwire:{long_name}"]


@pytest.mark.parametrize("modules", [[], ["numpy.random"]], ids=["numpy loaded later", "numpy loaded before the fork"])
def test_random_numbers_differ_between_workers_and_torch_repeats_them(modules: list[str]) -> None:
    close_idle_fork_server()
    return_fork_server(borrow_fork_server(60.0, modules))
    draws = []
    for _ in range(2):
        with Cluster.local(2) as cluster:
            draws += [worker.call(tasks.draw) for worker in cluster.workers]
    close_idle_fork_server()
    loaded, python_numbers, numpy_numbers, torch_numbers = (list(column) for column in zip(*draws, strict=True))
    assert loaded == [bool(modules)] * 4
    assert len(set(python_numbers)) == len(set(numpy_numbers)) == 4
    assert torch_numbers[0] != torch_numbers[1]
    assert torch_numbers[:2] == torch_numbers[2:]


def test_deadlines(cluster: Cluster, tmp_path: Path) -> None:
    worker = cluster.workers[0]
    assert worker.with_timeout(20).call(tasks.add, 1) == 2
    with pytest.raises(RpcTimeout):
        worker.with_timeout(0.2).call(tasks.block_until_killed, str(tmp_path / "ready"))


def test_map_keeps_the_order_and_uses_every_worker(cluster: Cluster) -> None:
    assert cluster.map(tasks.add, range(20)) == list(range(1, 21))
    assert cluster.map(tasks.add, (number for number in range(3))) == [1, 2, 3]
    assert cluster.map(tasks.add, []) == []
    assert len(set(cluster.map(tasks.process_id, range(8)))) == 2


def test_map_stops_at_the_first_error(cluster: Cluster) -> None:
    without_end = itertools.count()
    with pytest.raises(ValueError, match="three is not allowed"):
        cluster.map(tasks.square_unless_three, without_end)
    assert cluster.map(tasks.add, [1]) == [2]


def test_map_has_a_deadline_for_the_whole(cluster: Cluster, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RpcTimeout):
        cluster.map(tasks.block_until_killed, [str(tmp_path / "ready")] * 3, timeout=0.5)
    assert time.monotonic() - started < 10


def test_map_skips_dead_workers_and_says_when_none_is_left(cluster: Cluster) -> None:
    _kill(cluster, 0)
    assert cluster.map(tasks.add, range(5)) == [1, 2, 3, 4, 5]
    _kill(cluster, 1)
    with pytest.raises(WorkerLost, match="no worker of this cluster is alive"):
        cluster.map(tasks.add, range(5))


def test_status(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_SURVEY_S", 20.0)
    for _ in range(3):
        cluster.workers[1].call(tasks.add, 1)
    wait_until(lambda: cluster.status()[1].calls_served == 3)  # it counts a call after it has answered
    first, second = cluster.status()
    assert (first.name, first.rank, first.pid, first.state) == ("worker0", 0, cluster.workers[0].pid, "running")
    assert (first.calls_served, second.calls_served) == (0, 3)
    assert first.rss_bytes is not None
    assert first.rss_bytes > 10 << 20
    assert 0 < first.uptime_s < 60
    assert first.exit_reason is None
    assert "worker1" in str(cluster.status())


def test_metrics(cluster: Cluster) -> None:
    metrics = cluster.metrics()
    assert cluster.metrics() is metrics
    cluster.workers[0].call(tasks.add, 1)
    text = metrics.render().decode()
    assert 'gradwire_calls_total{function="cluster.tasks:add",outcome="ok",worker="driver"} 1.0' in text
    assert 'gradwire_run_duration_seconds_count{function="cluster.tasks:add",worker="worker0"} 1.0' in text
    assert 'gradwire_worker_up{worker="worker1"} 1.0' in text
    assert metrics.serve_workers().keys() == {"worker0", "worker1"}
    cluster.close()
    with pytest.raises(NotInitialized, match="this cluster is closed; start another one"):
        cluster.metrics()


def test_status_does_not_wait_for_a_worker_that_does_not_answer(cluster: Cluster, tmp_path: Path) -> None:
    wait_until(lambda: cluster.status()[1].calls_served == 0)  # it is connected
    cluster.workers[0].submit(tasks.hold_interpreter, str(tmp_path / "ready"))
    wait_until((tmp_path / "ready").exists)
    first, second = cluster.status()
    assert (first.state, first.calls_served) == ("running", None)
    assert second.calls_served == 0
    cluster.close(grace=0)


def _kill(cluster: Cluster, rank: int) -> None:
    worker = cluster.workers[rank]
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: not worker.is_alive)


def test_a_killed_worker_shows_up_and_the_others_go_on(cluster: Cluster, tmp_path: Path) -> None:
    first, second = cluster.workers
    pending = first.submit(tasks.block_until_killed, str(tmp_path / "ready"))
    wait_until((tmp_path / "ready").exists)
    _kill(cluster, 0)
    with pytest.raises(WorkerLost, match="worker0"):
        pending.wait()

    def driver_knows_why() -> bool:  # its connection ends before the fork server reports the signal
        with pytest.raises(WorkerLost, match="worker0") as caught:
            first.call(tasks.add, 1)
        return "killed by SIGKILL" in str(caught.value)

    wait_until(driver_knows_why)

    def others_know_why() -> bool:  # the driver tells them, which takes a moment
        with pytest.raises(RpcError, match="worker0") as caught:
            second.call(tasks.ask_who, "worker0")
        return "killed by SIGKILL" in str(caught.value)

    wait_until(others_know_why)
    assert second.call(tasks.add, 1) == 2
    lost, running = cluster.status()
    assert (lost.state, lost.exit_reason, lost.rss_bytes) == ("lost", "killed by SIGKILL", None)
    assert running.state == "running"
    assert repr(first) == f"<Worker worker0 rank=0 pid={first.pid} lost: killed by SIGKILL>"
    assert repr(cluster) == "<Cluster 1 of 2 workers alive>"


def test_what_workers_print_appears_with_their_name(capsys: pytest.CaptureFixture[str]) -> None:
    with Cluster.local(2, names=["left", "right"]) as cluster:
        cluster.workers[0].call(tasks.speak, "one\ntwo\nno end", "warning\n")
        cluster.workers[1].call(tasks.speak, "uno\n")
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line for line in lines if "[left]" in line] == ["[left] one", "[left] two", "[left] no end"]
    assert [line for line in lines if "[right]" in line] == ["[right] uno"]
    assert err == "[left] warning\n"


def test_progress_bars_of_workers_appear_while_they_run(tmp_path: Path) -> None:
    with Shown() as shown, Cluster.local(2) as cluster:
        for worker in cluster.workers:
            worker.submit(tasks.show_bar, str(tmp_path / "go on"))
        wait_until(lambda: {"[worker0]  10%", "[worker1]  10%"} <= set(shown.err.splitlines()))
        (tmp_path / "go on").touch()
    assert sorted(shown.err.splitlines()) == ["[worker0]  10%", "[worker0] 100%", "[worker1]  10%", "[worker1] 100%"]


def test_a_crash_in_native_code_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with Cluster.local(1) as cluster:
        with pytest.raises(WorkerLost):
            cluster.workers[0].call(tasks.crash)
        wait_until(lambda: cluster.status()[0].exit_reason == "killed by SIGSEGV")
    err = capsys.readouterr().err
    assert "[worker0] Fatal Python error: Segmentation fault" in err
    assert "in crash" in err


def test_clusters_one_after_the_other() -> None:
    pids = set()
    for count in (1, 3, 2):
        with Cluster.local(count) as cluster:
            pids.update(cluster.map(tasks.parent_id, range(count)))
            assert len(cluster.workers) == count
        assert not any(worker.is_alive for worker in cluster.workers)
    assert len(pids) == 1, "every cluster was forked from the same fork server"


def test_with_trust_in_data_only_what_is_exposed_can_be_called() -> None:
    with Cluster.local(1, trust="data", imports=["cluster.tasks"]) as cluster:
        assert cluster.workers[0].call(tasks.add, 1) == 2
        assert cluster.workers[0].call("cluster.tasks:add", 2) == 3
        with pytest.raises(CannotSend, match="expose"):
            cluster.workers[0].call(tasks.draw)
        with pytest.raises(NotExposed):
            cluster.workers[0].call("cluster.tasks:draw")
        wait_until(lambda: cluster.status()[0].calls_served == 3)


def test_limits_hold_in_both_directions() -> None:
    with Cluster.local(1, limits=Limits(frame_bytes=MIB, arena_bytes=64 * KIB)) as cluster:
        worker, large = cluster.workers[0], 2 * MIB
        with pytest.raises(LimitExceeded, match=r"Limits\.frame_bytes \(1,048,576\)"):
            worker.call(len, bytes(large))
        with pytest.raises(LimitExceeded, match=r"Limits\.frame_bytes \(1,048,576\)"):
            worker.call(bytes, large)
        assert worker.call(len, bytes(large // 4)) == large // 4


@pytest.mark.slow
def test_arguments_and_results_of_more_than_a_gibibyte() -> None:
    number = GIB // 4 + 1
    argument = torch.empty(number)  # memory that is not written to takes no time
    argument[-1] = 1
    with Cluster.local(1, limits=Limits(frame_bytes=2 * GIB)) as cluster:
        result = cluster.workers[0].call(torch.Tensor.add_, argument, 1)
    assert result.shape == (number,)
    assert result[-1] == 2


def test_a_worker_that_cannot_start_shows_its_traceback() -> None:
    with pytest.raises(WorkerStartFailed, match=r"(?s)worker0 printed:.*Traceback.*No module named 'not_there'"):
        Cluster.local(1, imports=["not_there"])
    with Cluster.local(1) as cluster:
        assert cluster.workers[0].call(tasks.add, 1) == 2


def test_a_script_without_a_guard_that_workers_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unguarded.py").write_text("import gradwire\ncluster = gradwire.Cluster.local(1)\n")
    (tmp_path / "joining.py").write_text("from gradwire import rpc\nrpc.init_rpc('me', rank=0, world_size=1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    guard = r'(?s)%s\.py, line 2, runs because.*    if __name__ == "__main__":\n        %s'
    with pytest.raises(WorkerStartFailed, match=guard % ("unguarded", r".*Cluster\.local\(\.\.\.\)")):
        Cluster.local(1, imports=["unguarded"])
    with pytest.raises(WorkerStartFailed, match=guard % ("joining", r"gradwire\.rpc\.init_rpc\(\.\.\.\)")):
        Cluster.local(1, imports=["joining"])
    with Cluster.local(1) as cluster:
        with pytest.raises(ConfigurationError, match=guard % ("unguarded", r"with gradwire\.Cluster\.local\(\.\.\.\)")):
            cluster.workers[0].call(importlib.import_module, "unguarded")
        with pytest.raises(AlreadyInitialized, match=guard % ("joining", r"gradwire\.rpc\.init_rpc\(\.\.\.\)")):
            cluster.workers[0].call(importlib.import_module, "joining")
        with pytest.raises(
            ConfigurationError, match=r"(?m)worker0 is a worker of a cluster, and only a driver can start a cluster$"
        ):
            cluster.workers[0].call(Cluster.local, 1)


def test_only_one_cluster_may_be_open(cluster: Cluster) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)Cluster\.current\(\)\.close\(\).*replace=True"):
        Cluster.local(1)
    assert cluster.workers[0].call(tasks.add, 1) == 2


def test_a_cluster_that_takes_the_place_of_the_open_one(cluster: Cluster) -> None:
    assert Cluster.current() is cluster
    with pytest.raises(ConfigurationError, match="n must be"):
        Cluster.local(0, replace=True)
    assert Cluster.current() is cluster, "wrong options close nothing"
    with Cluster.local(1, replace=True) as other:
        assert Cluster.current() is other
        assert repr(cluster) == "<Cluster closed>"
        assert not any(worker.is_alive for worker in cluster.workers)
        assert other.workers[0].call(tasks.add, 1) == 2
        cluster.close()
        assert Cluster.current() is other, "closing the old one again has no effect"
    assert Cluster.current() is None
    with Cluster.local(1, replace=True) as alone:
        assert Cluster.current() is alone


@pytest.mark.parametrize("graceful", [True, False])
def test_rpc_shutdown_in_the_driver_closes_the_cluster(cluster: Cluster, graceful: bool) -> None:
    started = time.monotonic()
    future = cluster.workers[0].submit(tasks.take_a_moment if graceful else tasks.wait_for_ever)
    rpc.shutdown(graceful=graceful)
    assert time.monotonic() - started < 5
    assert repr(cluster) == "<Cluster closed>"
    assert Cluster.current() is None
    assert not any(is_there(worker.pid) for worker in cluster.workers if worker.pid is not None)
    if graceful:
        assert future.wait() == "done"
    else:
        with pytest.raises(WorkerLost):
            future.wait()
    with pytest.raises(NotInitialized):
        rpc.shutdown()


def test_rpc_shutdown_gives_calls_the_time_that_it_is_given(cluster: Cluster, tmp_path: Path) -> None:
    future = cluster.workers[0].submit(tasks.block_until_killed, str(tmp_path / "ready"))
    wait_until((tmp_path / "ready").exists)
    started = time.monotonic()
    rpc.shutdown(timeout=0.3)
    assert time.monotonic() - started < 10.0
    with pytest.raises(WorkerLost):
        future.wait()


def test_rpc_shutdown_in_a_worker_is_the_drivers_business(cluster: Cluster) -> None:
    for graceful in (True, False):
        with pytest.raises(RpcError, match=r"worker1 was started by a cluster's driver.*cluster\.close\(\)"):
            cluster.workers[1].call(rpc.shutdown, graceful)
    assert cluster.workers[1].call(tasks.add, 1) == 2


def test_after_the_end(cluster: Cluster) -> None:
    cluster.close()
    cluster.close()
    assert repr(cluster) == "<Cluster closed>"
    assert [status.exit_reason for status in cluster.status()] == ["exited with code 0"] * 2
    with pytest.raises(NotInitialized, match=r"driver has shut down; .* start another Cluster"):
        cluster.workers[0].call(tasks.add, 1)
    with pytest.raises(NotInitialized):
        rpc.rpc_sync("worker0", tasks.add, (1,))
    with pytest.raises(NotInitialized, match="this cluster is closed"):
        cluster.dashboard()
    with pytest.raises(NotInitialized), cluster.trace("run.json"):
        pass


def test_leaving_the_block_waits_for_calls_under_way() -> None:
    with Cluster.local(1) as cluster:
        future = cluster.workers[0].submit(tasks.take_a_moment)
    assert future.wait() == "done"


def test_an_exception_in_the_block_ends_the_workers() -> None:
    with pytest.raises(KeyError), Cluster.local(2) as cluster:
        raise KeyError("in the block")
    assert not any(is_there(worker.pid) for worker in cluster.workers if worker.pid is not None)


def test_a_worker_that_holds_the_interpreter_and_ignores_sigterm_is_ended(cluster: Cluster, tmp_path: Path) -> None:
    first, second = cluster.workers
    first.call(tasks.ignore_sigterm)
    first.submit(tasks.hold_interpreter, str(tmp_path / "ready"))
    wait_until((tmp_path / "ready").exists)
    cluster.close(grace=3)
    assert first.pid is not None
    assert not is_there(first.pid)
    assert [status.exit_reason for status in cluster.status()] == ["killed by SIGKILL", "exited with code 0"]
    assert not second.is_alive


def test_processes_that_a_worker_started_end_with_it(cluster: Cluster) -> None:
    child = cluster.workers[0].call(tasks.spawn_child)
    assert is_there(child)
    _kill(cluster, 0)
    wait_until(lambda: not is_there(child))


def test_a_process_that_the_driver_forked_does_not_end_the_cluster(cluster: Cluster) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12: there are threads, yes
        pid = os.fork()
    if pid == 0:
        refusals = 0
        changes: list[Callable[[], object]] = [
            lambda: cluster.add_workers(1),
            lambda: cluster.remove("worker0"),
            cluster.wait_for_workers,
            lambda: cluster.on_membership(print),
        ]
        for change in changes:
            try:
                change()
            except NotInitialized as error:
                refusals += f"belongs to process {os.getppid()}" in str(error)
        signal.alarm(20)  # ends it if it waits
        with cluster._lock:  # as another thread of the driver may have done
            cluster.close()
        os._exit(refusals)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4, "each change is refused"
    assert cluster.workers[0].call(tasks.add, 1) == 2
