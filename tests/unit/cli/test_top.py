"""What `gradwire top` shows of a report."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from gradwire.cli.top import render
from gradwire.cluster.status import CallStatus, PassStatus, WorkerStatus
from gradwire.cluster.status_socket import ClusterReport


def worker(rank: int, **fields: object) -> WorkerStatus:
    known = {
        "name": f"worker{rank}",
        "role": "worker",
        "pid": 100 + rank,
        "state": "running",
        "uptime_s": 3.0,
        "rss_bytes": 1 << 28,
        "calls_served": 10,
        "restarts": 0,
        "exit_reason": None,
        "device": "cpu",
        "calls_per_s": 100.0 * rank,
        "bytes_sent": 5000,
        "bytes_received": 1 << 20,
        "num_running": 1,
        "num_queued": 0,
    }
    return WorkerStatus(rank=rank, **{**known, **fields})  # type: ignore[arg-type]


def report(*workers: WorkerStatus) -> ClusterReport:
    return ClusterReport(
        name="train-1",
        pid=1,
        gradwire="0",
        command=("train.py",),
        folder="/",
        uptime_s=12.0,
        workers=workers,
        driver=worker(len(workers), name="driver"),
    )


def shown(found: ClusterReport, width: int = 120, num_lines: int | None = None) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(render(found, width, num_lines))
    return file.getvalue()


def test_it_names_workers_calls_and_what_passes_wait_for() -> None:
    call = CallStatus(function="f[red]", caller="driver", phase="wait", seconds=75.0, waits_for="g on worker1")
    queued = CallStatus(function="h", caller="driver", phase="queue", seconds=2.0)
    waiting = PassStatus(
        context_id=77, root="driver", phase="running", seconds=6.0, waits_for=("worker1: gradient of f",)
    )
    text = shown(report(worker(0, calls=(call,), passes=(waiting,)), worker(1, calls=(queued,), num_queued=1)))
    lines = text.splitlines()
    assert lines[0].startswith("train-1  up 12.0 s  2 of 2 workers  100 calls/s  1 queued")
    assert any(line.split()[:5] == ["0:01:15", "worker0", "wait", "f[red]", "driver"] for line in lines)
    assert text.index("f[red]") < text.index("a free thread"), "the longest call comes first"
    assert "worker1: gradient of f" in text
    assert " 77 " in text


@pytest.mark.parametrize("text", ["[/nope]", "[link=http://x.example]cuda:0[/link]", ":warning:"])
def test_text_of_a_worker_is_not_read_as_markup(text: str) -> None:
    call = CallStatus(function=text, caller=text, phase="run", seconds=1.0, waits_for=text)
    waiting = PassStatus(context_id=77, root=text, phase=text, seconds=6.0, waits_for=(text,))
    fields = {"name": text, "device": text, "calls": (call,), "passes": (waiting,), "exit_reason": text, "state": text}
    assert shown(report(worker(0, **fields)), width=400).count(text) == 13


def test_an_idle_cluster_has_neither_calls_nor_passes() -> None:
    assert shown(report(worker(0))).count("none") == 2


def test_workers_in_trouble_come_first_where_not_all_fit() -> None:
    lost = worker(30, state="lost", exit_reason="killed by SIGKILL", num_running=None, num_queued=None)
    silent = worker(31, num_running=None, num_queued=None)
    text = shown(report(*map(worker, range(30)), lost, silent), num_lines=24)
    assert "worker30: killed by SIGKILL" in text
    assert "no answer" in text
    assert "more workers" in text
    assert len(text.splitlines()) <= 24


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_workers_fits(width: int) -> None:
    many = [worker(0, name="trainer12", bytes_sent=123 << 20, calls_per_s=123_456.0), worker(1)]
    assert "…" not in shown(report(*many), width)
