"""A worker's report to the dashboard: the answers to ``~dashboard.report`` and ``~dashboard.stacks``, and how they are made.

A worker observes only while it is asked: every report lets it observe for a few more seconds. Lists and texts have bounds.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import torch

from gradwire.autograd.context import EXTENSION as AUTOGRAD
from gradwire.autograd.worker_views import WorkerView
from gradwire.observe import events
from gradwire.observe.log import get_logger
from gradwire.observe.recorder import PIECE_EVENTS, encode_events
from gradwire.types import Id, Text, WorkerInfo, creator_of, short
from gradwire.wire.messages import prepare

if TYPE_CHECKING:
    from gradwire.autograd.engine import DistEngine
    from gradwire.observe.events import Event
    from gradwire.rpc.agent import Agent

REPORT: Final = "dashboard.report"
STACKS: Final = "dashboard.stacks"

MOST_EVENTS: Final = PIECE_EVENTS
"""Events in one report; the latest."""
MOST_CONTEXTS: Final = 32
_MOST_BYTES: Final = 4 << 20
_MOST_HOLDERS: Final = 256
_MOST_WORKERS: Final = 256
_MOST_THREADS: Final = 256
_MOST_FRAMES: Final = 100
_LEASE_NS: Final = 5 * 10**9  # how long a worker goes on observing when no report is asked for
_CAPTURE_S: Final = 0.3  # how long a step is held up, at most, to collect its graph

_log = get_logger(__name__)


class OpenContext(msgspec.Struct, frozen=True, array_like=True):
    """A context that a worker has made and not released."""

    context_id: Id
    num_messages: Id
    num_passes: Id


class Step(msgspec.Struct, frozen=True, array_like=True):
    """A context that was released on the worker that made it, as all its workers saw it just before."""

    context_id: Id
    views: Annotated[tuple[WorkerView, ...], msgspec.Meta(max_length=_MOST_WORKERS)]


class References(msgspec.Struct, frozen=True, array_like=True):
    """Numbers of references: to values of this worker, and to values of others."""

    num_values: Id = 0
    num_forks: Id = 0
    num_pending: Id = 0
    holders: Annotated[tuple[tuple[Text, Id], ...], msgspec.Meta(max_length=_MOST_HOLDERS)] = ()  # of its own values


class WorkerReport(msgspec.Struct, frozen=True, array_like=True):
    """What one worker does."""

    now_ns: Id
    references: References
    contexts: Annotated[tuple[OpenContext, ...], msgspec.Meta(max_length=MOST_CONTEXTS)]
    step: Step | None
    events: Annotated[bytes, msgspec.Meta(max_length=_MOST_BYTES)]  # since the last report, for `decode_events`
    num_dropped: Id  # events that are not in it, because there were too many


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """A line of the stack of a thread."""

    function: Text
    file: Text
    line: Id


class ThreadStack(msgspec.Struct, frozen=True, array_like=True):
    """The stack of a thread, the innermost frame first."""

    name: Text
    frames: Annotated[tuple[Frame, ...], msgspec.Meta(max_length=_MOST_FRAMES)]
    state: Text = ""  # "running", "waiting"; empty if that is not known


ThreadStacks = Annotated[tuple[ThreadStack, ...], msgspec.Meta(max_length=_MOST_THREADS)]


class EventBuffer:
    """The latest events of one worker. It subscribes when they are asked for, and ends that when they no longer are."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._lock = threading.Lock()  # guards what follows
        self._events: collections.deque[Event] = collections.deque(maxlen=MOST_EVENTS)
        self._num_seen = 0
        self._lease_ns = 0
        self._unsubscribe: Callable[[], None] | None = None

    def take(self) -> tuple[bytes, int]:
        """Return the events since the last time, encoded, and how many more there were."""
        with self._lock:
            self._lease_ns = time.monotonic_ns() + _LEASE_NS
            latest, self._events = self._events, collections.deque(maxlen=MOST_EVENTS)
            num_seen, self._num_seen = self._num_seen, 0
            if self._unsubscribe is None:
                self._unsubscribe = events.subscribe(self._on_event)
        piece = next(encode_events(latest), b"")
        return (piece, num_seen - len(latest)) if len(piece) <= _MOST_BYTES else (b"", num_seen)

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _on_event(self, event: Event) -> None:
        with self._lock:
            # First, and for events of other workers in this process too: this one may be closed.
            if event.end_ns > self._lease_ns:
                self._stop()
            elif event.worker == self._worker:
                self._events.append(event)
                self._num_seen += 1

    def _stop(self) -> None:
        unsubscribe, self._unsubscribe = self._unsubscribe, None
        self._events.clear()
        self._num_seen = 0
        if unsubscribe is not None:
            unsubscribe()


class StepCapture:
    """Collects the graph of the next context that is released here, for `WorkerReport.step`."""

    def __init__(self, engine: DistEngine) -> None:
        self._engine = engine
        # Single operations only:
        self._lease_ns = 0
        self._roots: tuple[int, list[weakref.ref[torch.Tensor]]] = (0, [])
        self._step: Step | None = None

    def take(self) -> Step | None:
        """Return the step that was collected since the last time, and collect another."""
        step, self._step = self._step, None
        self._lease_ns = time.monotonic_ns() + _LEASE_NS
        if self._engine.observer is None:
            self._engine.observer = self
        return step

    def close(self) -> None:
        if self._engine.observer is self:
            self._engine.observer = None

    def before_backward(self, context_id: int, roots: Sequence[torch.Tensor]) -> None:
        self._roots = (context_id, [weakref.ref(tensor) for tensor in roots])

    def before_release(self, context_id: int) -> None:
        if time.monotonic_ns() > self._lease_ns:
            self.close()
            return
        context = self._engine.container.find(context_id)
        if context is None or not context.exchanges or creator_of(context_id) != self._engine.container.worker:
            return
        known_id, references = self._roots
        if context.ended_passes and known_id != context_id:
            return  # its roots are not known: this began to observe after its backward had
        self.close()
        self._roots = (0, [])
        found = [tensor for item in references if known_id == context_id and (tensor := item()) is not None]
        try:
            views = self._engine.prober.views(context_id, _CAPTURE_S, [item for item in found if item.requires_grad])
        except Exception:  # the program's step must go on
            _log.debug("the graph of context %d could not be collected", context_id, exc_info=True)
            return
        self._step = Step(int(context_id), tuple(views[:_MOST_WORKERS]))


class Reporter:
    """Answers the questions of the page on one worker."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._engine: DistEngine = agent.extensions[AUTOGRAD]
        self._events = EventBuffer(agent.info.name)
        self._capture = StepCapture(self._engine)
        self._lock = threading.Lock()  # guards _is_closed, and starting to observe
        self._is_closed = False
        agent.before_close.append(self.close)

    def report(self) -> WorkerReport:
        """Return what this worker does, and observe until the next report, unless this was closed."""
        latest, num_dropped, step = b"", 0, None
        with self._lock:
            if not self._is_closed:
                latest, num_dropped = self._events.take()
                step = self._capture.take()
        return WorkerReport(
            time.monotonic_ns(), self._references(), tuple(self._open_contexts()), step, latest, num_dropped
        )

    def close(self) -> None:
        """Stop observing. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._events.close()
            self._capture.close()
        with contextlib.suppress(ValueError):  # closed before
            self._agent.before_close.remove(self.close)

    def _references(self) -> References:
        references = self._agent.extensions["rref"]
        numbers = references.statistics()
        holders = tuple(references.holders().items())[:_MOST_HOLDERS]
        return References(numbers.num_values, numbers.num_forks, numbers.num_pending, holders)

    def _open_contexts(self) -> Iterable[OpenContext]:
        own = [item for item in self._engine.container if creator_of(item.context_id) == self._agent.info.id]
        for item in own[:MOST_CONTEXTS]:
            yield OpenContext(item.context_id, len(item.exchanges), len(item.passes))


def serve_reports(agent: Agent, driver: str) -> None:
    """Let the driver ask this worker what it does."""

    @functools.cache
    def reporter() -> Reporter:
        return Reporter(agent)

    def on_report(_: WorkerInfo) -> Any:
        return msgspec.to_builtins(reporter().report(), builtin_types=(bytes,))

    def on_stacks(_: WorkerInfo) -> Any:
        return msgspec.to_builtins(own_stacks())

    purpose = f"ask what {agent.info.name} is doing"
    agent.server.register_control(REPORT, on_report, only_for=driver, purpose=purpose)
    agent.server.register_control(STACKS, on_stacks, only_for=driver, purpose=purpose)


def own_stacks() -> tuple[ThreadStack, ...]:
    """Return the stacks of the Python threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    asking = threading.get_ident()
    found = []
    for ident, frame in list(sys._current_frames().items())[:_MOST_THREADS]:
        if ident == asking:
            continue
        frames: list[Frame] = []
        current: FrameType | None = frame
        while current is not None and len(frames) < _MOST_FRAMES:
            code = current.f_code
            frames.append(Frame(short(code.co_name), short(code.co_filename), current.f_lineno or 0))
            current = current.f_back
        found.append(ThreadStack(short(names.get(ident, f"thread {ident}")), tuple(frames)))
    return tuple(sorted(found, key=lambda item: item.name))


prepare(WorkerReport, ThreadStacks)
