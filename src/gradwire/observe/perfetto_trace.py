"""Traces for the Perfetto UI and Perfetto's trace processor. Needs the package ``perfetto``.

    run.zip
      perfetto_manifest.json   the clock of the timeline; workers, offsets of their clocks, and what is missing
      cluster.pftrace          all workers: each is a process, each of its threads a track

All workers are in one file, with the times of the driver's clock: Perfetto draws arrows only inside a file.
"""

from __future__ import annotations

import json
import time
import zipfile
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from gradwire.errors import ConfigurationError
from gradwire.observe.chrome_trace import notes_of
from gradwire.observe.timeline import Slice, Track, WorkerEvents, tracks_of

if TYPE_CHECKING:
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2

TRACE = "cluster.pftrace"
MANIFEST = "perfetto_manifest.json"

_REALTIME, _MONOTONIC, _BOOTTIME = 1, 3, 6  # Perfetto's numbers of clocks
_UUID_STEP = 1 << 32  # tracks of one worker have numbers of their own; it has fewer
_SEQUENCE = 1
_INT64_MAX = 2**63 - 1


def load_protos() -> Any:
    """Return Perfetto's message classes.

    Raises:
        ConfigurationError: The package is not installed.
    """
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "a trace for Perfetto needs the package perfetto, which is not installed: pip install 'gradwire[trace]'; "
            "a .json path writes Chrome's format and needs no extra package"
        ) from error
    return perfetto_trace_pb2


def write_archive(file: IO[bytes], parts: Sequence[WorkerEvents], attributes: Mapping[str, str | int]) -> None:
    """Write an archive that the Perfetto UI opens as one timeline."""
    manifest = {
        "perfetto_manifest": {
            "version": 1,
            "trace_time": {"clock": "MONOTONIC"},
            "files": [{"path": TRACE}],
            "attributes": dict(attributes),
        }
    }
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr(MANIFEST, json.dumps(manifest, indent=1))
        with archive.open(TRACE, "w", force_zip64=True) as member:
            write_perfetto_trace(member, parts)


def write_perfetto_trace(file: IO[bytes], parts: Sequence[WorkerEvents]) -> None:
    """Write the events of all workers as one trace."""
    writer = _Writer(file)
    writer.add_clocks()
    pids = [part.pid for part in parts]
    for number, part in enumerate(parts):
        # Two machines, or two workers of one process, may have the same number: they are two processes here.
        pid = part.pid if pids.count(part.pid) == 1 else _INT64_MAX % (1 << 30) - part.rank
        uuid = (number + 1) * _UUID_STEP
        writer.add_process(uuid, pid, f"{part.worker} ({part.host})", number)
        for order, track in enumerate(tracks_of(part), 1):
            writer.add_track(uuid, uuid + order, track, order)


class _Writer:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._protos = load_protos()

    def _write(self, packet: perfetto_trace_pb2.TracePacket) -> None:
        trace = self._protos.Trace()
        trace.packet.append(packet)
        self._file.write(trace.SerializeToString())

    def _packet(self) -> perfetto_trace_pb2.TracePacket:
        packet = self._protos.TracePacket()
        packet.trusted_packet_sequence_id = _SEQUENCE
        return packet

    def add_clocks(self) -> None:
        """Say how the clocks of this machine relate, so that viewers can show the time of day."""
        packet = self._packet()
        packet.clock_snapshot.primary_trace_clock = _MONOTONIC
        for number, source in (
            (_MONOTONIC, time.CLOCK_MONOTONIC),
            (_BOOTTIME, time.CLOCK_BOOTTIME),
            (_REALTIME, time.CLOCK_REALTIME),
        ):
            clock = packet.clock_snapshot.clocks.add()
            clock.clock_id, clock.timestamp = number, time.clock_gettime_ns(source)
        self._write(packet)

    def add_process(self, uuid: int, pid: int, name: str, order: int) -> None:
        packet = self._packet()
        track = packet.track_descriptor
        track.uuid, track.process.pid, track.process.process_name = uuid, pid, name
        track.process.legacy_sort_index = order
        track.child_ordering = self._protos.TrackDescriptor.ChildTracksOrdering.EXPLICIT
        self._write(packet)

    def add_track(self, process: int, uuid: int, track: Track, order: int) -> None:
        packet = self._packet()
        about = packet.track_descriptor
        about.uuid, about.parent_uuid, about.name, about.sibling_order_rank = uuid, process, track.title, order
        self._write(packet)
        ends: list[int] = []  # of the slices that are open
        for item in track.slices:
            while ends and (ends[-1] < item.start_ns or ends[-1] == item.start_ns < item.end_ns):
                self._end(uuid, ends.pop())
            self._begin(uuid, item)
            if item.end_ns > item.start_ns:
                ends.append(item.end_ns)
        while ends:
            self._end(uuid, ends.pop())

    def _event(self, track: int, kind: str, at_ns: int) -> perfetto_trace_pb2.TracePacket:
        packet = self._packet()
        packet.timestamp, packet.timestamp_clock_id = at_ns, _MONOTONIC
        packet.track_event.track_uuid = track
        packet.track_event.type = self._protos.TrackEvent.Type.Value(kind)
        return packet

    def _begin(self, track: int, item: Slice) -> None:
        is_instant = item.end_ns <= item.start_ns
        packet = self._event(track, "TYPE_INSTANT" if is_instant else "TYPE_SLICE_BEGIN", item.start_ns)
        event = packet.track_event
        event.name = item.title
        event.categories.append(item.event.kind)
        event.flow_ids.extend(item.event.flow_out)
        event.terminating_flow_ids.extend(item.event.flow_in)
        for key, value in notes_of(item).items():
            note = event.debug_annotations.add()
            note.name = key
            if isinstance(value, bool):
                note.bool_value = value
            elif isinstance(value, int):
                note.int_value = value
            elif isinstance(value, float):
                note.double_value = value
            else:
                note.string_value = str(value)
        self._write(packet)

    def _end(self, track: int, at_ns: int) -> None:
        self._write(self._event(track, "TYPE_SLICE_END", at_ns))
