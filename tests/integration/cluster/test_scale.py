"""Forty workers on a small machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cluster import tasks
from gradwire.cluster.api import Cluster

_WORKERS = 40


def _own_bytes(pid: int) -> int:
    """Memory that would be free if the process ended: shared pages do not count."""
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(fields[name].split()[0]) * 1024 for name in ("Private_Clean", "Private_Dirty"))


@pytest.mark.slow
def test_forty_workers(record_property: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    with Cluster.local(1):
        pass  # the fork server is there now
    started = time.monotonic()
    with Cluster.local(_WORKERS) as cluster:
        ready = time.monotonic()
        assert cluster.map(tasks.add, range(400)) == list(range(1, 401))
        served = time.monotonic()
        status = cluster.status()
        own = [_own_bytes(worker.pid) for worker in cluster.workers if worker.pid is not None]
        closing = time.monotonic()
    ended = time.monotonic()
    with capsys.disabled():
        print(
            f"\n{_WORKERS} workers: start {ready - started:.2f} s, 400 calls {served - ready:.2f} s, "
            f"end {ended - closing:.2f} s, {sum(own) / len(own) / 2**20:.1f} MiB each of their own"
        )
    assert 400 - _WORKERS <= sum(worker.calls_served or 0 for worker in status) <= 400
    assert [worker.state for worker in status] == ["running"] * _WORKERS
    assert ready - started < 20
    assert sum(own) / len(own) < 60 << 20
