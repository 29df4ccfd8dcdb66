"""Traces are read back with Perfetto's own message classes."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from gradwire.errors import ConfigurationError
from gradwire.observe.clock import ClockMap, ClockOffset
from gradwire.observe.events import Event
from gradwire.observe.perfetto_trace import write_archive, write_perfetto_trace
from gradwire.observe.timeline import WorkerEvents
from unit.observe.trace_files import arrows, read_manifest, read_trace

AHEAD_NS = 5_000_000_000


def parts() -> list[WorkerEvents]:
    """Worker a calls worker b, whose clock is five seconds ahead."""
    first = [
        Event("call", "m:f", "a", 1000, 9000, 11, "b"),
        Event("wire", "m:f", "a", 1500, 2000, 11, "b", 0, (2**64 - 1,), (), 64),
        Event("deserialize", "m:f", "a", 8000, 8500, 11, "b", 0, (), (7,)),
        Event("connection", "open", "a", 9100, 9100, 11, "b", details={"lane": "calls", "is_new": True}),
    ]
    ahead = AHEAD_NS
    second = [
        Event("queue", "m:f", "b", ahead + 3000, ahead + 3100, 0, "a"),
        Event("run", "m:f", "b", ahead + 3100, ahead + 6000, 21, "a", 2**63 + 5, (), (2**64 - 1,), 0, "ValueError"),
        Event("wire", "m:f", "b", ahead + 6100, ahead + 6200, 21, "a", 0, (7,)),
    ]
    clock = ClockMap([ClockOffset(0, AHEAD_NS, 10)])
    return [
        WorkerEvents("a", 0, 4711, "here", first, thread_names={11: "MainThread"}),
        WorkerEvents("b", 1, 4711, "there", second, clock),
    ]


def test_tracks_nesting_and_arrows(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    with path.open("wb") as file:
        write_perfetto_trace(file, parts())
    slices = read_trace(path)
    assert {item.process for item in slices} == {"a (here)", "b (there)"}
    by_name = {(item.process[0], item.kind): item for item in slices}
    call = by_name["a", "call"]
    assert call.track == "MainThread 11"
    assert [child.kind for child in call.children] == ["wire", "deserialize"]
    assert (call.start_ns, call.end_ns) == (1000, 9000)
    pairs = arrows(slices)
    assert [(source.name, target.name) for source, target in pairs] == [
        ("wire f", "deserialize f"),
        ("wire f", "run f"),
    ]
    assert all(source.start_ns <= target.start_ns for source, target in pairs), "on the one clock, arrows go forward"
    run = by_name["b", "run"]
    assert (run.start_ns, run.end_ns) == (3100, 6000)
    assert run.notes == {"name": "m:f", "peer": "a", "context": str(2**63 + 5), "outcome": "ValueError"}
    instant = by_name["a", "connection"]
    assert instant.start_ns == instant.end_ns
    assert instant.notes["is_new"] is True


def test_workers_with_the_same_pid_are_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    with path.open("wb") as file:
        write_perfetto_trace(file, parts())
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

    trace = protos.Trace.FromString(path.read_bytes())
    pids = [item.track_descriptor.process.pid for item in trace.packet if item.track_descriptor.HasField("process")]
    assert len(set(pids)) == 2


def test_archive_has_a_manifest(tmp_path: Path) -> None:
    path = tmp_path / "run.zip"
    with path.open("wb") as file:
        write_archive(file, parts(), {"gradwire.b.clock_offset_ns": AHEAD_NS})
    manifest = read_manifest(path)
    assert manifest["version"] == 1
    assert manifest["trace_time"] == {"clock": "MONOTONIC"}
    assert manifest["attributes"] == {"gradwire.b.clock_offset_ns": AHEAD_NS}
    assert len(read_trace(path)) == 7


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "perfetto"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "perfetto", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'gradwire\[trace\]'"):
        write_perfetto_trace(io.BytesIO(), parts())
