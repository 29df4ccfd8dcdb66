"""Traces in Chrome's JSON format, which chrome://tracing, Perfetto and many other tools read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO, Any

import msgspec

from gradwire.observe.timeline import Slice, WorkerEvents, tracks_of

_encode = msgspec.json.Encoder().encode


def write_chrome_trace(file: IO[bytes], parts: Sequence[WorkerEvents], attributes: dict[str, Any]) -> None:
    """Write the events of all workers, and attributes of the trace, as JSON."""
    # Tools compute with floats: times from zero keep their nanoseconds.
    zero_ns = min((part.clock.to_here(event.start_ns) for part in parts for event in part.events), default=0)
    file.write(b'{"displayTimeUnit":"ns","otherData":' + _encode({**attributes, "gradwire.zero_ns": zero_ns}))
    file.write(b',"traceEvents":[\n')
    separator = b""
    for number, part in enumerate(parts, 1):
        for item in _events_of(part, number, zero_ns):
            file.write(separator + _encode(item))
            separator = b",\n"
    file.write(b"\n]}\n")


def _events_of(part: WorkerEvents, process: int, zero_ns: int) -> Iterator[dict[str, Any]]:
    # Processes are counted: those of two machines may have the same number.
    about = {"name": f"{part.worker} ({part.host}, pid {part.pid})"}
    yield {"ph": "M", "name": "process_name", "pid": process, "args": about}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for number, track in enumerate(tracks_of(part), 1):
        place = {"pid": process, "tid": number}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": track.title}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": number}}
        for item in track.slices:
            yield from _entries_of(item, place, zero_ns)


def _entries_of(item: Slice, place: dict[str, int], zero_ns: int) -> Iterator[dict[str, Any]]:
    event = item.event
    start = {**place, "ts": (item.start_ns - zero_ns) / 1000, "cat": event.kind}
    if item.end_ns > item.start_ns:
        yield {
            "ph": "X",
            "name": item.title,
            **start,
            "dur": (item.end_ns - item.start_ns) / 1000,
            "args": notes_of(item),
        }
    else:
        yield {"ph": "i", "s": "t", "name": item.title, **start, "args": notes_of(item)}
    for flow in event.flow_out:
        yield {"ph": "s", "id": f"{flow:#x}", "name": "message", **start, "cat": "message"}
    for flow in event.flow_in:
        yield {"ph": "f", "bp": "e", "id": f"{flow:#x}", "name": "message", **start, "cat": "message"}


def notes_of(item: Slice) -> dict[str, Any]:
    """Return what a viewer shows when a slice is chosen."""
    event = item.event
    found: dict[str, Any] = {"name": event.name}
    if event.peer:
        found["peer"] = event.peer
    if event.context_id:
        found["context"] = str(event.context_id)  # more than a float holds
    if event.num_bytes:
        found["bytes"] = event.num_bytes
    if event.outcome != "ok":
        found["outcome"] = event.outcome
    if item.end_ns == item.start_ns and event.end_ns > event.start_ns:
        found["duration_ns"] = event.end_ns - event.start_ns  # there was no row to draw it on
    for key, value in (event.details or {}).items():
        found[key] = str(value) if isinstance(value, int) and abs(value) >> 53 else value
    return found
