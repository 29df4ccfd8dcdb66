"""`Cluster.trace`: records what happens on all workers, and writes it as one timeline."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import msgspec

from gradwire import _interrupts
from gradwire.cluster.driver import check_count
from gradwire.cluster.trace_server import (
    CLOCK,
    END,
    MAX_EVENTS,
    MAX_PIECE_BYTES,
    PIECE,
    START,
    STOP,
    Number,
    Recorded,
    Recording,
    Started,
)
from gradwire.errors import ConfigurationError, GradwireError
from gradwire.observe.chrome_trace import write_chrome_trace
from gradwire.observe.clock import ClockMap, ClockOffset, ClockSample, estimate_offset
from gradwire.observe.events import Event
from gradwire.observe.log import get_logger
from gradwire.observe.perfetto_trace import load_protos, write_archive, write_perfetto_trace
from gradwire.observe.recorder import PIECE_EVENTS, decode_events
from gradwire.observe.timeline import WorkerEvents
from gradwire.rpc.pending_calls import PendingCall
from gradwire.versions import GRADWIRE_VERSION
from gradwire.wire.exceptions import clean

if TYPE_CHECKING:
    from gradwire.cluster.monitor import MembershipEvent
    from gradwire.rpc.agent import Agent

PathLike = str | os.PathLike[str]

DEFAULT_EVENTS = 200_000
MAX_SECONDS = 86_400.0

_ENDS = {"lost": "was lost", "left": "left"}
_SUFFIXES = (".zip", ".pftrace", ".json")
_NUM_SAMPLES = 8
_START_PROFILER_S = 60.0  # importing and starting torch.profiler takes seconds
_STOP_S = 120.0
_ASK_S = 10.0
_CLOSE_S = 10.0
_LOOK_S = 0.2  # how often to check whether the command that asked for a trace is gone
_END_S = 5.0
_SLICE_S = 0.05  # a thread that waits for another one checks for Ctrl-C so often
_MAX_AT_ONCE = 16
_MAX_REASON_CHARS = 200
_JOIN_THREAD = "gradwire-driver-trace"

_log = get_logger(__name__)
_numbers = itertools.count(1)
_lock = threading.Lock()  # guards _active
_active: dict[int, Trace] = {}  # the trace under way of each driver, by the id of its agent


@dataclass(frozen=True, slots=True)
class WorkerTrace:
    """Summary of one worker's part of a trace.

    Attributes:
        name: Name of the worker.
        num_events: Events in the trace.
        num_dropped: Earlier events that there was no room for; see `max_events` of `gradwire.Cluster.trace`.
        clock_offset_ns: How far its clock is ahead of the driver's.
        clock_error_ns: Maximum error of `clock_offset_ns`.
        problem: Why events are missing, such as the loss of the worker; None if none are.
    """

    name: str
    num_events: int
    num_dropped: int
    clock_offset_ns: int
    clock_error_ns: int
    problem: str | None


class Trace:
    """A trace of all workers, made by `gradwire.Cluster.trace`; a context manager.

    Attributes:
        paths: The files.
        workers: Summary for each worker; empty until the block has ended.
    """

    def __init__(
        self,
        agent: Agent,
        members: Callable[[], Iterable[str]],
        on_membership: Callable[[Callable[[MembershipEvent], object]], Callable[[], None]],
        paths: Sequence[PathLike],
        *,
        profile: bool,
        max_events: int,
    ) -> None:
        self._agent = agent
        self._members = members
        self._on_membership = on_membership
        self.paths = _check_paths(paths)
        check_count("max_events", max_events, MAX_EVENTS)
        self._max_events = max_events
        self._profile = bool(profile)
        self.workers: tuple[WorkerTrace, ...] = ()
        self._number = 0
        self._recording: Recording | None = None
        self._leave: Callable[[], None] | None = None
        self._lock = threading.Lock()  # guards the fields below
        self._is_over = True  # no worker is asked to record any more
        self._asked: list[str] = []  # to record, and not yet to end that
        self._joining: list[threading.Thread] = []  # ask workers that joined
        self._started: dict[str, Started] = {}
        self._offsets: dict[str, list[ClockOffset]] = {}
        self._problems: dict[str, str] = {}

    def __repr__(self) -> str:
        state = "recording" if self._recording is not None else "written" if self.workers else "not started"
        return f"<Trace {', '.join(map(str, self.paths))}: {state}>"

    def __enter__(self) -> Trace:
        with _lock:
            other = _active.get(id(self._agent))
            if other is None:
                _active[id(self._agent)] = self
        if other is not None:
            names = ", ".join(map(str, other.paths))
            raise ConfigurationError(f"a trace of this cluster is being recorded already, to {names}; end it first")
        with contextlib.ExitStack() as undo:
            undo.callback(self._close)
            self._reset()
            self._recording = Recording(self._agent.info.name, self._max_events, self._profile)
            self._leave = self._on_membership(self._on_change)
            self._start_on(list(self._members()))
            undo.pop_all()
        return self

    def _reset(self) -> None:
        self._number, self.workers = next(_numbers), ()
        with self._lock:
            self._is_over = False
            for field in (self._asked, self._joining, self._started, self._offsets, self._problems):
                field.clear()

    def __exit__(self, *_: object) -> None:
        try:
            self._finish()
        finally:
            self._close()

    def _close(self) -> None:
        """Stop recording, here and on every worker that was asked to, whatever has happened before."""
        with contextlib.ExitStack() as steps:  # runs in reverse order, each step even if an earlier one raises
            steps.callback(self._forget)
            steps.callback(self._close_recording)
            steps.callback(self._end_on_workers)
            self._end_joining()

    def _forget(self) -> None:
        with _lock:
            if _active.get(id(self._agent)) is self:
                del _active[id(self._agent)]

    def _close_recording(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close()

    def _end_joining(self) -> None:
        """Ask no further worker to record."""
        if self._leave is not None:
            self._leave()
        with self._lock:
            self._is_over = True

    def _end_on_workers(self) -> None:
        with self._lock:
            names = list(self._asked)
        self._agent.ask_all(names, END, (self._number,), _END_S, None)
        with self._lock:
            self._asked.clear()

    # -- the beginning ---------------------------------------------------------------------------------------------------

    def _start_on(self, names: Sequence[str]) -> None:
        with self._lock:  # first: whatever happens from here on, they are asked to end it
            self._asked += [name for name in names if name not in self._asked]
        args = (self._number, self._max_events, self._profile)
        timeout_s = _START_PROFILER_S if self._profile else _ASK_S
        started = self._ask_each(names, START, lambda _: args, timeout_s, Started)
        with self._lock:
            self._started.update(started)
        self._measure_each(list(started))

    def _on_change(self, event: MembershipEvent) -> None:
        """Record on workers that join while the trace is under way."""
        name = event.worker.name
        if event.kind in ("joined", "restarted"):
            # A thread of its own: callbacks of the program must not wait until a profiler has started.
            thread = threading.Thread(target=self._start_on, args=([name],), name=_JOIN_THREAD, daemon=True)
            with self._lock:
                if self._is_over:
                    return
                self._asked.append(name)  # here: the trace may end before that thread has begun
                self._offsets.pop(name, None)
                self._joining = [*filter(threading.Thread.is_alive, self._joining), thread]
                thread.start()
        elif event.kind in _ENDS:
            self._note_problem(name, f"the worker {_ENDS[event.kind]}: {event.reason or 'no reason given'}")

    def _note_problem(self, name: str, text: object) -> None:
        with self._lock:
            self._problems.setdefault(name, clean(str(text))[:_MAX_REASON_CHARS])

    def _measure_each(self, names: Sequence[str]) -> None:
        for name, offset in _at_once(self._measure, names).items():
            with self._lock:
                self._offsets.setdefault(name, []).append(offset)

    def _measure(self, name: str) -> ClockOffset:
        """Ask a worker for its clock, several times."""
        samples = []
        with contextlib.suppress(GradwireError, TimeoutError):  # one that is late once is not asked again
            for _ in range(_NUM_SAMPLES):
                samples.append(self._ask_clock(name))
        if not samples:
            raise TimeoutError("it did not answer when asked for its clock")
        is_same = self._agent.directory.find(name).host == self._agent.address.host
        return estimate_offset(samples, is_same_machine=is_same)

    def _ask_clock(self, name: str) -> ClockSample:
        answered = threading.Event()
        found: list[tuple[int, int]] = []

        def on_done(call: PendingCall) -> None:  # here, not where it is waited for: waking that thread takes time
            if call.error is None:
                found.append((call.value, time.monotonic_ns()))
            answered.set()

        sent_ns = time.monotonic_ns()
        self._agent.client.control(name, CLOCK, (), _ASK_S, on_done, Number)
        if not (answered.wait(_ASK_S + 1.0) and found):
            raise TimeoutError(f"worker {name} did not report its clock")
        there_ns, received_ns = found[0]
        return ClockSample(sent_ns, there_ns, received_ns)

    def _ask_each(
        self, names: Iterable[str], operation: str, args_for: Callable[[str], Any], timeout_s: float, answer: Any
    ) -> dict[str, Any]:
        """Ask several workers at once; return the answers, and note the problems of the others."""
        futures, answers = {}, {}
        for name in names:
            try:
                futures[name] = self._agent.ask(name, operation, args_for(name), timeout_s, answer)
            except GradwireError as error:
                self._note_problem(name, error)
        for name, future in futures.items():
            try:
                answers[name] = future.wait()
            except Exception as error:  # it raised, died or is late, or its answer is of another type
                self._note_problem(name, error)
        return answers

    # -- the end ---------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Collect what was recorded, and write the files."""
        self._end_joining()
        self._wait_for_joining()
        with self._lock:
            known = dict(self._started)
            measured = [name for name in known if name not in self._problems]
        self._measure_each(measured)
        recorded = self._ask_each(known, STOP, lambda _: (self._number,), _STOP_S, Recorded)
        parts = [self._own_part()]
        for name, found in recorded.items():
            events = self._collect(name, found)
            if events is not None:
                parts.append(self._part(name, known[name], found, events))
        self._end_on_workers()
        parts.sort(key=lambda part: (part.worker != self._agent.info.name, part.rank))  # the driver comes first
        self._write(parts)
        self.workers = tuple(self._summaries(parts))
        for item in self.workers:
            if item.problem is not None:
                _log.warning("the trace lacks events of worker %s: %s", item.name, item.problem)
            if item.num_dropped:
                text = "the trace lacks the first %d events of worker %s, because of max_events; pass a larger one"
                _log.warning(text, item.num_dropped, item.name)

    def _wait_for_joining(self) -> None:
        """Wait for workers that are about to record; it has a bound, because one that hangs must not delay the files."""
        deadline = time.monotonic() + _ASK_S
        with self._lock:
            threads = list(self._joining)
        for thread in threads:
            while thread.is_alive() and time.monotonic() < deadline:
                thread.join(_SLICE_S)
                _interrupts.deliver()
        with self._lock:
            late = [name for name in self._asked if name not in self._started]
        for name in late:
            self._note_problem(name, "it had not begun to record when the trace ended")

    def _own_part(self) -> WorkerEvents:
        assert self._recording is not None
        pieces, found = self._recording.stop()
        events = [event for piece in pieces for event in decode_events(piece, self._agent.info.name)]
        return self._part(self._agent.info.name, Started(os.getpid(), socket.gethostname()), found, events)

    def _part(self, name: str, where: Started, found: Recorded, events: Sequence[Event]) -> WorkerEvents:
        if found.problem:
            self._note_problem(name, found.problem)
        with self._lock:
            offsets = list(self._offsets.get(name, ()))
        return WorkerEvents(
            worker=name,
            rank=self._agent.directory.find(name).info.id,
            pid=where.pid,
            host=clean(where.host),
            events=events,
            clock=ClockMap(offsets),
            thread_names={number: clean(text) for number, text in found.threads},
            num_dropped=found.num_dropped,
        )

    def _collect(self, name: str, found: Recorded) -> list[Event] | None:
        """Return the events of a worker; None if it did not hand all of them over."""
        max_pieces = 2 * self._max_events // PIECE_EVENTS + 2  # events and operators, each with a last piece
        if found.num_pieces > max_pieces:
            self._note_problem(
                name, f"it reported {found.num_pieces} pieces of events, but at most {max_pieces} are accepted"
            )
            return None
        events: list[Event] = []
        piece = Annotated[bytes, msgspec.Meta(max_length=MAX_PIECE_BYTES)]
        for index in range(found.num_pieces):
            try:
                data = self._agent.ask(name, PIECE, (self._number, index), _ASK_S, piece).wait()
                events += decode_events(data, name)
            except Exception as error:  # it died, or what it sent is not valid
                self._note_problem(name, error)
                return None
        return events

    def _summaries(self, parts: Sequence[WorkerEvents]) -> Iterable[WorkerTrace]:
        with self._lock:
            problems = dict(self._problems)
        for part in parts:
            best = part.clock.best
            yield WorkerTrace(
                part.worker,
                len(part.events),
                part.num_dropped,
                best.offset_ns,
                best.error_ns,
                problems.get(part.worker),
            )
        there = {part.worker for part in parts}
        for name, problem in problems.items():
            if name not in there:
                yield WorkerTrace(name, 0, 0, 0, 0, problem)

    def _write(self, parts: Sequence[WorkerEvents]) -> None:
        attributes: dict[str, str | int] = {"gradwire.version": GRADWIRE_VERSION}
        for item in self._summaries(parts):
            attributes[f"gradwire.{item.name}.events"] = item.num_events
            attributes[f"gradwire.{item.name}.dropped_events"] = item.num_dropped
            attributes[f"gradwire.{item.name}.clock_offset_ns"] = item.clock_offset_ns
            attributes[f"gradwire.{item.name}.clock_error_ns"] = item.clock_error_ns
            if item.problem is not None:
                attributes[f"gradwire.{item.name}.problem"] = item.problem
        for path in self.paths:
            with _replacing(path) as file:
                if path.suffix.lower() == ".json":
                    write_chrome_trace(file, parts, attributes)
                elif path.suffix.lower() == ".zip":
                    write_archive(file, parts, attributes)
                else:
                    write_perfetto_trace(file, parts)


class TimedTraces:
    """Records traces of a given time, which `gradwire trace` asks for."""

    def __init__(self, make_trace: Callable[..., Trace]) -> None:
        self._make_trace = make_trace
        self._is_closing = threading.Event()
        self._changed = threading.Condition()  # guards _num_open
        self._num_open = 0

    def record(
        self,
        is_gone: Callable[[], bool],
        path: str,
        seconds: float,
        profile: bool = False,
        max_events: int = DEFAULT_EVENTS,
    ) -> str:
        """Record for that time, or until the cluster is closed; return what was recorded, for people.

        If the command that asked `is_gone`, because of Ctrl-C for instance, this ends early, too.

        Raises:
            ConfigurationError: An option is wrong, or a trace is being recorded already.
            OSError: The file cannot be written.
        """
        if not 0 < seconds <= MAX_SECONDS:
            raise ConfigurationError(f"seconds must be more than 0 and at most {MAX_SECONDS:,}, not {seconds!r}")
        trace = self._make_trace(path, profile=profile, max_events=max_events)
        with self._changed:
            self._num_open += 1
        try:
            with trace:
                end = time.monotonic() + seconds
                while not (self._is_closing.wait(min(_LOOK_S, max(0.0, end - time.monotonic()))) or is_gone()):
                    if time.monotonic() >= end:
                        break
        finally:
            with self._changed:
                self._num_open -= 1
                self._changed.notify_all()
        return describe(trace)

    def close(self) -> None:
        """End the traces, and wait until their files are written. Idempotent."""
        self._is_closing.set()
        with self._changed:
            _interrupts.wait_for(self._changed, lambda: not self._num_open, _CLOSE_S)


def describe(trace: Trace) -> str:
    """Return a few lines on what the files of a trace have."""
    lines = [f"wrote {', '.join(map(str, trace.paths))}"]
    for item in trace.workers:
        dropped = f", {item.num_dropped:,} dropped for lack of room" if item.num_dropped else ""
        clock = f", clock {item.clock_offset_ns / 1e6:+,.3f} ms" if item.clock_offset_ns else ""
        lines.append(f"  {item.name}: {item.problem or f'{item.num_events:,} events{dropped}{clock}'}")
    return "\n".join(lines)


def _check_paths(paths: Sequence[PathLike]) -> tuple[Path, ...]:
    """Return absolute paths of files that can be written, before anything is recorded."""
    if not paths:
        raise ConfigurationError("a trace needs the path of a file, such as run.zip")
    found = tuple(Path(path).absolute() for path in paths)
    for path in found:
        if path.suffix.lower() not in _SUFFIXES:
            raise ConfigurationError(
                f"unsupported trace format {path.name!r}: use .zip or .pftrace (Perfetto), or .json (Chrome)"
            )
        if not path.parent.is_dir():
            raise ConfigurationError(f"the trace cannot be written: {path.parent} is not a folder")
        if path.is_dir():
            raise ConfigurationError(f"the trace cannot be written: {path} is a folder; give the path of a file")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise ConfigurationError(f"the trace cannot be written: no permission to write to {path.parent}")
    if any(path.suffix.lower() != ".json" for path in found):
        load_protos()
    return found


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of the one at that path when all of it is written."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.unfinished")
    file = open(unfinished, "xb")  # noqa: SIM115  # follows no link that another user has put there
    try:
        with file:
            yield file
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _at_once(action: Callable[[str], ClockOffset], names: Sequence[str]) -> dict[str, ClockOffset]:
    """Run an action for each name, several at the same time; leave out those for which it raises."""
    if not names:
        return {}
    found = {}
    with ThreadPoolExecutor(min(_MAX_AT_ONCE, len(names)), thread_name_prefix="gradwire-driver-clock") as pool:
        futures = {name: pool.submit(action, name) for name in names}
        for name, future in futures.items():
            with contextlib.suppress(GradwireError, TimeoutError):
                found[name] = future.result()
    return found
