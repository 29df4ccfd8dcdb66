"""Calls that other workers make here: connections they opened, and the functions that run for them.

    half open --handshake--> open --Call--> queued --slot--> running --result--> Reply
                                      \\-- control lane: runs at once, in the thread that read it

A function runs in the thread that read its request. When it waits for a call of its own, it gives up both its slot and
the reading, so others go on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from gradwire.errors import (
    AuthenticationFailed,
    CallCancelled,
    ConnectionClosed,
    DecodeError,
    LimitExceeded,
    NotExposed,
    ResourceExhausted,
    RpcTimeout,
    TransportError,
)
from gradwire.rpc._calls import PendingCall
from gradwire.rpc._slots import Slots
from gradwire.rpc.functions import is_async_execution
from gradwire.rpc.interceptors import Envelope
from gradwire.rpc.reader import Reader, has_hold, release_hold
from gradwire.transports.base import Listener
from gradwire.transports.handshake import LISTENER_ACCEPTS, ListenerHandshake
from gradwire.transports.stream import StreamConnection
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.wire import failures
from gradwire.wire.framing import Frame
from gradwire.wire.messages import Call, Failure, Goodbye, Message, Refused, Reply

if TYPE_CHECKING:
    from gradwire.rpc.agent import Agent

_log = logging.getLogger("gradwire")
_SERVER_ACCEPTS: frozenset[type[Message]] = frozenset({Call, Goodbye})
_STALL_S = 0.1
_NEVER = float("inf")
_PAUSE_S = 0.5
_REPLY_S = 60.0  # for a caller that set no deadline and does not read its reply
_LATE_S = 5.0  # a reply that has begun may end after the deadline: cutting it off ends the connection


class _Local(threading.local):
    request: Request | None = None  # what the current thread runs


_local = _Local()


class Request:
    """One call being served.

    Attributes:
        deadline: In `time.monotonic` seconds; inherited by the calls that the function makes.
        phase: ``queue``, ``run`` or ``reply``.
        is_dropped: Nobody waits for the result any more.
        waits_for: The call of its own that the function waits for, if any.
    """

    __slots__ = ("call_id", "deadline", "frame", "function", "is_dropped", "notes", "phase", "source", "waits_for")

    def __init__(self, source: Incoming | Any, call_id: int, function: str, timeout_s: float, frame: Any) -> None:
        self.source = source
        self.call_id = call_id
        self.function = function
        self.frame = frame
        self.deadline = time.monotonic() + timeout_s if timeout_s > 0 else _NEVER
        self.phase = "queue"
        self.is_dropped = False
        self.waits_for: PendingCall | None = None
        self.notes: dict[str, Any] = {}


def current_request() -> Request | None:
    """What the current thread is serving, if anything."""
    return _local.request


def is_serving() -> bool:
    """Whether the current thread holds something that it must give up before it waits."""
    return _local.request is not None or has_hold()


class Incoming:
    """A connection that another worker opened."""

    def __init__(self, server: Server, connection: StreamConnection) -> None:
        self._server = server
        self._agent = server.agent
        self.connection = connection
        self.opened = time.monotonic()
        self._handshake: ListenerHandshake | None = ListenerHandshake(self._agent.identity, self._agent.is_current)
        self.peer: WorkerAddress | None = None
        self.lane = ""
        self.requests: dict[int, Request] = {}
        self.last_call_id = 0
        self.cancelled: dict[int, None] = {}  # calls given up before they arrived here, the latest last; see `cancel`
        self._is_leaving = False
        connection.decoder.accept = LISTENER_ACCEPTS
        self.reader = Reader(connection, self._agent.reactor, self._on_handshake, self._on_end)

    def __repr__(self) -> str:
        who = self.peer.info.name if self.peer else "somebody"
        return f"<Incoming {self.lane or 'half-open'} from {who}, {len(self.requests)} requests>"

    @property
    def info(self) -> WorkerInfo:
        """Who calls."""
        assert self.peer is not None
        return self.peer.info

    @property
    def is_half_open(self) -> bool:
        return self._handshake is not None

    def _on_handshake(self, frame: Frame) -> None:
        handshake = self._handshake
        assert handshake is not None
        deadline = time.monotonic() + 1.0
        try:
            answer = handshake.on_message(frame.message, self.connection.certified_names())
        except AuthenticationFailed as error:
            with contextlib.suppress(TransportError, TimeoutError):
                self.connection.send(Refused(str(error)), deadline=deadline)
            _log.warning("%s refused a connection: %s", self._agent.info.name, error)
            self.reader.end(error)
            return
        if handshake.is_open:
            self.peer, self.lane = handshake.hello.sender, handshake.hello.lane
            self._handshake = None
            self._agent.on_introduced(self.peer)
            self.connection.decoder.accept = _SERVER_ACCEPTS
            self.reader.on_frame = self._on_frame
        try:
            self.connection.send(answer, deadline=deadline)
        except TimeoutError:
            self.reader.end(ConnectionClosed("the caller does not read"))

    def _on_frame(self, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, Goodbye):
            self._is_leaving = True
            return
        if not isinstance(message, Call):  # decoded together with the end of the handshake, when it was still allowed
            raise DecodeError(f"a {type(message).__name__} message after the handshake")
        request = Request(self, message.call_id, message.function, message.timeout_s, frame)
        request.notes = message.notes
        self.last_call_id = max(self.last_call_id, message.call_id)
        self.requests[message.call_id] = request
        if self.cancelled and message.call_id in self.cancelled:  # its cancellation came first: the lanes race
            del self.requests[message.call_id]
        elif self.lane == "control":
            self._server.run_control(request)
        elif len(self.requests) > self._agent.config.limits.calls_in_flight:
            limit = self._agent.config.limits.calls_in_flight
            self.fail(request, LimitExceeded(f"more than {limit} calls in flight from one worker"))
        else:
            self._server.accept(request)

    def note_cancelled(self, call_id: int) -> None:
        """The caller gave this call up, which may still be on its way; as many are kept as may be in flight."""
        self.cancelled[call_id] = None
        if len(self.cancelled) > self._agent.config.limits.calls_in_flight:
            self.cancelled.pop(next(iter(self.cancelled)), None)

    def _on_end(self, error: Exception) -> None:
        self._server.forget(self)
        for request in list(self.requests.values()):
            self._server.drop(request)
        self.requests.clear()
        if self.peer is None or isinstance(error, ConnectionClosed):
            return
        if isinstance(error, DecodeError):
            _log.warning("%s closed a connection from %s: %s", self._agent.info.name, self.info.name, error)
        elif self.lane == "control":
            reason = "it has shut down" if self._is_leaving else "it died or was killed (its connection ended)"
            self._agent.on_worker_ended(self.peer, reason, was_orderly=self._is_leaving)

    # -- what a request needs of its source -----------------------------------------------------------------------

    def load(self, request: Request) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The function and its arguments."""
        frame, request.frame = request.frame, None
        return self._agent.codec.load_call(frame, frame.message, self.info)

    def reply(self, request: Request, value: Any) -> None:
        """Sends a result, unless nobody wants it any more."""
        codec = self._agent.codec
        packed = codec.pack(value)
        if self.requests.pop(request.call_id, None) is None or request.is_dropped:
            return
        request.phase = "reply"
        message = Reply(request.call_id, packed.codec, len(packed.body))
        if self._agent.interceptors:
            envelope = Envelope("reply", self.info, request.function, request.notes)
            message.notes = codec.outgoing_notes(envelope, packed.tensors)
        try:
            # While more requests lie here already, small replies wait for each other and leave together.
            hold_back = self.reader.has_more()
            self.connection.send(message, packed.body, packed.tensors, self._reply_deadline(request), hold_back)
            if hold_back and not self.reader.has_more():  # taken over meanwhile, maybe flushed before this reply
                self.connection.flush()
        except (LimitExceeded, TypeError) as error:  # nothing was sent yet: say why
            self.requests[request.call_id] = request
            self.fail(request, error)
        except (TransportError, TimeoutError) as error:
            _log.info("%s could not send a reply to %s: %s", self._agent.info.name, self.info.name, error)

    def fail(self, request: Request, error: BaseException) -> None:
        """Sends an error, unless nobody wants it any more."""
        if self.requests.pop(request.call_id, None) is None or request.is_dropped:
            return
        request.phase = "reply"
        described = failures.describe_exception(error, self._agent.info.name, self._agent.config.limits)
        try:
            self.connection.send(Failure(request.call_id, described), deadline=self._reply_deadline(request))
        except (TransportError, TimeoutError) as problem:
            _log.info("%s could not send an error to %s: %s", self._agent.info.name, self.info.name, problem)

    @staticmethod
    def _reply_deadline(request: Request) -> float:
        now = time.monotonic()
        return min(max(request.deadline, now + _LATE_S), now + _REPLY_S)


class Server:
    """Accepts connections and runs what arrives on them.

    Args:
        agent: The worker.
        num_slots: User functions that run at once.
    """

    def __init__(self, agent: Agent, num_slots: int) -> None:
        self.agent = agent
        self._lock = threading.Lock()  # guards _slots
        self._slots: Slots[Request] = Slots(num_slots)
        self._incoming: set[Incoming] = set()
        self._paused: dict[Listener, float] = {}  # until when to accept nobody, because there is no descriptor left
        self._control: dict[str, Callable[..., Any]] = {}
        self._next_stall_check = 0.0
        self.num_served = 0

    def register_control(self, name: str, handler: Callable[..., Any]) -> None:
        """Makes ``handler(worker_info, *args)`` callable by other workers on the control lane, as ``~name``.

        It must not block. It may return a `torch.futures.Future` to answer later.
        """
        self._control[f"~{name}"] = handler

    # -- connections ---------------------------------------------------------------------------------------------

    def on_listener_ready(self, listener: Listener) -> None:
        """Somebody connects."""
        try:
            self._accept_all(listener)
        except ResourceExhausted as error:
            _log.warning("%s: %s", self.agent.info.name, error)
            self._paused[listener] = time.monotonic() + _PAUSE_S
            self.agent.reactor.expect(self._paused[listener])
        else:
            self.agent.reactor.arm(listener.fileno())

    def _accept_all(self, listener: Listener) -> None:
        reactor = self.agent.reactor
        while (connection := listener.accept_nowait()) is not None:
            half_open = [item for item in list(self._incoming) if item.is_half_open]
            if len(half_open) >= self.agent.config.limits.half_open:  # a worker is through within milliseconds
                min(half_open, key=lambda item: item.opened).reader.end(ConnectionClosed("too many handshakes at once"))
            incoming = Incoming(self, connection)
            self._incoming.add(incoming)
            incoming.reader.start()
            reactor.expect(incoming.opened + self.agent.config.limits.handshake_timeout_s)

    def forget(self, incoming: Incoming) -> None:
        """A connection ended."""
        self._incoming.discard(incoming)

    def end_incoming(self, name: str, incarnation: int) -> None:
        """Closes what an older incarnation of a worker had opened."""
        for incoming in list(self._incoming):
            peer = incoming.peer
            if peer is not None and peer.info.name == name and peer.incarnation <= incarnation:
                incoming.reader.end(ConnectionClosed("an older incarnation"))

    def sweep(self, now: float) -> float:
        """Closes handshakes that take too long, and grants a slot when nothing moves; returns when to look again."""
        wanted = _NEVER
        for listener, until in list(self._paused.items()):
            if until <= now:
                del self._paused[listener]
                self.agent.reactor.arm(listener.fileno())
            else:
                wanted = min(wanted, until)
        for incoming in list(self._incoming):
            if incoming.is_half_open:
                ends = incoming.opened + self.agent.config.limits.handshake_timeout_s
                if ends <= now:
                    incoming.reader.end(ConnectionClosed("the handshake took too long"))
                else:
                    wanted = min(wanted, ends)
        if self._slots.num_queued:
            wanted = min(wanted, now + _STALL_S)
            if now >= self._next_stall_check:
                self._next_stall_check = now + _STALL_S
                with self._lock:
                    request = self._slots.on_stall()
                if request is not None:
                    self._run_soon(request)
        return wanted

    # -- running -------------------------------------------------------------------------------------------------

    def accept(self, request: Request) -> None:
        """Runs a request here and now if a slot is free; queues it otherwise."""
        with self._lock:
            may_run = self._slots.on_request(request)
        if may_run:
            self._run(request)
        else:
            self.agent.reactor.expect(time.monotonic() + _STALL_S)

    def accept_elsewhere(self, request: Request) -> None:
        """As `accept`, but runs in another thread."""
        with self._lock:
            may_run = self._slots.on_request(request)
        if may_run:
            self._run_soon(request)
        else:
            self.agent.reactor.expect(time.monotonic() + _STALL_S)

    def _run_soon(self, request: Request) -> None:
        self.agent.reactor.run_soon(lambda: self._run(request))

    def _run(self, request: Request | None) -> None:
        while request is not None:
            self._execute(request)
            with self._lock:
                request = self._slots.on_finished()

    def _execute(self, request: Request) -> None:
        if request.is_dropped or time.monotonic() >= request.deadline:
            request.source.requests.pop(request.call_id, None)
            return
        request.phase = "run"
        outer = _local.request
        _local.request = request
        try:
            function, args, kwargs = request.source.load(request)
            if request.notes:
                envelope = Envelope("call", request.source.info, request.function)
                value = self.agent.codec.run(function, args, kwargs, envelope, request.notes)
            else:
                value = function(*args, **kwargs)
            del args, kwargs  # a tensor that only the arguments held is free before the reply is made
            if is_async_execution(function):
                self._answer_later(request, value)
            else:
                request.source.reply(request, value)
        except BaseException as error:  # whatever the function raised belongs to the caller
            request.source.fail(request, error)
        finally:
            _local.request = outer
            self.num_served += 1

    def _answer_later(self, request: Request, future: Any) -> None:
        if not isinstance(future, torch.futures.Future | torch._C.Future):
            raise TypeError(
                f"functions marked with async_execution must return a torch.futures.Future, but {request.function} "
                f"returned {type(future).__name__}"
            )

        def answer(done: Any) -> None:
            try:
                request.source.reply(request, torch._C.Future.wait(done))
            except BaseException as error:
                request.source.fail(request, error)

        future.add_done_callback(answer)

    def run_control(self, request: Request) -> None:
        """Runs a control handler in the thread that read the request."""
        try:
            handler = self._control.get(request.function)
            if handler is None:
                raise NotExposed(f"no control operation {request.function!r}")
            frame, request.frame = request.frame, None
            message = frame.message
            args = self.agent.codec.load_control(frame, message, request.source.info)
            value = handler(request.source.info, *args)
            if isinstance(value, torch._C.Future):
                self._answer_later(request, value)
            else:
                request.source.reply(request, value)
        except BaseException as error:
            request.source.fail(request, error)

    def drop(self, request: Request) -> str:
        """Nobody wants this result any more: it leaves the queue, or its result is not sent. Returns its phase."""
        request.is_dropped = True
        with self._lock:
            self._slots.on_cancelled(request)
        request.frame = None
        nested = request.waits_for
        if nested is not None:
            self.agent.cancel(nested)
        return request.phase

    def cancel(self, peer: WorkerInfo, call_id: int) -> str:
        """Drops a call on its caller's behalf; returns how far it got."""
        for incoming in list(self._incoming):
            if incoming.lane == "calls" and incoming.peer is not None and incoming.info == peer:
                # Noted before looking, and looked up after a request is listed: one of the two sees the other.
                incoming.note_cancelled(call_id)
                request = incoming.requests.get(call_id)
                if request is not None:
                    phase = self.drop(request)
                    if phase == "queue":
                        incoming.requests.pop(call_id, None)
                    return phase
                return "reply" if call_id <= incoming.last_call_id else "send"
        return "send"

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Surrounds every wait for a call: a function that waits holds neither its slot nor the reading."""
        release_hold()
        if current_request() is None:
            yield
            return
        with self._lock:
            successor = self._slots.on_wait()
        if successor is not None:
            self._run_soon(successor)
        try:
            yield
        finally:
            with self._lock:
                self._slots.on_wait_over()

    def time_left(self, timeout_s: float) -> float:
        """A timeout (0 for none), shortened to what the current request has left.

        Raises:
            RpcTimeout: Nothing is left.
            CallCancelled: The caller has given up.
        """
        request = current_request()
        if request is None:
            return timeout_s
        if request.is_dropped:
            raise CallCancelled(f"nobody waits for {request.function} any more, so it can make no more calls")
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

    # -- end -----------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no function runs, waits or is queued, and no answer is owed."""
        slots = self._slots
        owed = sum(len(item.requests) for item in list(self._incoming) if item.lane == "calls")
        return not (slots.num_running or slots.num_queued or slots.num_waiting or owed)

    @property
    def has_visitors(self) -> bool:
        """Whether another worker still has a control lane open to this one."""
        return any(incoming.lane == "control" for incoming in list(self._incoming))

    def numbers(self) -> tuple[int, int, int, int]:
        """Functions running, waiting and queued, and connections."""
        slots = self._slots
        return slots.num_running, slots.num_waiting, slots.num_queued, len(self._incoming)

    def connections(self) -> list[StreamConnection]:
        """What other workers opened."""
        return [incoming.connection for incoming in list(self._incoming)]

    def close(self, say_goodbye: Callable[[StreamConnection], None]) -> None:
        """Ends every connection in good order."""
        for incoming in list(self._incoming):
            say_goodbye(incoming.connection)
            incoming.reader.end(ConnectionClosed("shutdown"))
