"""The JSON has what viewers of Chrome's format need."""

from __future__ import annotations

import io
import json
from typing import Any

from gradwire.observe.chrome_trace import write_chrome_trace
from unit.observe.test_perfetto_trace import parts


def written() -> dict[str, Any]:
    file = io.BytesIO()
    write_chrome_trace(file, parts(), {"gradwire.a.events": 4})
    found: dict[str, Any] = json.loads(file.getvalue())
    return found


def test_events_threads_and_processes() -> None:
    document = written()
    entries = document["traceEvents"]
    names = {(item["pid"], item["args"]["name"]) for item in entries if item["name"] == "process_name"}
    assert names == {(1, "a (here, pid 4711)"), (2, "b (there, pid 4711)")}
    threads = {(item["pid"], item["tid"]): item["args"]["name"] for item in entries if item["name"] == "thread_name"}
    assert threads == {(1, 1): "MainThread 11", (2, 1): "thread 21", (2, 2): "queue"}
    (call,) = [item for item in entries if item["ph"] == "X" and item["cat"] == "call"]
    assert (call["ts"], call["dur"]) == (0.0, 8.0), "microseconds from the first event on"
    assert document["otherData"] == {"gradwire.a.events": 4, "gradwire.zero_ns": 1000}
    assert [item["name"] for item in entries if item["ph"] == "i"] == ["connection: open"]


def test_every_arrow_ends_in_a_slice_of_its_track() -> None:
    entries = written()["traceEvents"]
    begins = {item["id"]: item for item in entries if item["ph"] == "s"}
    ends = {item["id"]: item for item in entries if item["ph"] == "f"}
    assert begins.keys() == ends.keys() == {f"{2**64 - 1:#x}", "0x7"}
    slices = [item for item in entries if item["ph"] == "X"]
    for item in (*begins.values(), *ends.values()):
        place = item["pid"], item["tid"]
        around = [found for found in slices if (found["pid"], found["tid"]) == place and found["ts"] == item["ts"]]
        assert around, item
    assert all(begins[key]["ts"] <= ends[key]["ts"] for key in begins)
