"""Asks the workers, and keeps what the page shows.

Collector.collect()     once a second while a page is open, in a thread of the server
    rows()                  the cluster: which workers there are, and how they are
    ~dashboard.report       each worker: queue, references, contexts, spans, the graph of a step
    ~autograd.explain       the graphs of contexts that stay open
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradwire.autograd.context import EXTENSION as AUTOGRAD
from gradwire.dashboard.problems import Problems, describe_failure
from gradwire.dashboard.steps import Steps
from gradwire.dashboard.worker_report import REPORT, Reporter, WorkerReport
from gradwire.errors import GradwireError
from gradwire.observe.clock import ClockOffset, ClockSample, estimate_offset
from gradwire.observe.events import Event
from gradwire.observe.log import ROOT, get_logger
from gradwire.observe.recorder import decode_events
from gradwire.versions import GRADWIRE_VERSION
from gradwire.wire.exceptions import clean

if TYPE_CHECKING:
    from gradwire.autograd.engine import DistEngine
    from gradwire.rpc.agent import Agent
    from gradwire.rpc.pending_calls import PendingCall

Row = Mapping[str, Any]
"""A worker, or the driver: ``name``, ``state``, ``exit_reason``, ``pid``, ``host`` and what else the table shows."""

_log = get_logger(__name__)

_ANSWER_S = 1.0
_GRAPH_S = 0.5
_OPEN_S = 0.8  # contexts that are open for longer are looked at while they are open
_MOST_OPEN = 4  # of these, at a time
_GRACE_S = 0.5  # for answers that are on their way when their time is over
_MOST_DRIFT = 1e-4  # seconds per second by which two clocks may part
_MOST_RECORDS = 200
_MOST_LOGGED = 1_000  # characters of a line of the log


@dataclass(frozen=True)
class State:
    """What all pages show; `Collector.choose` has the step that one of them shows."""

    number: int
    parts: Mapping[str, Any]


class Collector:
    """The state of the page, in the driver. `collect` is called by one thread at a time."""

    def __init__(self, agent: Agent, name: str, rows: Callable[[], Sequence[Row]]) -> None:
        self._agent = agent
        self._name = name
        self._rows = rows
        self._engine: DistEngine = agent.extensions[AUTOGRAD]
        self._own = Reporter(agent)
        self._lock = threading.Lock()  # guards what follows, down to `_number`: pages read it meanwhile
        self._steps = Steps()
        self._problems = Problems()
        self._last_seen: dict[str, float] = {}  # by worker
        self._states: dict[str, str] = {}
        self._open_since: dict[int, float] = {}  # contexts, by id
        self._clocks = Clocks()
        self._num_dropped = 0
        self._number = 0
        # A thread that logs may hold any lock, so the handler takes none of these.
        self._logged: collections.deque[_Logged] = collections.deque(maxlen=_MOST_RECORDS)
        self._log = _LogHandler(self._logged.append)
        logging.getLogger(ROOT).addHandler(self._log)

    def close(self) -> None:
        """Stop observing. Idempotent."""
        logging.getLogger(ROOT).removeHandler(self._log)
        self._own.close()

    def find_row(self, worker: str) -> Row | None:
        """Return the row of a worker, the driver's too; None if there is none."""
        return next((row for row in self._rows() if row["name"] == worker), None)

    def collect(self) -> State:
        """Ask all workers, and return what the page shows now."""
        rows, own = self._rows(), self._agent.info.name
        reports = self._ask(
            {row["name"]: row["pid"] for row in rows if row["state"] == "running" and row["name"] != own}
        )
        reports[own] = self._own.report()
        clocks = {own: 0, **{name: -offset_ns for name, offset_ns in self._clocks.offsets_ns().items()}}
        now, clock = time.time(), time.monotonic()
        makers = {item.context_id: name for name, report in reports.items() for item in report.contexts}
        self._open_since = {item: self._open_since.get(item, clock) for item in makers}
        graphs = {item: self._engine.prober.views(item, _GRAPH_S) for item in self._long_open(clock)}
        latest = {name: _events_of(name, report) for name, report in reports.items()}
        with self._lock:
            self._add_logged()
            for name, report in reports.items():
                self._last_seen[name] = clock
                self._num_dropped += report.num_dropped
                self._steps.on_events(latest[name], clocks.get(name, 0))
                self._add_failures(latest[name], now)
                if report.step is not None:
                    self._steps.on_step(report.step.context_id, name, report.step.views, now, clocks)
            for context_id, views in graphs.items():
                self._steps.on_open(context_id, makers[context_id], views, now, clocks)
            self._steps.on_contexts(makers)
            self._add_losses(rows, now)
            self._number += 1
            return State(self._number, self._parts(rows, reports, clock))

    def choose(self, context_id: int | None) -> dict[str, Any] | None:
        """Return one step for the page; without an id the one to look at first."""
        with self._lock:
            return self._steps.choose(context_id)

    def _ask(self, pids: Mapping[str, int | None]) -> dict[str, WorkerReport]:
        """Ask workers, given with their process ids, in parallel, and compare their clocks with this one."""
        asked_ns: dict[str, int] = {}
        answered_ns: dict[str, int] = {}
        reports: dict[str, WorkerReport] = {}
        all_done = threading.Semaphore(0)

        def on_done(name: str, call: PendingCall) -> None:
            answered_ns[name] = time.monotonic_ns()
            if call.error is None:
                reports[name] = call.value
            all_done.release()

        deadline = time.monotonic() + _ANSWER_S
        num_asked = 0
        for name in pids:
            asked_ns[name] = time.monotonic_ns()
            left_s = max(0.01, deadline - time.monotonic())
            with contextlib.suppress(GradwireError):  # it died, or is too busy to be connected to
                self._agent.control(name, REPORT, (), left_s, functools.partial(on_done, name), WorkerReport)
                num_asked += 1
        for _ in range(num_asked):
            if not all_done.acquire(timeout=max(0.01, deadline + _GRACE_S - time.monotonic())):
                break
        found = dict(reports)  # one may still be on its way
        for name, report in found.items():
            sample = ClockSample(asked_ns[name], report.now_ns, answered_ns[name])
            offset = estimate_offset([sample], is_same_machine=bool(self._engine.prober.clocks([name])))
            self._clocks.add(name, pids[name], offset)
        return found

    def _long_open(self, clock: float) -> list[int]:
        waiting = sorted((since, item) for item, since in self._open_since.items() if clock - since > _OPEN_S)
        return [item for _, item in waiting[:_MOST_OPEN]]

    def _add_failures(self, events: Iterable[Event], now: float) -> None:
        for event in events:
            if event.outcome not in ("ok", ""):
                self._problems.add(event.worker, event.kind, clean(describe_failure(event)), now)

    def _add_losses(self, rows: Sequence[Row], now: float) -> None:
        for row in rows:
            name, state = row["name"], row["state"]
            if state in ("lost", "restarting") and self._states.get(name) not in ("lost", "restarting"):
                self._problems.add(name, "worker", f"lost: {row['exit_reason'] or 'reason unknown'}", now)
            self._states[name] = state

    def _add_logged(self) -> None:
        while self._logged:
            item = self._logged.popleft()
            self._problems.add(item.worker or self._agent.info.name, "log", item.text, item.created, item.level)

    def _parts(self, rows: Sequence[Row], reports: Mapping[str, WorkerReport], clock: float) -> Mapping[str, Any]:
        return {
            "cluster": {
                "name": self._name,
                "version": GRADWIRE_VERSION,
                "pid": os.getpid(),
                "command": " ".join(map(clean, sys.argv[:1])),
                "num_dropped": self._num_dropped,
            },
            "workers": [self._worker(row, reports.get(row["name"]), clock) for row in rows],
            "steps": self._steps.summaries(),
            "errors": self._problems.as_data(),
            "references": [
                {
                    "owner": name,
                    "num_values": report.references.num_values,
                    "num_forks": report.references.num_forks,
                    "num_pending": report.references.num_pending,
                    "holders": [{"worker": holder, "count": count} for holder, count in report.references.holders],
                }
                for name, report in reports.items()
            ],
        }

    def _worker(self, row: Row, report: WorkerReport | None, clock: float) -> Row:
        seen_at = self._last_seen.get(row["name"])
        return {
            **row,
            "has_answered": report is not None,
            "last_seen_s": None if seen_at is None else clock - seen_at,
            "is_driver": row["name"] == self._agent.info.name,
        }


def _events_of(worker: str, report: WorkerReport) -> list[Event]:
    try:
        return decode_events(report.events, worker) if report.events else []
    except ValueError:
        _log.warning("the dashboard ignores invalid events from worker %s", worker)
        return []


class Clocks:
    """How far the clocks of workers are ahead of this one, by the best measurement of each. No clock inside.

    The error of a measurement grows with its age, so that a worse one replaces it in time. A process that was started anew
    may be on another machine.
    """

    def __init__(self) -> None:
        self._offsets: dict[str, tuple[int | None, ClockOffset]] = {}  # by worker, with its process id

    def add(self, worker: str, pid: int | None, offset: ClockOffset) -> None:
        known_pid, known = self._offsets.get(worker, (None, None))
        if known is not None and known_pid == pid:
            error_ns = known.error_ns + _MOST_DRIFT * (offset.at_ns - known.at_ns)
            if error_ns < offset.error_ns:
                return
        self._offsets[worker] = (pid, offset)

    def offsets_ns(self) -> dict[str, int]:
        return {worker: offset.offset_ns for worker, (_, offset) in self._offsets.items()}


@dataclass(frozen=True)
class _Logged:
    """A log record, reduced to what the page shows: the record itself may hold on to frames and tensors."""

    created: float
    level: str
    worker: str
    text: str


class _LogHandler(logging.Handler):
    def __init__(self, take: Callable[[_Logged], None]) -> None:
        super().__init__(logging.WARNING)
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = clean(record.getMessage()[:_MOST_LOGGED])
        except Exception:
            self.handleError(record)  # its arguments do not fit
            return
        level = "error" if record.levelno >= logging.ERROR else "warning"
        self._take(_Logged(record.created, level, getattr(record, "worker", ""), text))
