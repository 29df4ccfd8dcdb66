"""What is said about workers, and how it is shown."""

from __future__ import annotations

import dataclasses
import io
import signal

import pytest
from rich.console import Console

from gradwire.cluster.status import ClusterStatus, WorkerStatus, describe_exit, format_bytes, format_rate

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
    device="cpu",
    calls_per_s=2.5,
    bytes_sent=512,
    bytes_received=3 << 29,
)
_LOST = dataclasses.replace(
    _RUNNING,
    name="worker1",
    rank=1,
    state="lost",
    uptime_s=7_265,
    rss_bytes=None,
    calls_served=None,
    calls_per_s=None,
    bytes_sent=None,
    bytes_received=None,
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
    header, _, running, lost, note = text.splitlines()
    always = ("rank", "name", "pid", "state", "uptime", "memory", "calls", "calls/s", "sent", "received")
    assert all(word in header for word in always)
    assert all(word in running for word in ("worker0", "4711", "running", "3.2 s", "200 MiB", "12", "512 B", "1.5 GiB"))
    assert all(word in lost for word in ("worker1", "lost", "2:01:05"))
    assert note == "worker1: killed by SIGKILL, restarted 3 times"
    assert repr(ClusterStatus([_RUNNING, _LOST])) == text


def test_columns_that_would_say_nothing_are_left_out() -> None:
    (header, *_) = str(ClusterStatus([_RUNNING])).splitlines()
    assert "device" not in header
    (header, _, row) = str(
        ClusterStatus([dataclasses.replace(_RUNNING, device="cuda:1", device_bytes=3 << 20)])
    ).splitlines()
    assert "device" in header
    assert "on devices" in header
    assert "cuda:1" in row
    assert "3.0 MiB" in row


def test_texts_of_workers_are_not_read_as_markup() -> None:
    assert "[red]x" in str(ClusterStatus([dataclasses.replace(_LOST, exit_reason="[red]x")]))


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(None, "-"), (0, "0 B"), (999, "999 B"), (1000, "1.0 KiB"), (200 << 20, "200 MiB"), (3 << 39, "1.5 TiB")],
)
def test_bytes_are_shown_in_the_largest_unit_that_fits(num_bytes: int | None, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("per_s", "text"), [(None, "-"), (0.0, "0"), (0.04, "0.0"), (9.9, "9.9"), (12.4, "12"), (14_240, "14.2k")]
)
def test_rates_are_short(per_s: float | None, text: str) -> None:
    assert format_rate(per_s) == text


def test_rich_shows_it_as_a_table_with_colours() -> None:
    file = io.StringIO()
    Console(width=100, force_terminal=True, color_system="standard", file=file).print(ClusterStatus([_LOST]))
    assert "\x1b[1;31m" in file.getvalue()


def test_it_fits_into_a_terminal_of_80_characters() -> None:
    file = io.StringIO()
    worker = dataclasses.replace(
        _RUNNING, name="trainer0", pid=123_456, uptime_s=40_000, rss_bytes=1100 << 20, calls_served=12_345
    )
    Console(width=80, file=file).print(ClusterStatus([dataclasses.replace(worker, calls_per_s=1234.5), _LOST]))
    assert "12345 " in file.getvalue()
    assert "received" in file.getvalue()
    assert "…" not in file.getvalue()


def test_columns_give_way_where_a_terminal_is_too_narrow() -> None:
    file = io.StringIO()
    worker = dataclasses.replace(_RUNNING, device="cuda:0", device_bytes=1100 << 20)
    Console(width=80, file=file).print(ClusterStatus([dataclasses.replace(worker, name="trainer-of-3")]))
    header = file.getvalue().splitlines()[0]
    assert "pid" not in header
    assert all(word in header for word in ("name", "memory", "device", "calls/s", "sent", "received"))
    assert "…" not in file.getvalue()
