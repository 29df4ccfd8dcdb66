"""One trace of all workers, read back as viewers read it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from cluster.processes import stopped
from gradwire import Cluster, autograd, rpc
from gradwire.cli.app import app
from gradwire.cli.status_view import choose_socket
from gradwire.cluster import Trace
from gradwire.cluster import trace as trace_module
from gradwire.cluster.status_socket import Request
from gradwire.cluster.trace_server import CLOCK, END, PIECE, START, STOP
from gradwire.errors import ConfigurationError, WorkerLost
from gradwire.observe import events
from gradwire.optim import DistributedOptimizer
from gradwire.testing import wait_until
from observe import tasks
from unit.observe.trace_files import ReadSlice, arrows, read_manifest, read_trace

SKEW_NS = 3_600_000_000_000  # an hour


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.local(2) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def leak_check() -> Iterator[None]:
    """Replace the check after each test: the threads of a cluster that all tests share start when they are needed."""
    yield
    assert events.sink is None
    cluster = Cluster.current()
    for worker in cluster.workers if cluster is not None else ():
        assert not (worker.is_alive and worker.call(tasks.is_observed)), f"{worker.name} still records"


def train() -> None:
    """A step with calls that are waited for and others, a call inside a call, a pass through three workers."""
    weight = rpc.remote("worker0", tasks.make_weight)
    optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.1)
    with autograd.context() as context_id:
        value = torch.ones(4, requires_grad=True)
        first = rpc.rpc_sync("worker0", tasks.pass_on, args=(value,))
        others = [rpc.rpc_async("worker1", tasks.scale, args=(first, value)) for _ in range(3)]
        autograd.backward(context_id, [sum(other.wait() for other in others).sum() + weight.to_here().sum()])
        optimizer.step(context_id)


def worker_of(item: ReadSlice) -> str:
    return item.process.split()[0]


def is_forward(pair: tuple[ReadSlice, ReadSlice], tolerance_ns: int = 0) -> bool:
    return pair[0].start_ns <= pair[1].start_ns + tolerance_ns


def test_all_workers_are_on_one_time_line(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.trace(tmp_path / "run.zip", tmp_path / "run.json") as trace:
        train()
    assert events.sink is None
    slices = read_trace(tmp_path / "run.zip")
    assert {worker_of(item) for item in slices} == {"driver", "worker0", "worker1"}
    kinds = {(worker_of(item), item.kind) for item in slices}
    for worker in ("driver", "worker0", "worker1"):
        assert {(worker, kind) for kind in ("wire", "deserialize", "gradients", "join", "local_engine")} <= kinds
    assert {
        ("driver", "call"),
        ("driver", "backward"),
        ("worker0", "run"),
        ("worker1", "queue"),
    } <= kinds
    assert {("driver", "optimizer_step"), ("worker0", "optimizer_step"), ("worker0", "rref")} <= kinds
    assert [(item.name, item.problem, item.num_dropped) for item in trace.workers] == [
        (name, None, 0) for name in ("driver", "worker0", "worker1")
    ]
    assert sum(item.num_events for item in trace.workers) == len(slices)


def test_slices_of_a_thread_are_nested_as_its_calls_are(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.trace(tmp_path / "run.pftrace"):
        train()
    slices = read_trace(tmp_path / "run.pftrace")  # checks the nesting of all
    (outer,) = [item for item in slices if item.name == "run pass_on"]
    inner = [item.name for item in outer.children]
    assert inner[0] == "call scale"
    parts = [item.kind for item in outer.children[0].children if item.kind != "connection"]  # the first call connects
    assert parts == ["serialize", "wire", "deserialize"]
    (root,) = [item for item in slices if item.kind == "backward" and worker_of(item) == "driver"]
    assert {"join", "local_engine"} <= {item.kind for item in root.children}  # and "wait", if it was first to end
    waiting = [item for item in slices if item.track.startswith("calls")]
    assert [item.name for item in waiting if worker_of(item) == "driver"].count("call scale") == 3


def test_arrows_lead_from_send_to_receive_forward_and_backward(
    cluster: Cluster, tmp_path: Path, waits_for_late_events: None
) -> None:
    with cluster.trace(tmp_path / "run.zip"):
        train()
    slices = read_trace(tmp_path / "run.zip")
    sent = [flow for item in slices for flow in item.flow_out]
    received = [flow for item in slices for flow in item.flow_in]
    assert len(set(sent)) == len(sent)
    assert sorted(sent) == sorted(received), "every message has two ends"
    pairs = arrows(slices)
    assert all(worker_of(source) == target.notes["peer"] for source, target in pairs)
    assert all(map(is_forward, pairs))
    ways = {(source.kind, worker_of(source), worker_of(target)) for source, target in pairs}
    for here, there in (("driver", "worker0"), ("worker0", "worker1")):
        assert {("wire", here, there), ("wire", there, here)} <= ways
        assert ("gradients", here, there) in ways or ("gradients", there, here) in ways


def test_clocks_that_differ_are_put_right(cluster: Cluster, tmp_path: Path) -> None:
    worker = cluster.workers[1]
    worker.call(tasks.set_clock_ahead, SKEW_NS)
    try:
        with cluster.trace(tmp_path / "run.zip") as trace:
            train()
    finally:
        worker.call(tasks.set_clock_ahead, 0)
    found = {item.name: item for item in trace.workers}
    assert found["worker0"].clock_offset_ns == found["driver"].clock_offset_ns == 0
    error_ns = found["worker1"].clock_error_ns
    assert abs(found["worker1"].clock_offset_ns - SKEW_NS) <= error_ns
    assert error_ns < 10**9
    pairs = arrows(read_trace(tmp_path / "run.zip"))
    assert any(worker_of(source) == "worker1" for source, _ in pairs)
    assert all(is_forward(pair, error_ns) for pair in pairs)
    attributes = read_manifest(tmp_path / "run.zip")["attributes"]
    assert attributes["gradwire.worker1.clock_offset_ns"] == found["worker1"].clock_offset_ns
    assert attributes["gradwire.worker0.clock_offset_ns"] == 0


def test_json_has_the_same_events(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.trace(tmp_path / "run.pftrace", tmp_path / "RUN.JSON"):
        train()
    slices = read_trace(tmp_path / "run.pftrace")
    entries = json.loads((tmp_path / "RUN.JSON").read_text())["traceEvents"]
    assert sorted(item["name"] for item in entries if item["ph"] in "Xi") == sorted(item.name for item in slices)
    assert [item["ph"] for item in entries].count("s") == sum(len(item.flow_out) for item in slices)


def test_operators_of_all_workers(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.trace(tmp_path / "run.zip", profile=True):
        train()
    slices = read_trace(tmp_path / "run.zip")
    operators = [item for item in slices if item.kind == "operator"]
    assert {worker_of(item) for item in operators} == {"driver", "worker0", "worker1"}
    (run,) = [item for item in slices if item.name == "run pass_on"]
    inside = [item for item in operators if item.name == "aten::mul" and item.track == f"{run.track} (torch)"]
    tolerance_ns = 10**6  # torch reads another clock
    assert any(run.start_ns - tolerance_ns <= item.start_ns <= run.end_ns + tolerance_ns for item in inside)


def test_number_of_events_is_bounded(cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with cluster.trace(tmp_path / "run.zip", max_events=20) as trace:
        for _ in range(20):
            rpc.rpc_sync("worker0", abs, args=(-1,))
    driver, worker = trace.workers[0], trace.workers[1]
    assert (driver.num_events, worker.num_events) == (20, 20)
    assert driver.num_dropped == 60
    assert worker.num_dropped > 50
    attributes = read_manifest(tmp_path / "run.zip")["attributes"]
    assert attributes["gradwire.driver.dropped_events"] == 60
    assert "lacks the first 60 events of worker driver" in caplog.text


def test_one_trace_at_a_time(cluster: Cluster, tmp_path: Path) -> None:
    with (
        cluster.trace(tmp_path / "run.zip"),
        pytest.raises(ConfigurationError, match=r"already, to .*run\.zip; end it"),
    ):
        cluster.trace(tmp_path / "other.zip").__enter__()
    assert not (tmp_path / "other.zip").exists()
    with cluster.trace(tmp_path / "other.zip"):
        pass
    assert read_trace(tmp_path / "other.zip") == []


def test_trace_of_a_block_that_raises_is_written(cluster: Cluster, tmp_path: Path) -> None:
    def work() -> None:
        with cluster.trace(tmp_path / "run.zip"):
            rpc.rpc_sync("worker0", abs, args=(-1,))
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        work()
    assert [item.name for item in read_trace(tmp_path / "run.zip") if item.kind == "run"] == ["run abs"]


@pytest.mark.parametrize("name", ["run.txt", "run", "missing/run.zip", "folder.zip"])
def test_paths_are_checked_before_anything_is_recorded(cluster: Cluster, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.zip").mkdir()
    with pytest.raises(ConfigurationError, match=r"the trace cannot be written|unsupported trace format"):
        cluster.trace(tmp_path / name)
    with pytest.raises(ConfigurationError, match="needs the path of a file"):
        cluster.trace()
    with pytest.raises(ConfigurationError, match="max_events must be a whole number"):
        cluster.trace(tmp_path / "run.zip", max_events=0)
    assert list(tmp_path.rglob("*")) == [tmp_path / "folder.zip"]


def test_folder_without_permission_is_refused(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ConfigurationError, match=f"no permission to write to {tmp_path}"):
        cluster.trace(tmp_path / "run.zip")


@pytest.mark.parametrize(
    ("operation", "args"), [(CLOCK, ()), (START, (1, 10, False)), (STOP, (1,)), (PIECE, (1, 0)), (END, (1,))]
)
def test_only_the_driver_may_ask(cluster: Cluster, operation: str, args: tuple[int, ...]) -> None:
    error = cluster.workers[0].call(tasks.ask_for_trace, "worker1", operation, args)
    assert "only driver may record a trace, not worker0" in error


def test_requests_that_are_not_valid_are_refused(cluster: Cluster) -> None:
    agent = rpc.current_agent()
    for operation, args in (
        (START, (1, 0, False)),
        (START, (-1, 10, False)),
        (START, (1, 10**9, False)),
        (START, (1, 10, "yes")),
        (STOP, ("one",)),
        (STOP, (12345,)),
        (PIECE, (12345, 0)),
    ):
        with pytest.raises(Exception, match=r"not valid|is not recording|has no piece"):
            agent.ask("worker0", operation, args, 10.0).wait()


def run_command(*arguments: str) -> Result:
    """Run ``gradwire trace`` as another terminal would, but in this process; the driver's part is the same."""
    return CliRunner().invoke(app, ["trace", *arguments])


def test_command_records_a_running_cluster(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.name is not None
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            rpc.rpc_sync("worker0", abs, args=(-1,))

    thread = threading.Thread(target=work, name="the-program")
    thread.start()
    try:
        result = run_command(cluster.name, "--seconds", "0.2", "--output", str(tmp_path / "run.zip"))
    finally:
        done.set()
        thread.join(30)
    assert result.exit_code == 0, result.output
    assert f"wrote {tmp_path / 'run.zip'}" in result.output.replace("\n", "")
    assert "worker0: " in result.output
    assert "run abs" in {item.name for item in read_trace(tmp_path / "run.zip")}


def test_command_says_what_is_wrong(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.name is not None
    result = run_command(cluster.name, "--output", str(tmp_path / "run.txt"))
    assert result.exit_code == 1
    assert "unsupported trace format" in result.output.replace("\n", " ")
    with cluster.trace(tmp_path / "run.zip"):
        result = run_command(cluster.name, "--seconds", "0.1", "--output", str(tmp_path / "other.zip"))
    assert result.exit_code == 1
    assert "being recorded already" in result.output.replace("\n", " ")


@pytest.mark.skipif("PERFETTO_BIN" not in os.environ, reason="PERFETTO_BIN does not name a trace_processor")
def test_trace_processor_reads_the_archive(cluster: Cluster, tmp_path: Path) -> None:
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

    with cluster.trace(tmp_path / "run.zip") as trace:
        train()
    config = TraceProcessorConfig(bin_path=os.environ["PERFETTO_BIN"])
    with TraceProcessor(trace=str(tmp_path / "run.zip"), config=config) as processor:
        (row,) = processor.query("select count(*) as number from slice")
        assert row.number == sum(item.num_events for item in trace.workers)
        (row,) = processor.query("select count(*) as number from flow")
        assert row.number == len(arrows(read_trace(tmp_path / "run.zip")))
        problems = processor.query("select name from stats where severity in ('error', 'data_loss') and value > 0")
        assert [row.name for row in problems] == []


def test_worker_that_does_not_answer_is_left_out(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears of the trace when that is over, and does not go on recording; see `leak_check`."""
    monkeypatch.setattr(trace_module, "_ASK_S", 2.0)
    trace = cluster.trace(tmp_path / "run.zip")
    with contextlib.ExitStack() as recording, stopped(cluster.workers[1].pid):
        started = time.monotonic()
        recording.enter_context(trace)
        assert time.monotonic() - started < 30.0
        rpc.rpc_sync("worker0", abs, args=(-1,))
    others = {item.name: item for item in trace.workers}
    assert others["worker0"].problem is None
    assert others["worker0"].num_events > 0
    assert "worker1" in str(others["worker1"].problem)


def test_worker_that_dies_loses_its_own_events(tmp_path: Path, cluster: Cluster) -> None:
    """The last test of this module: worker1 is dead from here on, and worker2 has joined."""
    with cluster.trace(tmp_path / "run.zip") as trace:
        rpc.rpc_sync("worker0", abs, args=(-1,))
        (joined,) = cluster.add_workers(1)
        with pytest.raises(WorkerLost):
            cluster.workers[1].call(tasks.die)
        wait_until(lambda: not cluster.workers[1].is_alive)
        wait_until(lambda: "worker2" in trace._offsets, what="that the new worker records")
        joined.call(abs, -2)
    found = {item.name: item for item in trace.workers}
    assert found["worker1"].num_events == 0
    assert found["worker1"].problem is not None
    assert "lost: exited with code 7" in found["worker1"].problem
    assert found["worker0"].problem is found["worker2"].problem is None
    names = {(worker_of(item), item.name) for item in read_trace(tmp_path / "run.zip")}
    assert {("worker0", "run abs"), ("worker2", "run abs")} <= names
    assert not any(worker == "worker1" for worker, _ in names)
    assert "lost" in read_manifest(tmp_path / "run.zip")["attributes"]["gradwire.worker1.problem"]


def test_representation(cluster: Cluster, tmp_path: Path) -> None:
    trace = cluster.trace(tmp_path / "run.json")
    assert isinstance(trace, Trace)
    assert "not started" in repr(trace)
    with trace:
        assert "recording" in repr(trace)
    assert "written" in repr(trace)


def test_trace_of_a_command_ends_with_the_command(cluster: Cluster, tmp_path: Path) -> None:
    options: dict[str, str | int | float | bool] = {"path": str(tmp_path / "run.json"), "seconds": 600.0}
    with socket.socket(socket.AF_UNIX) as command:
        command.connect(str(choose_socket(cluster.name)))
        command.sendall(msgspec.json.encode(Request("trace", options)) + b"\n")
        wait_until(lambda: events.sink is not None)
    wait_until((tmp_path / "run.json").exists, 30.0, "that the file is written")
    wait_until(lambda: events.sink is None)


def test_trace_of_a_command_ends_with_the_cluster(tmp_path: Path) -> None:
    """The last one: this process has no other cluster any more."""
    other = Cluster.current()
    assert other is not None
    recorded: list[str] = []

    def record() -> None:
        recorded.append(other._timed_traces.record(lambda: False, str(tmp_path / "run.json"), 600.0))

    thread = threading.Thread(target=record, name="a-command")
    thread.start()
    wait_until(lambda: rpc.rpc_sync("worker0", tasks.is_observed))
    rpc.rpc_sync("worker0", abs, args=(-1,))
    other.close()
    thread.join(30)
    assert "worker0: " in recorded[0]
    entries = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert "run abs" in {item["name"] for item in entries}
