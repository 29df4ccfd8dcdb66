"""What is said about workers, and how it is shown."""

from __future__ import annotations

import dataclasses
import io
import os
import signal

import pytest
from rich.console import Console

from gradwire.cluster.status import ClusterStatus, WorkerStatus, describe_exit, rss_of

_RUNNING = WorkerStatus(
    name="worker0",
    rank=0,
    role="worker",
    pid=4711,
    state="running",
    uptime_s=3.25,
    rss_bytes=200 << 20,
    calls_served=12,
    restarts=0,
    exit_reason=None,
)
_LOST = dataclasses.replace(
    _RUNNING,
    name="worker1",
    rank=1,
    state="lost",
    uptime_s=7_265,
    rss_bytes=None,
    calls_served=None,
    restarts=3,
    exit_reason="killed by SIGKILL",
)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "exited with code 0"),
        (3 << 8, "exited with code 3"),
        (int(signal.SIGKILL), "killed by SIGKILL"),
        (int(signal.SIGSEGV) | 0x80, "killed by SIGSEGV"),
        (40, "killed by signal 40"),
    ],
)
def test_an_exit_is_told_in_words(status: int, text: str) -> None:
    assert describe_exit(status) == text


def test_status_is_a_sequence_of_frozen_records() -> None:
    status = ClusterStatus([_RUNNING, _LOST])
    assert len(status) == 2
    assert status[1] is _LOST
    assert list(status[:1]) == [_RUNNING]
    assert status == ClusterStatus([_RUNNING, _LOST])
    assert hash(status) == hash(ClusterStatus([_RUNNING, _LOST]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        status[0].pid = 1  # type: ignore[misc]


def test_printed_it_is_a_table() -> None:
    text = str(ClusterStatus([_RUNNING, _LOST]))
    header, running, lost = (line for line in text.splitlines() if line.startswith(("│", "┃")))
    assert all(
        word in header for word in ("rank", "name", "pid", "state", "uptime", "memory", "calls", "restarts", "ended by")
    )
    assert all(word in running for word in ("worker0", "4711", "running", "3.2 s", "200 MiB", "12"))
    assert all(word in lost for word in ("worker1", "lost", "2:01:05", "killed by SIGKILL"))
    assert repr(ClusterStatus([_RUNNING, _LOST])) == text


def test_rich_shows_it_as_a_table_with_colours() -> None:
    file = io.StringIO()
    Console(width=100, force_terminal=True, color_system="standard", file=file).print(ClusterStatus([_LOST]))
    assert "\x1b[1;31m" in file.getvalue()


def test_memory_of_a_process() -> None:
    own = rss_of(os.getpid())
    assert own is not None
    assert own > 1 << 20
    assert rss_of(2**22 + 1) is None


def test_it_fits_into_a_terminal_of_80_characters() -> None:
    file = io.StringIO()
    worker = dataclasses.replace(_LOST, name="trainer0", pid=123_456, rss_bytes=1100 << 20, calls_served=12_345)
    Console(width=80, file=file).print(ClusterStatus([worker]))
    assert "ended by" in file.getvalue()
    assert "…" not in file.getvalue()
