"""How events are added up, and that label values are bounded."""

from __future__ import annotations

import os

import msgspec
import pytest

from conftest import MakeAgents
from gradwire.observe import events
from gradwire.observe.events import Event
from gradwire.rpc.traffic import MOST_PEERS, OTHER
from gradwire.telemetry.measurements import (
    BUCKETS_S,
    MOST_FUNCTIONS,
    MOST_OUTCOMES,
    Measurements,
    WorkerNumbers,
    read_numbers,
    rss_of,
    start_measuring,
)
from gradwire.testing import wait_until


def event(kind: str, name: str = "f", seconds: float = 0.002, outcome: str = "ok", **details: object) -> Event:
    return Event(kind, name, "a", 0, int(seconds * 1e9), outcome=outcome, details=details)


def test_calls_are_counted_by_function_and_outcome() -> None:
    found = Measurements()
    for outcome in ("ok", "ok", "RpcTimeout"):
        found.add(event("call", outcome=outcome))
    found.add(event("wire"))
    assert {(item.name, item.labels): item.value for item in found.counters()} == {
        ("calls", ("f", "ok")): 2,
        ("calls", ("f", "RpcTimeout")): 1,
    }
    (durations,) = found.histograms()
    assert (durations.name, durations.labels, sum(durations.counts)) == ("call_duration", ("f",), 3)
    assert durations.sum_s == pytest.approx(0.006)


@pytest.mark.parametrize(("seconds", "bucket"), [(0.0, 0), (0.0001, 0), (0.0002, 1), (300.0, 18), (301.0, 19)])
def test_a_duration_falls_into_the_bucket_of_its_upper_bound(seconds: float, bucket: int) -> None:
    found = Measurements()
    found.add(event("queue", seconds=seconds))
    (durations,) = found.histograms()
    assert [number for number, count in enumerate(durations.counts) if count] == [bucket]
    assert len(durations.counts) == len(BUCKETS_S) + 1


def test_passes_count_where_they_began() -> None:
    found = Measurements()
    found.add(event("backward", mode="fast", role="root"))
    found.add(event("backward", mode="smart", role="participant"))
    assert [(item.name, item.labels) for item in found.counters()] == [("backward_passes", ("fast", "ok"))]


def test_label_values_are_bounded() -> None:
    found = Measurements()
    for number in range(2 * MOST_FUNCTIONS):
        found.add(event("call", f"f{number}", outcome=f"Error{number}"))
    functions = {item.labels[0] for item in found.counters()}
    assert len(functions) == MOST_FUNCTIONS + 1
    assert OTHER in functions
    assert len({item.labels[1] for item in found.counters()}) == MOST_OUTCOMES + 1
    other = Measurements()
    other.add(event("run", "g\x1b" * 1000))
    (durations,) = other.histograms()
    assert durations.labels == (("g?" * 128),)


def test_numbers_of_a_worker(make_agents: MakeAgents) -> None:
    a, b = make_agents(2)
    start_measuring(a)
    start_measuring(b)
    a.call("b", max, (1, 2))
    wait_until(lambda: read_numbers(b).num_served == 1, 10.0, "that the call is counted")
    here, there = read_numbers(a), read_numbers(b)
    assert [(item.name, item.labels, item.value) for item in here.counters] == [("calls", ("builtins:max", "ok"), 1)]
    assert {item.name for item in there.histograms} == {"run_duration", "queue_duration"}
    assert [(item.peer, item.sent > 0, item.received > 0) for item in here.traffic] == [("b", True, True)]
    a.close()
    b.close()
    assert events.sink is None, "what was measured ends with the worker"


def test_a_closed_worker_is_not_measured(make_agents: MakeAgents) -> None:
    (a,) = make_agents(1)
    a.close()
    start_measuring(a)
    assert events.sink is None


def test_numbers_of_a_worker_with_many_peers_are_valid(make_agents: MakeAgents) -> None:
    (a,) = make_agents(1)
    a.traffic._ended = {f"{number}" * 300: (1, 2) for number in range(MOST_PEERS)} | {OTHER: (1, 2)}
    assert msgspec.convert(msgspec.to_builtins(read_numbers(a)), WorkerNumbers).traffic[-1].peer == OTHER


def test_memory_of_a_process() -> None:
    own = rss_of(os.getpid())
    assert own is not None
    assert own > 1 << 20
    assert rss_of(2**22 + 1) is None
