"""A worker whose machine has another clock: in a time namespace, which the kernel gives root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import quick_python
from cluster.process_scheduler import Machine, ProcessScheduler
from gradwire.cluster.api import Cluster
from gradwire.cluster.remote_launcher import RemoteOptions, start_remote
from gradwire.config import WorkerConfig
from unit.observe.trace_files import arrows, read_trace

pytestmark = [pytest.mark.slow, pytest.mark.root]

AHEAD_S = 5000
PREFIX = ["unshare", "--time", "--monotonic", str(AHEAD_S), "--fork", "--kill-child"]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("time namespaces need root and the unshare command")
    if subprocess.run([*PREFIX, "true"], capture_output=True, check=False, timeout=20).returncode:
        pytest.skip("no time namespaces here")
    monkeypatch.setattr(quick_python, "Popen", subprocess.Popen)  # a namespace is entered by a new process alone
    machines = [Machine(host="here"), Machine(PREFIX, host="ahead")]
    options = RemoteOptions(num_workers=2, config=WorkerConfig(trust="code"), start_timeout_s=60.0)
    with Cluster(*start_remote(ProcessScheduler(machines), options)) as cluster:
        yield cluster


def test_clock_of_another_machine_is_measured(cluster: Cluster, tmp_path: Path, waits_for_late_events: None) -> None:
    with cluster.trace(tmp_path / "run.zip") as trace:
        for worker in cluster.workers:
            worker.call(abs, -1)
    offsets = {item.name: item for item in trace.workers}
    ahead = [item for item in offsets.values() if item.clock_offset_ns]
    assert len(ahead) == 1
    (found,) = ahead
    assert abs(found.clock_offset_ns - AHEAD_S * 10**9) <= found.clock_error_ns < 10**9
    pairs = arrows(read_trace(tmp_path / "run.zip"))
    assert len(pairs) == 4
    assert all(source.start_ns <= target.start_ns + found.clock_error_ns for source, target in pairs)
    span_ns = max(target.end_ns for _, target in pairs) - min(source.start_ns for source, _ in pairs)
    assert span_ns < 60 * 10**9, "on one timeline"
