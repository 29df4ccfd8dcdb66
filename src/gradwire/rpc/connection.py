"""Connections that other workers opened, and the requests that come over them.

half open --handshake--> open --Call--> Server.accept, or Server.run_control on the control lane
                              <-- Reply or Failure
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from gradwire.errors import (
    AuthenticationFailed,
    ConnectionClosed,
    DecodeError,
    IdentityTaken,
    LimitExceeded,
    ResourceExhausted,
    TransportError,
    WorkerLost,
)
from gradwire.rpc.interceptors import Envelope
from gradwire.rpc.oneway import NOTICE_ID
from gradwire.rpc.pending_calls import CallTable, PendingCall
from gradwire.rpc.reader import Reader, has_hold, release_hold
from gradwire.transports.handshake import LISTENER_ACCEPTS, ListenerHandshake
from gradwire.transports.stream import StreamConnection
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.wire import exceptions as failures
from gradwire.wire import serialization as objects
from gradwire.wire import tensors
from gradwire.wire.framing import Frame
from gradwire.wire.messages import Call, Failure, Goodbye, Message, Refused, Reply
from gradwire.wire.serialization import Packed

if TYPE_CHECKING:
    from gradwire.rpc.agent import Agent
    from gradwire.rpc.server import Server


_log = logging.getLogger("gradwire")
_SERVER_ACCEPTS: frozenset[type[Message]] = frozenset({Call, Goodbye})
_NEVER = float("inf")
_REPLY_S = 60.0  # for a caller that set no deadline and does not read its reply
_MAX_REASON_BYTES = 1024
_MAX_GIVEN_UP = 8  # calls that one worker gave up and that still run here, for each that it may have in flight
_MAX_CONTROL = 1024  # operations of one worker that wait for others; callers do not count them, unlike calls
_LATE_S = 5.0  # a reply that has begun may end after the deadline: cutting it off ends the connection


class Held(Protocol):
    """Something that a function must not keep while it waits for something else."""

    def let_go(self) -> None:
        """Before the function waits."""

    def take_back(self) -> None:
        """When it goes on. Must not raise."""


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
        held: What a layer above holds for the function, but not while it waits; or None.
    """

    __slots__ = (
        "call_id",
        "deadline",
        "frame",
        "function",
        "held",
        "is_dropped",
        "notes",
        "phase",
        "source",
        "waits_for",
    )

    def __init__(self, source: Incoming | Any, call_id: int, function: str, timeout_s: float, frame: Any) -> None:
        self.source = source
        self.call_id = call_id
        self.function = function
        self.frame = frame
        self.deadline = time.monotonic() + timeout_s if timeout_s > 0 else _NEVER
        self.phase = "queue"
        self.is_dropped = False
        self.waits_for: PendingCall | None = None
        self.held: Held | None = None
        self.notes: dict[str, Any] = {}


def set_current_request(request: Request | None) -> None:
    """The current thread begins or ends to serve."""
    _local.request = request


def current_request() -> Request | None:
    """What the current thread is serving, if anything."""
    return _local.request


def while_waiting() -> contextlib.AbstractContextManager[object]:
    """Surrounds any wait that may take long: a function that waits holds neither its slot nor the reading."""
    request = _local.request
    if request is not None:
        server: Server = request.source.server
        return server.waiting()
    release_hold()
    return contextlib.nullcontext()


def is_serving() -> bool:
    """Whether the current thread holds something that it must give up before it waits."""
    return _local.request is not None or has_hold()


class Incoming:
    """A connection that another worker opened."""

    def __init__(self, server: Server, connection: StreamConnection) -> None:
        self.server = server
        self._agent = server.agent
        self.connection = connection
        self.opened = time.monotonic()
        self._handshake: ListenerHandshake | None = ListenerHandshake(self._agent.identity, self._agent.admit)
        self.peer: WorkerAddress | None = None
        self.info: WorkerInfo  # who calls; since the handshake
        self.lane = ""
        self._is_welcome = False  # the caller knows that it is let in; one that gave up before is not dead
        self._num_ends = 0  # of the peer, when it was let in
        self.shares_main = False
        self.requests: dict[int, Request] = {}
        self._max_in_flight = self._agent.config.limits.calls_in_flight
        self.last_call_id = 0
        self.cancelled: dict[int, None] = {}  # calls given up before they arrived here, the latest last; see `cancel`
        self._goodbye: str | None = None
        connection.decoder.accept = LISTENER_ACCEPTS
        self.reader = Reader(connection, self._agent.reactor, self._on_handshake, self._on_end)

    def __repr__(self) -> str:
        who = self.peer.info.name if self.peer else "somebody"
        return f"<Incoming {self.lane or 'half-open'} from {who}, {len(self.requests)} requests>"

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
                refusal = Refused(str(error), isinstance(error, IdentityTaken))
                self.connection.send(refusal, deadline=deadline)
            _log.warning("%s refused a connection: %s", self._agent.info.name, error)
            self.reader.end(error)
            return
        if handshake.is_open:
            self.peer, self.lane = handshake.hello.sender, handshake.hello.lane
            self.info = self.peer.info
            self.shares_main = self._agent.address.shares_main(self.peer)
            self._handshake = None
            if self.lane == "control":
                self._max_in_flight = _MAX_CONTROL
            self._num_ends = self._agent.on_connected(self.peer)
            self.server.make_room_for(self)
            self.connection.decoder.accept = _SERVER_ACCEPTS
            self.reader.on_frame = self._on_frame
            self.reader.is_lingered_on = self.lane == "calls"
        self._is_welcome = handshake.is_open  # before the caller knows: another thread may read its end at once
        try:
            self.connection.send(answer, deadline=deadline)
        except TimeoutError:
            self.reader.end(ConnectionClosed("the caller does not read"))
        except TransportError:
            self._is_welcome = False  # it gave up meanwhile, and is not dead for that
            raise

    def _on_frame(self, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, Goodbye):
            self._goodbye = failures.clean(message.reason, _MAX_REASON_BYTES)
            return
        if not isinstance(message, Call):  # decoded together with the end of the handshake, when it was still allowed
            raise DecodeError(f"a {type(message).__name__} message after the handshake")
        if message.call_id == NOTICE_ID:
            self._agent.notices.received(self.info, frame)
            return
        if message.call_id in self.requests:
            raise DecodeError(f"call {message.call_id} came again while it is under way")
        self.reader.is_lingered_on = self.lane == "calls"  # a call is often followed by the next
        request = Request(self, message.call_id, message.function, message.timeout_s, frame)
        request.notes = message.notes
        self.last_call_id = max(self.last_call_id, message.call_id)
        self.requests[message.call_id] = request
        if self.cancelled and message.call_id in self.cancelled:  # its cancellation came first: the lanes race
            self.requests.pop(message.call_id, None)  # the connection may be ending
        elif frame.shortage:
            text = f"worker {self._agent.info.name} has no memory for the arguments of {message.function}: {frame.shortage}"
            self.fail(request, ResourceExhausted(text))
        elif len(self.requests) > self._max_in_flight and self._has_too_many():
            text = f"more than {self._max_in_flight} calls in flight from one worker"
            self.fail(request, LimitExceeded(text))
        elif self.lane == "control":
            self.server.run_control(request)
        else:
            self.server.accept(request)

    def _has_too_many(self) -> bool:
        # The caller no longer counts what it gave up, though it may still run here; there is an end to that, too.
        requests = list(self.requests.values())
        num_wanted = sum(not item.is_dropped for item in requests)
        return num_wanted > self._max_in_flight or len(requests) > _MAX_GIVEN_UP * self._max_in_flight

    def note_cancelled(self, call_id: int) -> None:
        """The caller gave this call up, which may still be on its way; as many are kept as may be in flight."""
        self.cancelled[call_id] = None
        if len(self.cancelled) > self._max_in_flight:
            self.cancelled.pop(next(iter(self.cancelled)), None)

    def _on_end(self, error: Exception) -> None:
        self.server.forget(self)
        for request in list(self.requests.values()):
            self.server.drop(request)
        self.requests.clear()
        if self.peer is None:
            return
        self._agent.liveness.connection_ended(self.peer)
        if isinstance(error, ConnectionClosed):
            return
        if isinstance(error, DecodeError):
            _log.warning("%s closed a connection from %s: %s", self._agent.info.name, self.info.name, error)
            self._agent.notices.lane_ended(self.info.name)
        elif self._goodbye is not None and self._goodbye != "shutdown":
            _log.info("%s: %s closed a connection: %s", self._agent.info.name, self.info.name, self._goodbye)
        elif self.lane == "control" and self._is_welcome:
            reason = "it has shut down" if self._goodbye else "it died or was killed (its connection ended)"
            was_orderly = self._goodbye is not None
            self._agent.on_worker_ended(self.peer, reason, was_orderly=was_orderly, num_ends=self._num_ends)

    # -- what a request needs of its source -----------------------------------------------------------------------

    def load(self, request: Request) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The function and its arguments."""
        frame, request.frame = request.frame, None
        return self._agent.codec.load_call(frame, frame.message, self.info)

    def reply(self, request: Request, value: Any) -> None:
        """Sends a result, unless nobody wants it any more."""
        codec = self._agent.codec
        packed = codec.pack(value, self.info.name, self.shares_main)
        trip = packed.trip
        if self.requests.pop(request.call_id, None) is None or request.is_dropped:
            if trip is not None:
                trip.on_not_sent()
            return
        request.phase = "reply"
        message = Reply(request.call_id, packed.codec, len(packed.body))
        if request.notes:
            envelope = Envelope("reply", self.info, request.function)
            try:
                message.notes = codec.outgoing_notes(envelope, packed, request.notes)
            except BaseException as error:
                self._fail_instead(request, packed, error)
                return
        try:
            # While more requests lie here already, small replies wait for each other and leave together.
            hold_back = self.reader.has_more()
            self.connection.send(message, packed.body, packed.tensors, self._reply_deadline(request), hold_back)
            if hold_back and not self.reader.has_more():  # taken over meanwhile, maybe flushed before this reply
                self.connection.flush()
        except (LimitExceeded, TypeError) as error:  # nothing was sent yet
            self._fail_instead(request, packed, error)
        except (TransportError, TimeoutError) as error:
            self._on_not_sent("a reply", error)
        except Exception as error:  # a tensor that cannot be read, say
            if self.connection.is_closed:  # part of it may be out
                self._on_not_sent("a reply", error)
            else:
                self._fail_instead(request, packed, error)
        except BaseException:  # Ctrl-C: all of it may be out, and what comes after it does no harm
            self.requests[request.call_id] = request
            raise

    def _fail_instead(self, request: Request, packed: Packed, error: BaseException) -> None:
        """Nothing of a reply was sent: says why."""
        if packed.trip is not None:
            packed.trip.on_not_sent()
        self.requests[request.call_id] = request
        self.fail(request, error)

    def fail(self, request: Request, error: BaseException) -> None:
        """Sends an error, unless nobody wants it any more."""
        if self.requests.pop(request.call_id, None) is None or request.is_dropped:
            return
        request.phase = "reply"
        described = failures.describe_exception(error, self._agent.info.name, self._agent.config.limits)
        try:
            self.connection.send(Failure(request.call_id, described), deadline=self._reply_deadline(request))
        except (TransportError, TimeoutError) as problem:
            self._on_not_sent("an error", problem)

    def _on_not_sent(self, what: str, error: BaseException) -> None:
        _log.info("%s could not send %s to %s: %s", self._agent.info.name, what, self.info.name, error)
        if self.connection.is_closed:  # half of it is out, and the descriptor's number may be another's soon
            self.reader.end(ConnectionClosed("a message was cut off"))

    @staticmethod
    def _reply_deadline(request: Request) -> float:
        now = time.monotonic()
        return min(max(request.deadline, now + _LATE_S), now + _REPLY_S)


class LocalSource:
    """Takes the place of an incoming connection for calls to oneself."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.calls = CallTable()
        self.requests: dict[int, Request] = {}

    @property
    def server(self) -> Server:
        """Who runs the calls."""
        return self._agent.server

    @property
    def info(self) -> WorkerInfo:
        """Who calls."""
        return self._agent.info

    def start(
        self, call: PendingCall, function: str, packed: objects.Packed, notes: dict[str, Any] | None = None
    ) -> None:
        """Queues a call to oneself."""
        found = self._agent.codec.outgoing_notes(Envelope("call", self.info, call.function), packed)
        captured = objects.Packed(packed.codec, packed.body, self._copies(packed.tensors), packed.trip)
        timeout_s = max(0.0, call.deadline - call.started) if call.deadline < float("inf") else 0.0
        request = Request(self, call.call_id, call.function, timeout_s, (function, captured))
        request.notes = {**found, **notes} if notes is not None else found
        self.requests[call.call_id] = request
        self.calls.add(call)
        if self._agent.is_closed:  # `close` may have looked for calls before this one was listed
            self.requests.pop(call.call_id, None)
            self.close()
            return
        self._agent.reactor.expect(call.deadline)
        self._agent.server.accept_elsewhere(request)

    def load(self, request: Request) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The function and its arguments."""
        codec = self._agent.codec
        (name, packed), request.frame = request.frame, None
        function = codec.find(name)
        values = codec.incoming(Envelope("call", self.info, request.function), request.notes, packed.tensors)
        return codec.split_call(function, codec.unpack(packed.codec, packed.body, values, self.info.name))

    def reply(self, request: Request, value: Any) -> None:
        """Ends the call with a copy of the result."""
        codec = self._agent.codec
        packed = codec.pack(value, self.info.name, shares_main=True)
        envelope = Envelope("reply", self.info, request.function)
        notes = codec.outgoing_notes(envelope, packed, request.notes)
        values = codec.incoming(envelope, notes, self._copies(packed.tensors))
        self._finish(request, codec.unpack(packed.codec, packed.body, values, self.info.name), None)

    def fail(self, request: Request, error: BaseException) -> None:
        """Ends the call with the error, in the form in which others would get it."""
        agent = self._agent
        info = failures.describe_exception(error, agent.info.name, agent.config.limits)
        self._finish(request, None, failures.rebuild_exception(info, agent.trust))

    def _finish(self, request: Request, value: Any, error: Exception | None) -> None:
        self.requests.pop(request.call_id, None)
        request.phase = "reply"
        call = self.calls.pop(request.call_id, None)
        if call is not None:
            self._agent.caller.finish_surely(call, value, error)

    def cancel(self, call_id: int) -> str:
        """Drops a call; returns how far it got."""
        request = self.requests.get(call_id)
        if request is None:
            return "reply"
        phase = self._agent.server.drop(request)
        if phase == "queue":
            self.requests.pop(call_id, None)
        return phase

    def _copies(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        for value in values:
            tensors.describe(value, self._agent.config.limits)  # refuses what could not travel to others either
        return [_copy(value) for value in values]

    def close(self) -> None:
        """Fails whatever is still under way."""
        name = self.info.name
        self._agent.caller.fail_all(
            self.calls, lambda call: WorkerLost(f"call of {call.function} failed: {name} has shut down", name)
        )


def _copy(value: torch.Tensor) -> torch.Tensor:
    copy = value.detach().clone()
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(copy, requires_grad=value.requires_grad)
    return copy.requires_grad_(value.requires_grad)
