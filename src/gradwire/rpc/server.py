r"""The server half of a worker: runs the calls of other workers.

    Call --> queued --slot--> running --result--> Reply
         \-- control lane: runs at once, in the thread that read it

A function runs in the thread that read its request. While it waits for its own call, it releases both its slot and the
reader, so that others can run.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch

from gradwire import _interrupts
from gradwire._torch import TorchFuture
from gradwire.errors import (
    AuthenticationFailed,
    CallCancelled,
    ConnectionClosed,
    NotExposed,
    ResourceExhausted,
    RpcError,
    RpcTimeout,
)
from gradwire.observe import events
from gradwire.observe.log import get_logger
from gradwire.rpc.call_events import tell_arrived, tell_run
from gradwire.rpc.codec import describe_function
from gradwire.rpc.connection import Connection, Request
from gradwire.rpc.functions import ASYNC_MARK, Later
from gradwire.rpc.interceptors import Envelope
from gradwire.rpc.reader import Until, current, release_hold, serve_together
from gradwire.transports.registry import Listener
from gradwire.types import WorkerInfo
from gradwire.wire.exceptions import clean
from gradwire.wire.framing import Frame
from gradwire.wire.messages import Call, prepare

if TYPE_CHECKING:
    from gradwire.rpc.agent import Agent


R = TypeVar("R")


class Slots(Generic[R]):
    """Decides which requests may run: at most `limit` functions run at the same time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_running = 0
        self.num_waiting = 0
        self._queue: collections.deque[R] = collections.deque()
        self._held: collections.deque[R] = collections.deque()  # empty while the worker serves
        self.is_serving = True
        self._num_finished = 0
        self._finished_at_last_look = -1
        self._num_granted = 1

    def __repr__(self) -> str:
        return (
            f"<Slots {self.num_running}/{self.limit} running, {self.num_waiting} waiting, {len(self._queue)} queued"
            f"{'' if self.is_serving else f', {len(self._held)} held back'}>"
        )

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def oldest(self) -> R | None:
        """The request that has waited longest."""
        waiting = self._queue or self._held
        return waiting[0] if waiting else None

    def on_hold(self) -> None:
        # Requests of other workers are held back: this one does not serve yet.
        self.is_serving = False

    def on_serve(self) -> list[R]:
        """Start serving; return the requests to run now."""
        self.is_serving = True
        self._queue.extend(self._held)
        self._held.clear()
        granted = []
        while (request := self._next()) is not None:
            granted.append(request)
        return granted

    def on_request(self, request: R, *, is_own: bool = False) -> bool:
        """Return whether a request may run now; else queue it, or hold it back unless it is the worker's own."""
        if not (self.is_serving or is_own):
            self._held.append(request)
            return False
        if self.num_running < self.limit:
            self.num_running += 1
            return True
        self._queue.append(request)
        return False

    def on_finished(self) -> R | None:
        """Return the request that gets the slot of a function that has returned."""
        self.num_running -= 1
        self._num_finished += 1
        return self._next() if self._queue else None

    def on_wait(self) -> R | None:
        """Return the request that gets the slot of a function that starts waiting for a call."""
        self.num_running -= 1
        self.num_waiting += 1
        return self._next()

    def on_wait_over(self) -> None:
        """Resume a function. It does not queue again, so more than `limit` may run for a moment."""
        self.num_waiting -= 1
        self.num_running += 1

    def on_cancelled(self, request: R) -> bool:
        """Remove a request that is no longer wanted; return True if it was still queued or held back."""
        for requests in (self._queue, self._held):
            if request in requests:
                requests.remove(request)
                return True
        return False

    def on_stall(self, is_working: bool = False) -> list[R]:
        """Return requests to run beyond the limit if nothing has progressed since the last call.

        A function that has computed since then (`is_working`), or was ready to, is working, not waiting.
        """
        has_progressed = is_working or self._num_finished != self._finished_at_last_look
        self._finished_at_last_look = self._num_finished
        if has_progressed or not self._queue:
            self._num_granted = 1
            return []
        granted = [self._queue.popleft() for _ in range(min(self._num_granted, len(self._queue)))]
        self._num_granted *= 2
        self.num_running += len(granted)
        return granted

    def _next(self) -> R | None:
        if self._queue and self.num_running < self.limit:
            self.num_running += 1
            return self._queue.popleft()
        return None


_log = get_logger(__name__)
_failures = get_logger("gradwire.failures")  # what user functions raise; silent unless its level is DEBUG
LONG_WAIT_S = 5.0  # in the queue, until that is logged
REPORT_INTERVAL_S = 10.0
_LOOK_FOR_WAITS_S = 0.5
_MOST_NAMED = 4
_STALL_S = 0.1
_NEVER = float("inf")
_PAUSE_S = 0.5
_GOODBYE_S = 0.2
_ANSWER_LOOK_S = 0.002

Control = Callable[..., Any]
Keep = Callable[[WorkerInfo, str, Any, Callable[..., Any]], Callable[..., Any]]


class Server:
    """Accepts connections and runs what arrives on them."""

    def __init__(self, agent: Agent, num_slots: int) -> None:
        self.agent = agent
        self._lock = threading.Lock()  # guards slots
        self.slots: Slots[Request] = Slots(num_slots)
        self.incoming: set[Connection] = set()  # opened by other workers; single operations only
        self._paused: dict[Listener, float] = {}  # until when to accept no connection, for lack of descriptors
        self._control: dict[str, Control] = {}
        self._control_kinds: dict[str, Any] = {}  # what arguments are checked against before their handler sees them
        self._keeper: tuple[str, Keep] | None = None
        self._next_stall_check = 0.0
        self._reported: Request | None = None  # the last call that was logged because it waits
        self._next_report = 0.0
        self.num_served = 0
        self._executing: dict[int, Request] = {}  # by the thread that runs it; single operations only
        self._busyness: dict[int, Busyness] = {}  # of those threads, at the last look
        # What ends with an answer, and the thread that does it, by a key of its own; single operations only.
        self._answering: dict[object, int] = {}

    def register_control(self, name: str, handler: Control, *kinds: Any, only_for: str = "", purpose: str = "") -> None:
        """Make ``handler(worker_info, *args)`` callable by other workers on the control lane, as ``~name``.

        It must not block, and may return a `torch.futures.Future` to reply later. Arguments are validated by msgspec
        against the types in `kinds`, including ranges and lengths, before they reach it.

        Args:
            name: Name of the operation.
            handler: What it runs.
            kinds: The types of its arguments.
            only_for: The only worker that may ask for it; every worker may if not given.
            purpose: What another worker is told that it may not do: ``only driver may {purpose}, not worker1``.
        """
        if only_for:
            handler = _guarded(handler, only_for, purpose)
        kind = tuple[kinds]  # type: ignore[valid-type]
        prepare(kind)
        self._control_kinds[f"~{name}"] = kind
        self._control[f"~{name}"] = handler

    def register_keeper(self, name: str, keep: Keep) -> None:
        """Make calls with a note of that name run the result of ``keep(caller, function_name, note, function)``.

        Interceptors do not see the note, and wrap the result.
        """
        self._keeper = name, keep

    def on_listener_ready(self, listener: Listener) -> None:
        try:
            self._accept_all(listener)
        except ResourceExhausted as error:
            _log.warning("%s", error)
            self._paused[listener] = time.monotonic() + _PAUSE_S
            self.agent.reactor.expect(self._paused[listener])
        else:
            self.agent.reactor.arm(listener.fileno())

    def _accept_all(self, listener: Listener) -> None:
        reactor = self.agent.reactor
        while (stream := listener.accept_nowait()) is not None:
            half_open = [item for item in list(self.incoming) if item.is_half_open]
            if len(half_open) >= self.agent.config.limits.half_open:  # a worker is through within milliseconds
                min(half_open, key=lambda item: item.opened).end(ConnectionClosed("too many handshakes at once"))
            incoming = Connection.opened_there(self.agent, stream)
            self.incoming.add(incoming)
            try:
                incoming.reader.start()
            except ConnectionClosed as error:  # this worker has just shut down
                incoming.end(error)
                return
            if self.agent.is_closed:  # it may have closed all connections before this one was among them
                incoming.end(ConnectionClosed("shutdown"))
                return
            reactor.expect(incoming.opened + self.agent.config.limits.handshake_timeout_s)

    def make_room_for(self, newest: Connection) -> None:
        """Close the oldest connections of a worker that has opened too many for the same lane."""
        known = [
            item for item in list(self.incoming) if item.lane == newest.lane and item.info.name == newest.info.name
        ]
        num_over = len(known) - self.agent.config.limits.connections
        for item in sorted(known, key=lambda item: item.opened)[: max(0, num_over)]:
            reason = f"more than {self.agent.config.limits.connections} connections from one worker"
            item.say_goodbye(reason)
            item.end(ConnectionClosed(reason))

    def take_notices(
        self, ranks: Collection[int], seconds: float, is_done: Callable[[], bool], is_wanted: Callable[[Any], bool]
    ) -> bool:
        """Handle notices in the calling thread, which waits for them; return whether anything was received.

        `is_wanted` decides by the note of a notice whether it is handled here; others go to service threads.
        """

        def may_run_here(frame: Frame) -> bool:
            note = self.agent.notices.read(frame)
            return note is not None and is_wanted(note)

        readers = [item.reader for item in list(self.incoming) if item.lane == "calls" and item.info.id in ranks]
        return serve_together(readers, seconds, Until(is_done), may_run_here)

    def end_incoming(self, name: str, incarnation: int) -> None:
        """Close the connections of older incarnations of a worker."""
        for incoming in list(self.incoming):
            if incoming.lane and incoming.info.name == name and incoming.address.incarnation <= incarnation:
                incoming.end(ConnectionClosed("an older incarnation"))

    def sweep(self, now: float) -> float:
        """Close handshakes that take too long, and grant a slot when nothing progresses; return when to check again."""
        wanted = _NEVER
        for listener, until in list(self._paused.items()):
            if until <= now:
                del self._paused[listener]
                self.agent.reactor.arm(listener.fileno())
            else:
                wanted = min(wanted, until)
        for incoming in list(self.incoming):
            if incoming.is_half_open:
                ends = incoming.opened + self.agent.config.limits.handshake_timeout_s
                if ends <= now:
                    incoming.end(ConnectionClosed("the handshake took too long"))
                else:
                    wanted = min(wanted, ends)
        if self.slots.num_queued:
            wanted = min(wanted, now + _STALL_S)
            if now >= self._next_stall_check:
                self._next_stall_check = now + _STALL_S
                is_working = self._has_worked()
                with self._lock:
                    granted = self.slots.on_stall(is_working)
                for request in granted:
                    self.run_soon(request)
        if self.slots.num_queued or self.slots.num_held:
            wanted = min(wanted, now + _LOOK_FOR_WAITS_S)
            self._report_long_wait(now)
        return wanted

    def _report_long_wait(self, now: float) -> None:
        """Log which call has waited too long, and for what: each call once, and not more often than every few seconds."""
        with self._lock:
            oldest, num_queued = self.slots.oldest, self.slots.num_queued + self.slots.num_held
        if oldest is None or oldest is self._reported or now < self._next_report or now - oldest.arrived < LONG_WAIT_S:
            return
        self._reported, self._next_report = oldest, now + REPORT_INTERVAL_S
        running = sorted((item for item in self.requests() if item.started), key=lambda item: item.started)
        busy = [
            f"{item.function or 'a function'} of {item.source.info.name} ({now - item.started:.0f} s)"
            for item in running
        ]
        if self.slots.is_serving:
            are = "function is" if len(busy) == 1 else "functions are"
            names = (
                ", ".join([*busy[:_MOST_NAMED], *(["..."] if len(busy) > _MOST_NAMED else [])]) or "none has started"
            )
            reason = f"{len(busy)} {are} running (num_worker_threads={self.slots.limit}): {names}"
            advice = "pass a larger num_worker_threads; for a Cluster, `gradwire top` shows the calls"
        else:
            reason, advice = "this worker does not serve calls yet", "it has to call gradwire.rpc.start_serving()"
        # The name of a function that travels by value is not known before its call is decoded.
        caller = oldest.source.info.name
        what = f"{oldest.function}, called by {caller}," if oldest.function else f"a call from {caller}"
        text = "%s has been queued for %.0f s (calls in the queue: %d): %s; %s"
        # In another thread: writing a line may take long, and the clock must not wait.
        args = (clean(what), now - oldest.arrived, num_queued, clean(reason), advice)
        self.agent.reactor.run_soon(partial(_log.warning, text, *args))

    def _has_worked(self) -> bool:
        """Return whether any running function has computed since the last look, or was ready to; a waiting one has not."""
        numbers = [thread.native_id for thread in threading.enumerate() if thread.ident in self._executing]
        before, self._busyness = self._busyness, {number: busyness(number) for number in numbers if number is not None}
        return any(now.is_ready or now.ticks > before.get(thread, now).ticks for thread, now in self._busyness.items())

    def admit(self, request: Request) -> bool:
        """Return whether a request has got a slot, and must be run; else it is queued."""
        with self._lock:  # a worker's own calls are never held back
            has_slot = self.slots.on_request(request, is_own=request.source.reader is None)
        if not has_slot:
            self.agent.reactor.expect(time.monotonic() + _STALL_S)
        return has_slot

    def run(self, request: Request | None) -> None:
        """Run a request that has a slot here and now, and then those that get the slot after it."""
        while request is not None:
            with self._lock:
                now = time.monotonic()
                is_wanted = not request.is_dropped and now < request.deadline
                if is_wanted:
                    request.phase, request.started = "run", now
            if is_wanted:
                self._run_function(request)
            else:
                request.source.requests.pop(request.call_id, None)
            with self._lock:
                request = self.slots.on_finished()

    def hold_calls(self) -> None:
        with self._lock:
            self.slots.on_hold()

    def start_serving(self) -> None:
        """Run the held calls and serve new ones from now on. Idempotent."""
        with self._lock:
            granted = self.slots.on_serve()
        for request in granted:
            self.run_soon(request)
        self.agent.reactor.expect(time.monotonic() + _STALL_S)  # the rest is queued

    def run_soon(self, request: Request) -> None:
        """Like `run`, in a service thread."""
        self.agent.reactor.run_soon(partial(self.run, request))

    def _run_function(self, request: Request) -> None:
        """Run the user's function, wrapped by the interceptors, and send its result or error."""
        outer, thread, source, notes = current.request, threading.get_ident(), request.source, request.notes
        current.request = self._executing[thread] = request
        began_ns = time.monotonic_ns() if events.sink is not None else 0
        run_ns = 0
        try:
            frame = request.frame
            assert frame is not None
            assert isinstance(frame.message, Call)
            keeper = self._keeper if notes else None
            kept = notes.pop(keeper[0], None) if keeper is not None else None
            function, args, kwargs = self.agent.codec.load_call(frame, frame.message, source.info)
            request.frame = None  # not before: see `has_unread_call_of`
            if not request.function:
                request.function = describe_function(function)  # it was sent by value
            if began_ns:
                tell_arrived(request, frame.message, began_ns)
            called = function
            if keeper is not None and kept is not None:
                called = keeper[1](source.info, request.function, kept, function)
            if notes:
                envelope = Envelope("call", source.info, request.function)
                for interceptor in self.agent.interceptors:
                    if interceptor.name in notes:
                        called = interceptor.around(envelope, notes[interceptor.name], called)
            if began_ns:
                run_ns = time.monotonic_ns()
            value = called(*args, **kwargs)
            if run_ns:
                tell_run(request, run_ns)
                run_ns = 0
            del args, kwargs, frame  # a tensor that only the arguments held is free before the reply is made
            if type(value) is Later:
                self._answer_later(request, value.future)
            elif hasattr(function, ASYNC_MARK):
                self._answer_later(request, value)
            else:
                source.reply(request, value)
        except BaseException as error:  # whatever the function raised belongs to the caller
            if _failures.isEnabledFor(logging.DEBUG):
                who = self.agent.info.name, request.function, source.info.name
                _failures.debug("on worker %s, %s, called by %s, raised:", *who, exc_info=error)
            if run_ns:
                tell_run(request, run_ns, error)
            source.fail(request, error)
        finally:
            current.request = outer
            self._executing.pop(thread, None)
            self.num_served += 1
            if not torch.is_grad_enabled():  # what a function switches off stays off in its thread
                torch.set_grad_enabled(True)

    def _answer_later(self, request: Request, future: Any) -> None:
        if not isinstance(future, TorchFuture):
            raise RpcError(
                f"Functions decorated with @rpc.async_function must return a torch.futures.Future object, but "
                f"{request.function}, which is marked with async_execution, returned {type(future).__name__}"
            )

        def answer(done: Any) -> None:
            with self.answering():
                try:
                    request.source.reply(request, TorchFuture.wait(done))
                except BaseException as error:  # the value may be of a class of the user, which packs itself
                    request.source.fail(request, error)

        future.add_done_callback(answer)

    def run_control(self, request: Request) -> None:
        with self.answering():
            try:
                handler = self._control.get(request.function)
                if handler is None:
                    raise NotExposed(f"unknown control operation {request.function!r}")
                kind = self._control_kinds[request.function]
                frame, request.frame = request.frame, None
                assert frame is not None
                assert isinstance(frame.message, Call)
                value = handler(request.source.info, *self.agent.codec.load_control(frame, frame.message, kind))
                if isinstance(value, TorchFuture):
                    self._answer_later(request, value)
                else:
                    request.source.reply(request, value)
            except BaseException as error:  # it may run user callbacks; the thread must keep reading
                request.source.fail(request, error)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Make `close` wait for a block of code that sends replies to other workers.

        An operation that completes futures for several workers must put all of them in one block: the first may wake a
        thread of this worker that shuts down at once.
        """
        key = object()
        self._answering[key] = threading.get_ident()
        try:
            yield
        finally:
            self._answering.pop(key, None)

    def _answers_due(self) -> list[object]:
        own = threading.get_ident()  # the calling thread cannot wait for itself
        return [key for key, thread in list(self._answering.items()) if thread != own]

    def drop(self, request: Request) -> str:
        """Drop a request whose result is not wanted: it leaves the queue, or its result is not sent. Return its phase."""
        with self._lock:
            request.is_dropped = True
            is_held = self.slots.on_cancelled(request) and not self.slots.is_serving
            phase = "held" if is_held else request.phase
        if phase in ("queue", "held"):
            request.frame = None
        nested = request.waits_for
        if nested is not None:
            self.agent.client.cancel(nested)
        return phase

    def cancel(self, peer: WorkerInfo, call_id: int) -> str:
        for incoming in list(self.incoming):
            if incoming.lane == "calls" and incoming.info == peer:
                return incoming.cancel(call_id)
        return "send"

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Surround every wait for a call: a function that waits holds neither its slot nor the reading."""
        release_hold()
        request = current.request
        if request is None:
            yield
            return
        held = request.held
        if held is not None:
            held.let_go()
        with self._lock:
            successor = self.slots.on_wait()
        if successor is not None:
            self.run_soon(successor)
        try:
            yield
        finally:
            with self._lock:
                self.slots.on_wait_over()
            if held is not None:
                held.take_back()

    def time_left(self, timeout_s: float) -> float:
        """Return a timeout (0 for none), shortened to what the current request has left."""
        request = current.request
        if request is None:
            return timeout_s
        if request.is_dropped:
            raise CallCancelled(f"{request.function} was cancelled by its caller and can make no more calls")
        if request.deadline == float("inf"):
            return timeout_s
        left = request.deadline - time.monotonic()
        if left <= 0:
            raise RpcTimeout(
                f"{request.function}, which {request.source.info.name} called, has passed its deadline and can make no "
                f"more calls",
                self.agent.info.name,
                "run",
            )
        return min(left, timeout_s) if timeout_s > 0 else left

    @property
    def is_idle(self) -> bool:
        """Whether no function runs, waits or is queued, and no answer is owed."""
        slots = self.slots
        owed = sum(len(item.requests) for item in list(self.incoming) if item.lane == "calls")
        # Looked at last: a request is taken off its list while its answer is being sent.
        return not (slots.num_running or slots.num_queued or slots.num_waiting or owed or self._answers_due())

    def requests(self) -> list[Request]:
        """Return the calls of other workers, and of this one to itself, that are queued or running here."""
        connections = [self.agent.client.loopback, *list(self.incoming)]
        return [item for lane in connections if lane.lane == "calls" for item in list(lane.requests.values())]

    def control_lanes(self) -> list[Connection]:
        return [incoming for incoming in list(self.incoming) if incoming.lane == "control"]

    def has_unread_call_of(self, name: str) -> bool:
        """Return whether a call of that worker lies here whose arguments are not unpacked yet."""
        return any(
            request.frame is not None
            for incoming in list(self.incoming)
            if incoming.lane and incoming.info.name == name
            for request in list(incoming.requests.values())
        )

    def close(self) -> None:
        for incoming in list(self.incoming):
            incoming.say_goodbye("shutdown", _GOODBYE_S)
            incoming.end(ConnectionClosed("shutdown"))

    def wait_answered(self, deadline: float) -> None:
        """Return when the answers that are due now have been sent, or the deadline has passed."""
        due = self._answers_due()
        while any(key in self._answering for key in due) and time.monotonic() < deadline:
            _interrupts.sleep(_ANSWER_LOOK_S)


def _guarded(handler: Control, only_for: str, purpose: str) -> Control:
    def checked(source: WorkerInfo, *args: Any) -> Any:
        if source.name != only_for:
            raise AuthenticationFailed(f"only {only_for} may {purpose}, not {source.name}")
        return handler(source, *args)

    return checked


class Busyness(NamedTuple):
    """A thread's use of the processors, as the kernel counts it."""

    ticks: int
    """For how many hundredths of a second it has run, or was ready and waited for a processor."""
    is_ready: bool
    """Whether it runs or waits for a processor now. A wait in progress is not counted in `ticks` yet."""


def busyness(thread: int) -> Busyness:
    """Return how busy a thread of this process is; on a busy machine, one that computes may not run for a while."""
    task = Path(f"/proc/self/task/{thread}")
    try:
        stat = (task / "stat").read_bytes()
    except OSError:  # the thread has ended
        return Busyness(0, False)
    try:
        schedstat = (task / "schedstat").read_bytes()
    except OSError:
        schedstat = b""
    return parse_busyness(stat, schedstat)


def parse_busyness(stat: bytes, schedstat: bytes) -> Busyness:
    """Read the files of those names; some kernels leave the second empty or full of zeros."""
    state, *fields = stat.rpartition(b")")[2].split()  # before that is the thread's name, which may be cut anywhere
    counts = [int(count) for count in schedstat.split()]
    has_counts = len(counts) == 3 and counts[2] > 0
    ticks = (counts[0] + counts[1]) // 10_000_000 if has_counts else int(fields[10]) + int(fields[11])
    return Busyness(ticks, state == b"R")
