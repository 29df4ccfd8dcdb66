"""Reads traces back, as viewers do."""

from __future__ import annotations

import io
import json
import zipfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos


@dataclass
class ReadSlice:
    """A slice, as a viewer of Perfetto traces understands it."""

    process: str
    track: str
    name: str
    kind: str
    start_ns: int
    depth: int
    flow_out: tuple[int, ...]
    flow_in: tuple[int, ...]
    notes: dict[str, Any]
    end_ns: int = -1
    children: list[ReadSlice] = field(default_factory=list)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of an archive, which has to be found by how it begins."""
    with zipfile.ZipFile(path) as archive:
        found = [archive.read(name) for name in archive.namelist()]
    (text,) = [data for data in found if b"".join(data[:40].split()).startswith(b'{"perfetto_manifest"')]
    manifest: dict[str, Any] = json.loads(text)["perfetto_manifest"]
    return manifest


def read_trace(path: Path) -> list[ReadSlice]:
    """All slices of a trace; fails if they are not nested, or an event is on a track that was not described."""
    data = path.read_bytes()
    if path.suffix == ".zip":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            (name,) = [item["path"] for item in read_manifest(path)["files"]]
            data = archive.read(name)
    return slices_of(protos.Trace.FromString(data))


def slices_of(trace: Any) -> list[ReadSlice]:
    tracks: dict[int, tuple[str, str]] = {}
    open_slices: defaultdict[int, list[ReadSlice]] = defaultdict(list)
    found: list[ReadSlice] = []
    last_ns: defaultdict[int, int] = defaultdict(int)
    assert any(packet.HasField("clock_snapshot") for packet in trace.packet)
    for packet in trace.packet:
        assert packet.trusted_packet_sequence_id
        if packet.HasField("track_descriptor"):
            about = packet.track_descriptor
            assert about.uuid not in tracks
            is_process = about.HasField("process")
            process = about.process.process_name if is_process else tracks[about.parent_uuid][0]
            tracks[about.uuid] = process, about.name
        elif packet.HasField("track_event"):
            event = packet.track_event
            assert packet.timestamp_clock_id == protos.ClockSnapshot.Clock.BuiltinClocks.MONOTONIC
            assert packet.timestamp >= last_ns[event.track_uuid]
            last_ns[event.track_uuid] = packet.timestamp
            stack = open_slices[event.track_uuid]
            if event.type == protos.TrackEvent.TYPE_SLICE_END:
                stack.pop().end_ns = packet.timestamp
                continue
            process, title = tracks[event.track_uuid]
            made = ReadSlice(
                process,
                title,
                event.name,
                event.categories[0],
                packet.timestamp,
                len(stack),
                tuple(event.flow_ids),
                tuple(event.terminating_flow_ids),
                {note.name: getattr(note, note.WhichOneof("value")) for note in event.debug_annotations},
            )
            found.append(made)
            if stack:
                stack[-1].children.append(made)
            if event.type == protos.TrackEvent.TYPE_INSTANT:
                made.end_ns = made.start_ns
            else:
                assert event.type == protos.TrackEvent.TYPE_SLICE_BEGIN
                stack.append(made)
    assert not any(open_slices.values()), "every slice has an end"
    return found


def arrows(slices: list[ReadSlice]) -> list[tuple[ReadSlice, ReadSlice]]:
    """Pairs of slices whose flow ids match."""
    sources = {flow: item for item in slices for flow in item.flow_out}
    return [(sources[flow], item) for item in slices for flow in item.flow_in if flow in sources]
