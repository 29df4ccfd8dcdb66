"""Counts and durations of what happens on a worker, added up from events; and all numbers of a worker at one moment.

Label values that users or peers choose are bounded: of functions, outcomes and peers, the first ones are kept apart, and all
others are counted together as ``other``.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections.abc import Callable
from typing import Annotated, Final

import msgspec

from gradwire.autograd.context import EXTENSION
from gradwire.autograd.engine import DistEngine
from gradwire.observe.events import Event, subscribe
from gradwire.rpc.agent import Agent
from gradwire.rpc.traffic import MOST_PEERS, OTHER
from gradwire.rref import context as references
from gradwire.types import Seconds, Text, short
from gradwire.wire.messages import prepare

BUCKETS_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Upper bounds of the buckets of all histograms, in seconds; a last bucket has the rest."""

MOST_FUNCTIONS: Final = 100
MOST_OUTCOMES: Final = 20
_MOST_SERIES: Final = 8_192  # in an answer: functions times outcomes, in the worst case

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Labels = Annotated[tuple[Text, ...], msgspec.Meta(max_length=4)]


class Counter(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A number that only grows."""

    name: Text
    labels: _Labels
    value: _Count


class Histogram(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How many durations fell into each bucket, and their sum."""

    name: Text
    labels: _Labels
    counts: Annotated[tuple[_Count, ...], msgspec.Meta(min_length=len(BUCKETS_S) + 1, max_length=len(BUCKETS_S) + 1)]
    sum_s: Seconds


class Traffic(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Bytes exchanged with another worker."""

    peer: Text
    sent: _Count
    received: _Count


class WorkerNumbers(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All numbers of a worker at one moment."""

    pid: _Count
    rss_bytes: _Count | None
    num_served: _Count
    num_running: _Count
    num_queued: _Count
    num_contexts: _Count
    num_passes: _Count
    num_values: _Count  # here that other workers refer to
    num_references: _Count  # from here to values of others
    traffic: Annotated[tuple[Traffic, ...], msgspec.Meta(max_length=MOST_PEERS + 1)]
    counters: Annotated[tuple[Counter, ...], msgspec.Meta(max_length=_MOST_SERIES)]
    histograms: Annotated[tuple[Histogram, ...], msgspec.Meta(max_length=_MOST_SERIES)]


prepare(WorkerNumbers)


class _Names:
    """Keeps the first names apart."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, str] = {}

    def bounded(self, name: str) -> str:
        found = self._known.get(name)
        if found is None:
            if len(self._known) >= self._most:
                return OTHER
            found = self._known[name] = short(name)
        return found


class _Durations:
    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += max(0.0, seconds)


class Measurements:
    """Adds up the events of one worker. No clock inside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards everything below
        self._functions = _Names(MOST_FUNCTIONS)
        self._outcomes = _Names(MOST_OUTCOMES)
        self._counts: dict[tuple[str, tuple[str, ...]], int] = {}  # by name and labels
        self._durations: dict[tuple[str, tuple[str, ...]], _Durations] = {}

    def add(self, event: Event) -> None:
        """Count an event."""
        measure = _KINDS.get(event.kind)
        if measure is not None:
            with self._lock:
                measure(self, event)

    def _count(self, name: str, *labels: str) -> None:
        self._counts[name, labels] = self._counts.get((name, labels), 0) + 1

    def _time(self, event: Event, name: str, *labels: str) -> None:
        found = self._durations.get((name, labels))
        if found is None:
            found = self._durations[name, labels] = _Durations()
        found.add(event.duration_s)

    def _add_call(self, event: Event) -> None:
        function = self._functions.bounded(event.name)
        self._count("calls", function, self._outcomes.bounded(event.outcome))
        self._time(event, "call_duration", function)

    def _add_run(self, event: Event) -> None:
        self._time(event, "run_duration", self._functions.bounded(event.name))

    def _add_queue(self, event: Event) -> None:
        self._time(event, "queue_duration")

    def _add_backward(self, event: Event) -> None:
        details = event.details or {}
        if details.get("role") == "root":
            mode = "fast" if details.get("mode") == "fast" else "smart"
            self._count("backward_passes", mode, self._outcomes.bounded(event.outcome))
            self._time(event, "backward_duration", mode)

    def _add_optimizer_step(self, event: Event) -> None:
        self._time(event, "optimizer_step_duration", self._functions.bounded(event.name))

    def _add_checkpoint(self, event: Event) -> None:
        self._time(event, "checkpoint_duration", self._functions.bounded(event.name))

    def counters(self) -> tuple[Counter, ...]:
        with self._lock:
            return tuple(Counter(name, labels, value) for (name, labels), value in self._counts.items())

    def histograms(self) -> tuple[Histogram, ...]:
        with self._lock:
            items = self._durations.items()
            return tuple(Histogram(name, labels, tuple(found.counts), found.sum_s) for (name, labels), found in items)


_KINDS: Final[dict[str, Callable[[Measurements, Event], None]]] = {
    "call": Measurements._add_call,
    "run": Measurements._add_run,
    "queue": Measurements._add_queue,
    "backward": Measurements._add_backward,
    "optimizer_step": Measurements._add_optimizer_step,
    "checkpoint": Measurements._add_checkpoint,
}


_EXTENSION: Final = "measurements"
_lock = threading.Lock()  # guards changes of the extension of an agent


def start_measuring(agent: Agent) -> Measurements:
    """Add up the events of a worker of this process from now on, until it is closed. Idempotent."""
    with _lock:
        found: Measurements | None = agent.extensions.get(_EXTENSION)
        if found is None:
            made = found = agent.extensions[_EXTENSION] = Measurements()
            name = agent.info.name

            def add(event: Event) -> None:
                if event.worker == name:
                    made.add(event)

            unsubscribe = subscribe(add)
            agent.before_close.append(unsubscribe)
            if agent.is_closed:  # it may have called back before this
                unsubscribe()
    return found


def read_numbers(agent: Agent) -> WorkerNumbers:
    """Return all numbers of a worker of this process; counts and durations of events since `start_measuring`."""
    measured, statistics = start_measuring(agent), agent.statistics()
    engine: DistEngine = agent.extensions[EXTENSION]
    autograd, held = engine.statistics(), references.of(agent).statistics()
    return WorkerNumbers(
        os.getpid(),
        rss_of(os.getpid()),
        statistics.num_calls_served,
        statistics.num_running + statistics.num_waiting,
        statistics.num_queued,
        autograd.num_contexts,
        autograd.num_passes_under_way,
        held.num_values,
        held.num_forks,
        tuple(Traffic(short(name), *sums) for name, sums in agent.traffic.by_worker().items()),
        measured.counters(),
        measured.histograms(),
    )


def rss_of(pid: int) -> int | None:
    """Return the resident memory of a process in bytes, or None if it has exited."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return None
