"""The events of all workers on tracks of one timeline, for the files that show it. Pure.

A thread is a track: what happens in it is nested as its calls are. What belongs to no thread (calls that are not waited for,
requests in a queue, passes of other workers) is on tracks of its own, as many as overlap, up to a bound.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gradwire.observe.clock import ClockMap
from gradwire.observe.events import Event

OPERATOR = "operator"

_GROUPS = {"call": "calls", "queue": "queue", "backward": "backward passes"}
_FUNCTION_KINDS = ("call", "queue", "run", "serialize", "deserialize", "wire")

# Rows that a viewer can show, and a bound on the work. Further events are instants on one more row.
_MAX_LANES = 1000
_MAX_NESTED_LANES = 16


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

    def as_instant(self) -> Slice:
        """Return its beginning alone, which overlaps nothing."""
        return Slice(self.event, self.start_ns, self.start_ns)

    @property
    def title(self) -> str:
        """The label in a viewer."""
        event = self.event
        if event.kind == OPERATOR:
            return event.name
        if event.kind in _FUNCTION_KINDS:
            return f"{event.kind} {_short(event.name)}"
        return event.kind if event.name in (event.kind, "") else f"{event.kind}: {event.name}"


@dataclass(frozen=True, slots=True)
class Track:
    """A row of a timeline.

    Attributes:
        title: Its name.
        slices: Sorted by start; each is inside the last one that has not ended, or after it.
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
    rest: list[Slice] = []
    for item in sorted(slices, key=_outer_first):
        fitting = next((lane for lane in lanes if _fits(item, lane[1])), None)
        if fitting is None:
            if len(lanes) == _MAX_NESTED_LANES:
                rest.append(item.as_instant())
                continue
            fitting = [], []
            lanes.append(fitting)
        lane, ends = fitting
        lane.append(item)
        ends.append(item.end_ns)
    return [lane for lane, _ in lanes] + ([rest] if rest else [])


def _fits(item: Slice, ends: list[int]) -> bool:
    """Drop the slices that have ended before this one; return whether it is inside the rest."""
    while ends and ends[-1] <= item.start_ns:
        ends.pop()
    return not ends or item.end_ns <= ends[-1]


def _spread(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Return slices in as few lanes as they need if none may overlap in a lane."""
    lanes: list[list[Slice]] = []
    rest: list[Slice] = []
    busy: list[tuple[int, int]] = []  # the ends of lanes and their numbers, as a heap
    free: list[int] = []  # the numbers of the others, as a heap
    for item in sorted(slices, key=_outer_first):
        while busy and busy[0][0] <= item.start_ns:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            number = heapq.heappop(free)
        elif len(lanes) < _MAX_LANES:
            number = len(lanes)
            lanes.append([])
        else:
            rest.append(item.as_instant())
            continue
        lanes[number].append(item)
        heapq.heappush(busy, (item.end_ns, number))
    return lanes + ([rest] if rest else [])


def _outer_first(item: Slice) -> tuple[int, int]:
    return item.start_ns, -item.end_ns


def _short(function: str) -> str:
    return function.rpartition(":")[2].rpartition("<locals>.")[2] or function
