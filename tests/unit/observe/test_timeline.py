"""Events find their places on the tracks of a timeline."""

from __future__ import annotations

from typing import Any

import pytest

from gradwire.observe.chrome_trace import notes_of
from gradwire.observe.clock import ClockMap, ClockOffset
from gradwire.observe.events import Event
from gradwire.observe.timeline import Slice, Track, WorkerEvents, tracks_of


def part(*events: Event, **fields: Any) -> WorkerEvents:
    return WorkerEvents("a", 0, 4711, "host", events, **fields)


def event(kind: str, start_ns: int, end_ns: int, thread: int = 1, name: str = "f") -> Event:
    return Event(kind, name, "a", start_ns, end_ns, thread)


def are_nested(track: Track) -> bool:
    open_ends: list[int] = []
    for item in track.slices:
        while open_ends and open_ends[-1] <= item.start_ns:
            open_ends.pop()
        if open_ends and item.end_ns > open_ends[-1]:
            return False
        open_ends.append(item.end_ns)
    return True


def times(track: Track) -> list[tuple[int, int]]:
    return [(item.start_ns, item.end_ns) for item in track.slices]


def test_events_of_a_thread_are_nested() -> None:
    """They are told when they end, so the inner ones come first."""
    (track,) = tracks_of(part(event("wait", 20, 30), event("join", 11, 12), event("backward", 10, 40)))
    assert times(track) == [(10, 40), (11, 12), (20, 30)]
    assert are_nested(track)


def test_threads_have_their_names() -> None:
    tracks = tracks_of(part(event("run", 0, 1, 7), event("run", 0, 1, 8), thread_names={7: "MainThread"}))
    assert [track.title for track in tracks] == ["MainThread 7", "thread 8"]


def test_events_that_overlap_in_a_thread_do_not_break_the_nesting() -> None:
    tracks = tracks_of(part(event("run", 0, 10), event("run", 5, 15), event("run", 6, 8)))
    assert [times(track) for track in tracks] == [[(0, 10), (6, 8)], [(5, 15)]]
    assert all(map(are_nested, tracks))


def test_calls_that_no_thread_waits_for_are_side_by_side() -> None:
    calls = [event("call", start, start + 10, 0) for start in (0, 1, 2, 10, 11)]
    tracks = tracks_of(part(*calls, event("queue", 0, 3, 0)))
    assert [track.title for track in tracks] == ["calls", "calls 2", "calls 3", "queue"]
    assert [times(track) for track in tracks[:3]] == [[(0, 10), (10, 20)], [(1, 11), (11, 21)], [(2, 12)]]


@pytest.mark.parametrize("thread", [0, 7])
def test_many_events_that_overlap_take_few_steps(thread: int) -> None:
    """Comparing each with all lanes would take hours, and a viewer could not show as many rows."""
    num_events = 200_000
    tracks = tracks_of(part(*(event("call", start, 10**9 + start, thread) for start in range(num_events))))
    assert len(tracks) <= 1001
    assert all(map(are_nested, tracks))
    found = [item.event for track in tracks for item in track.slices]
    assert sorted(item.start_ns for item in found) == list(range(num_events)), "none is lost"
    assert notes_of(tracks[-1].slices[-1])["duration_ns"] == 10**9


def test_calls_take_the_first_row_that_is_free() -> None:
    calls = [event("call", start, end, 0) for start, end in ((0, 30), (1, 5), (2, 4), (6, 7), (7, 8), (7, 9))]
    tracks = tracks_of(part(*calls))
    assert [times(track) for track in tracks] == [[(0, 30)], [(1, 5), (6, 7), (7, 9)], [(2, 4), (7, 8)]]


def test_operators_are_beside_the_thread_that_runs_them() -> None:
    tracks = tracks_of(part(event("run", 0, 10), event("operator", 0, 11, name="aten::add")))
    assert [track.title for track in tracks] == ["thread 1", "thread 1 (torch)"]
    assert tracks[1].slices[0].title == "aten::add"


def test_times_are_those_of_the_one_clock() -> None:
    (track,) = tracks_of(part(event("run", 1000, 1010), clock=ClockMap([ClockOffset(0, 900, 1)])))
    assert times(track) == [(100, 110)]


def test_titles() -> None:
    def title(kind: str, name: str) -> str:
        return Slice(event(kind, 0, 1, name=name), 0, 1).title

    assert title("run", "package.module:f.<locals>.inner") == "run inner"
    assert title("backward", "backward") == "backward"
    assert title("optimizer_step", "SGD") == "optimizer_step: SGD"
