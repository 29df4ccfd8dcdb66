"""The events of all workers on tracks of one time line, for the files that show it. Pure.

A thread is a track: what happens in it is nested as its calls are. What belongs to no thread (calls that are not waited for,
requests in a queue, passes of other workers) is on tracks of its own, as many as overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gradwire.observe.clock import ClockMap
from gradwire.observe.events import Event

OPERATOR = "operator"

_GROUPS = {"call": "calls", "queue": "queue", "backward": "backward passes"}
_FUNCTION_KINDS = ("call", "queue", "run", "serialize", "deserialize", "wire")


@dataclass(frozen=True, slots=True)
class WorkerEvents:
    """What one worker recorded.

    Attributes:
        worker: Name of the worker.
        rank: Rank of the worker.
        pid: Process id; several workers can have the same.
        host: Name of its machine.
        events: Its events, in any order, with the times of its own clock.
        clock: Converts those times.
        thread_names: Names of its threads, by native id.
        num_dropped: Events that it had no room for.
    """

    worker: str
    rank: int
    pid: int
    host: str
    events: Sequence[Event]
    clock: ClockMap = field(default_factory=lambda: ClockMap(()))
    thread_names: Mapping[int, str] = field(default_factory=dict)
    num_dropped: int = 0


@dataclass(frozen=True, slots=True)
class Slice:
    """An event at its place: times are those of the one clock."""

    event: Event
    start_ns: int
    end_ns: int

    @property
    def title(self) -> str:
        """What a viewer shows."""
        event = self.event
        if event.kind == OPERATOR:
            return event.name
        if event.kind in _FUNCTION_KINDS:
            return f"{event.kind} {_short(event.name)}"
        return event.kind if event.name in (event.kind, "") else f"{event.kind}: {event.name}"


@dataclass(frozen=True, slots=True)
class Track:
    """A row of a time line.

    Attributes:
        title: Its name.
        slices: Sorted by start; each is inside of the last one that has not ended, or after it.
    """

    title: str
    slices: list[Slice]


def tracks_of(part: WorkerEvents) -> list[Track]:
    """Return the tracks of one worker: its threads, the operators of torch in them, and what belongs to no thread."""
    by_key: defaultdict[tuple[int, str], list[Slice]] = defaultdict(list)
    for event in part.events:
        group = "torch" if event.kind == OPERATOR else "" if event.thread else _GROUPS.get(event.kind, "other")
        start_ns, end_ns = part.clock.to_here(event.start_ns), part.clock.to_here(event.end_ns)
        by_key[event.thread, group].append(Slice(event, start_ns, end_ns))
    tracks = []
    for (thread, group), slices in sorted(by_key.items(), key=lambda item: (item[0][0] == 0, item[0])):
        name = part.thread_names.get(thread, "thread")
        title = group if not thread else f"{name} {thread}{f' ({group})' if group else ''}"
        lanes = _nest(slices) if thread else _spread(slices)
        tracks += [Track(title if number == 0 else f"{title} {number + 1}", lane) for number, lane in enumerate(lanes)]
    return tracks


def _nest(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Return slices as nested in one lane; those that overlap the end of another one go to further lanes."""
    lanes: list[tuple[list[Slice], list[int]]] = []
    for item in sorted(slices, key=_outer_first):
        fitting = next((lane for lane in lanes if _fits(item, lane[1])), None)
        if fitting is None:
            fitting = [], []
            lanes.append(fitting)
        lane, ends = fitting
        lane.append(item)
        ends.append(item.end_ns)
    return [lane for lane, _ in lanes]


def _fits(item: Slice, ends: list[int]) -> bool:
    """Drop the slices that have ended before this one; return whether it is inside of the rest."""
    while ends and ends[-1] <= item.start_ns:
        ends.pop()
    return not ends or item.end_ns <= ends[-1]


def _spread(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Return slices in as few lanes as they need if none may overlap in a lane."""
    lanes: list[list[Slice]] = []
    for item in sorted(slices, key=_outer_first):
        lane = next((lane for lane in lanes if lane[-1].end_ns <= item.start_ns), None)
        if lane is None:
            lanes.append([item])
        else:
            lane.append(item)
    return lanes


def _outer_first(item: Slice) -> tuple[int, int]:
    return item.start_ns, -item.end_ns


def _short(function: str) -> str:
    return function.rpartition(":")[2].rpartition("<locals>.")[2] or function
