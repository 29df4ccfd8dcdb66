"""A connection between two workers: the calls made over it, or the requests served on it.

    opened here    Connection.calls     --Call-->  <--Reply, Failure--   `Client` makes and ends them
    opened there   Connection.requests  <--Call--  --Reply, Failure-->   `Server` runs them
    loopback       both: a worker that calls itself

A connection that another worker opened is half open until its handshake is complete. Two lanes lead from one worker to
another: ``calls`` for user functions, ``control`` for everything that must never wait behind them.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch

from gradwire import _interrupts
from gradwire.errors import (
    AuthenticationFailed,
    ConnectionClosed,
    ConnectionLost,
    DecodeError,
    IdentityTaken,
    LimitExceeded,
    ResourceExhausted,
    RpcError,
    RpcTimeout,
    TransportError,
    WorkerLost,
)
from gradwire.observe import events
from gradwire.observe.log import get_logger
from gradwire.rpc.call_events import tell_packed, tell_replied
from gradwire.rpc.oneway import NOTICE_ID
from gradwire.rpc.pending_calls import CallTable, PendingCall
from gradwire.rpc.reader import Reader, Until, current, release_hold
from gradwire.transports.handshake import LISTENER_ACCEPTS, ListenerHandshake
from gradwire.transports.stream import StreamConnection, start_copies
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.wire import exceptions, tensors
from gradwire.wire.devices import DeviceMap, DeviceNames
from gradwire.wire.framing import Frame
from gradwire.wire.messages import Call, Challenge, Failure, Goodbye, Message, Refused, Reply, Welcome
from gradwire.wire.serialization import Packed

if TYPE_CHECKING:
    from gradwire.rpc.agent import Agent
    from gradwire.rpc.peers import Peer


_log = get_logger(__name__)
_CALLER_ACCEPTS: frozenset[type[Message]] = frozenset({Reply, Failure, Goodbye})
_SERVER_ACCEPTS: frozenset[type[Message]] = frozenset({Call, Goodbye})
_NEVER = float("inf")
_REPLY_S = 60.0  # for a caller that set no deadline and does not read its reply
_MAX_REASON_BYTES = 1024
_MAX_GIVEN_UP = 8  # cancelled calls of one worker that still run here, for each that it may have in flight
_MAX_CONTROL = 1024  # operations of one worker that wait for others; callers do not count them, unlike calls
_LATE_S = 5.0  # a partly sent reply may finish after the deadline: interrupting it would close the connection
_ROOM_LOOK_S = 0.01


class Held(Protocol):
    """Something that a function must not keep while it waits for something else."""

    def let_go(self) -> None:
        """Give it up; called before the function waits."""

    def take_back(self) -> None:
        """Acquire it again when the function resumes. Must not raise."""


class Request(msgspec.Struct, eq=False):
    """One call being served.

    Attributes:
        function: The function's name; a readable description if the function was sent by value.
        frame: The received frame; None once it is unpacked.
        notes: Notes attached by interceptors.
        deadline: In `time.monotonic` seconds; inherited by the calls that the function makes.
        arrived: When it arrived, likewise.
        started: When its function began; 0.0 before that.
        phase: ``queue``, ``run`` or ``reply``.
        is_dropped: Whether its caller no longer waits for the result.
        waits_for: The call that the function itself is waiting for, if any.
        held: A resource that a layer above holds while the function runs, but not while it waits; or None.
        received_ns: When it arrived, in `time.monotonic_ns`; 0 if nothing was observed then.
    """

    source: Connection
    call_id: int
    function: str
    frame: Frame | None
    notes: dict[str, Any]
    deadline: float
    arrived: float = 0.0
    started: float = 0.0
    phase: str = "queue"
    is_dropped: bool = False
    waits_for: PendingCall | None = None
    held: Held | None = None
    received_ns: int = 0


_NOTHING = contextlib.nullcontext()


def current_request() -> Request | None:
    return current.request


def while_waiting() -> contextlib.AbstractContextManager[object]:
    """Release the slot and the reader around a wait that may take long."""
    request = current.request
    if request is not None:
        return request.source.server.waiting()
    release_hold()
    return _NOTHING


class Connection:
    """One connection with another worker, or of a worker with itself.

    Args:
        agent: This worker.
        stream: Sends and receives the frames.

    Attributes:
        address: The worker at the other end; not set during a handshake or for loopback.
        info: Its name and rank; not set during a handshake.
        lane: ``calls`` or ``control``; empty in a handshake.
        peer: The other worker, if this one opened the connection.
        calls: Calls made over it that have not completed.
        requests: Requests served on it that have not been answered.
        cancelled: Calls that were cancelled before they arrived here, the latest last.
        shares_main: Whether both workers run the same script.
        is_on_this_machine: Whether written data will be read even if the connection closes right after.
        max_in_flight: Maximum number of calls in progress on it.
        num_waiting_for_room: Threads that wait for the number of calls in progress to drop.
        reader: Reads the stream; None for loopback.
        num_ends: How many ends of the other worker had been noticed here when the connection was opened.
        devices: Names of the devices of tensors in calls and results, here and on the peer; None if they are the same.
    """

    address: WorkerAddress
    info: WorkerInfo

    def __init__(self, agent: Agent, stream: StreamConnection | LoopbackStream) -> None:
        self.agent = agent
        self.server = agent.server
        self.stream: Any = stream
        self.lane = ""
        self.peer: Peer | None = None
        self.calls = CallTable()
        self.unpacking: set[int] = set()  # ids of calls whose answer is being unpacked; single operations only
        self.requests: dict[int, Request] = {}
        self.cancelled: dict[int, None] = {}
        self.last_call_id = 0
        self.opened = time.monotonic()
        self.shares_main = False
        self.is_on_this_machine = False
        self.num_waiting_for_room = 0
        self._room = threading.Event()  # set when a call ends while threads wait for room
        self.max_in_flight = agent.config.limits.calls_in_flight
        self._handshake: ListenerHandshake | None = None
        self._is_welcome = (
            True  # the peer knows that the connection is open; a peer that closed it before that is not dead
        )
        self._goodbye: str | None = None
        self.num_ends = 0
        self.reader: Any = None
        self.devices: DeviceMap | None = None

    def __repr__(self) -> str:
        who = self.info.name if self.lane else "an unknown worker"
        return (
            f"<Connection {self.lane or 'half-open'} {'to' if self.peer else 'from'} {who}, {len(self.calls)} calls, "
            f"{len(self.requests)} requests>"
        )

    @classmethod
    def opened_here(cls, peer: Peer, stream: StreamConnection, lane: str, address: WorkerAddress) -> Connection:
        """Make the connection of a handshake that this worker began; to be started with ``reader.start()``."""
        agent = peer.agent
        made = cls(agent, stream)
        made.peer = peer
        made.devices = agent.device_maps.get(peer.name)
        stream.decoder.accept = _CALLER_ACCEPTS
        wants_reading = made.calls.__len__ if lane == "calls" else None
        made.reader = made.calls.reader = Reader(stream, agent.reactor, made._on_answer, made._on_end, wants_reading)
        made._open(lane, address)
        return made

    @classmethod
    def opened_there(cls, agent: Agent, stream: StreamConnection) -> Connection:
        """Make a connection whose handshake the other worker starts."""
        made = cls(agent, stream)
        made._handshake = ListenerHandshake(agent.identity, agent.admit)
        made._is_welcome = False
        stream.decoder.accept = LISTENER_ACCEPTS
        made.reader = Reader(stream, agent.reactor, made._on_handshake, made._on_end)
        return made

    @classmethod
    def loopback(cls, agent: Agent) -> Connection:
        made = cls(agent, LoopbackStream(agent))
        made.stream.connection = made
        made.info, made.lane, made.shares_main = agent.info, "calls", True
        made.max_in_flight = sys.maxsize
        made.devices = agent.device_maps.get(agent.info.name)
        return made

    @property
    def is_half_open(self) -> bool:
        return self._handshake is not None

    def _open(self, lane: str, address: WorkerAddress) -> None:
        self.address, self.info, self.lane = address, address.info, lane
        self.shares_main = self.agent.address.shares_main(address)
        self.reader.is_lingered_on = lane == "calls"
        try:
            self.num_ends = self.agent.on_connected(address)
        except AuthenticationFailed:
            self.lane = ""  # it was never open
            raise
        self.agent.traffic.on_opened(self)
        if events.sink is not None:
            self._tell_event("open")

    def _tell_event(self, name: str, outcome: str = "ok") -> None:
        details = {"lane": self.lane, "opened_by": "this worker" if self.peer is not None else "the peer"}
        details["transport"] = self.stream.label.partition(":")[0]
        events.tell_now("connection", name, self.agent.info.name, peer=self.info.name, outcome=outcome, details=details)

    def _on_handshake(self, frame: Frame) -> None:
        handshake = self._handshake
        assert handshake is not None
        if isinstance(frame.message, Goodbye):  # the caller gave up, because of a deadline for example
            self.reader.end(ConnectionClosed(frame.message.reason))
            return
        deadline = time.monotonic() + 1.0
        try:
            answer: Challenge | Welcome = handshake.on_message(frame.message, self.stream.channel.certified_names())
            if handshake.is_open:
                self.agent.catch_up(handshake.hello.sender, handshake.num_ends)
                self._open(handshake.hello.lane, handshake.hello.sender)
                answer = Welcome(self.num_ends)
        except AuthenticationFailed as error:
            with contextlib.suppress(TransportError, TimeoutError):
                refusal = Refused(str(error), isinstance(error, IdentityTaken))
                self.stream.send(refusal, deadline=deadline)
            _log.warning("%s refused a connection: %s", self.agent.info.name, error)
            self.reader.end(error)
            return
        if handshake.is_open:
            self._handshake = None
            if handshake.hello.lane == "control":
                self.max_in_flight = _MAX_CONTROL
            self.server.make_room_for(self)
            self.stream.decoder.accept = _SERVER_ACCEPTS
            self.reader.on_frame = self._on_request
        self._is_welcome = handshake.is_open  # before the caller is told: another thread may read its end at once
        self.reader.allow_take_over()
        try:
            self.stream.send(answer, deadline=deadline)
        except TimeoutError:
            self.reader.end(ConnectionClosed("the caller is not reading replies"))
        except TransportError:
            self._is_welcome = False  # it abandoned the connection in the meantime, which does not mean that it died
            raise

    def _on_answer(self, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, Goodbye):
            self._goodbye = exceptions.clean(message.reason, _MAX_REASON_BYTES)
            return
        assert isinstance(message, Reply | Failure)
        self.unpacking.add(message.call_id)  # first: the call must always be in one of the two
        call = self.calls.pop(message.call_id, None)
        if call is None:
            self.unpacking.discard(message.call_id)
            return  # cancelled or timed out here; the answer is late
        if self.reader is not None:
            self.reader.allow_take_over()
        agent, value, error = self.agent, None, None
        if call.future is not None:
            agent.client.completing.add(call)
        if self.peer is not None:
            self.peer.last_seen = time.time()
        trace = call.trace
        began_ns = time.monotonic_ns() if trace is not None else 0
        try:
            if isinstance(message, Failure):
                error = exceptions.rebuild_exception(message.error, agent.trust)
            elif frame.shortage:
                text = f"this worker is out of memory for the result of {call.function} on worker {call.worker}"
                error = ResourceExhausted(f"{text}: {frame.shortage}")
            else:
                devices = None if self.devices is None else self.devices.here
                arrived: list[torch.Tensor] = []
                value = agent.codec.load(frame, message, self.info, call.function, devices, arrived)
                if arrived:
                    call.on_device = arrived
        except Exception as problem:  # the result cannot be rebuilt here
            error = problem
        except BaseException as problem:  # raised by a class of the user, which the result is unpickled with
            error = RpcError(
                f"the result of {call.function} from worker {call.worker} could not be rebuilt: unpickling it raised "
                f"{type(problem).__name__}"
            )
        self.unpacking.discard(message.call_id)
        if trace is not None:
            trace.tell_loaded(message, began_ns)
        agent.client.finish(call, value, error)
        if self.num_waiting_for_room:
            self._room.set()

    def wait_for_room(self, call: PendingCall) -> None:
        goal = Until(lambda: len(self.calls) < self.max_in_flight)
        self.num_waiting_for_room += 1
        try:
            while not goal.is_over:
                left = call.deadline - time.monotonic()
                if left <= 0:
                    raise RpcTimeout(call.timeout_text("send", time.monotonic()), call.worker, "send")
                if not self.reader.read_until(goal, call.deadline):
                    self._room.clear()
                    if not goal.is_over:
                        _interrupts.wait(self._room, min(left, _ROOM_LOOK_S))
        finally:
            self.num_waiting_for_room -= 1

    def _on_request(self, frame: Frame) -> None:
        message = frame.message
        if not isinstance(message, Call):
            if isinstance(message, Goodbye):
                self._goodbye = exceptions.clean(message.reason, _MAX_REASON_BYTES)
                return
            # Decoded together with the last message of the handshake, when it was still allowed.
            raise DecodeError(f"a {type(message).__name__} message is not allowed after the handshake")
        if message.call_id == NOTICE_ID:
            self.reader.allow_take_over()
            self.agent.notices.received(self.info, frame)
            return
        request, refusal = self.admit(frame, message)
        self.reader.allow_take_over()
        if request is None:
            return
        if refusal is not None:
            self.fail(request, refusal)
        elif self.lane == "control":
            self.server.run_control(request)
        else:
            self.server.run(request)

    def admit(self, frame: Frame, message: Call) -> tuple[Request | None, TransportError | None]:
        """List a request, which gets a slot if one is free.

        Called by one thread at a time, in the order in which calls arrive: a later one must not get the slot.

        Returns:
            The request, if it is to be handled now, and why it is refused, if it is. None if it is queued or cancelled.
        """
        call_id, requests = message.call_id, self.requests
        if call_id in requests:
            raise DecodeError(f"call {call_id} was received again while in progress")
        now = time.monotonic()
        deadline = now + message.timeout_s if message.timeout_s > 0 else _NEVER
        requests[call_id] = request = Request(self, call_id, message.function, frame, message.notes, deadline, now)
        if call_id > self.last_call_id:
            self.last_call_id = call_id
        if self.cancelled and call_id in self.cancelled:  # its cancellation arrived first: the lanes race
            requests.pop(call_id, None)  # the connection may be ending
            return None, None
        if frame.shortage:
            text = (
                f"worker {self.agent.info.name} is out of memory for the arguments of {message.function}: "
                f"{frame.shortage}"
            )
            return request, ResourceExhausted(text)
        if len(requests) > self.max_in_flight and self._has_too_many():
            text = (
                f"worker {self.agent.info.name} refused a call: worker {self.info.name} has more than {self.max_in_flight} "
                f"calls in flight on this connection ({message.function or 'a function sent by value'}); wait for earlier "
                "calls"
            )
            return request, LimitExceeded(text)
        if self.lane == "control":
            return request, None
        if self.reader is not None:
            self.reader.is_lingered_on = True  # a call is often followed by the next
        if events.sink is not None:
            request.received_ns = time.monotonic_ns()
        return (request if self.server.admit(request) else None), None

    def _has_too_many(self) -> bool:
        # The caller no longer counts cancelled calls, although they may still run here; their number is limited as well.
        requests = list(self.requests.values())
        num_wanted = sum(not item.is_dropped for item in requests)
        return num_wanted > self.max_in_flight or len(requests) > _MAX_GIVEN_UP * self.max_in_flight

    def cancel(self, call_id: int) -> str:
        """Drop a request on its caller's behalf, which may still be on its way; return how far it got."""
        # Recorded before the lookup, and looked up after a request is listed: one of the two sees the other.
        self.cancelled[call_id] = None
        if len(self.cancelled) > self.agent.config.limits.calls_in_flight:
            self.cancelled.pop(next(iter(self.cancelled)), None)
        request = self.requests.get(call_id)
        if request is None:
            return "reply" if call_id <= self.last_call_id else "send"
        phase = self.server.drop(request)
        if phase in ("queue", "held"):
            self.requests.pop(call_id, None)
        return phase

    def reply(self, request: Request, value: Any) -> None:
        """Send a result, unless the caller no longer waits for it."""
        codec = self.agent.codec
        began_ns = time.monotonic_ns() if events.sink is not None and self.lane == "calls" else 0
        packed = codec.pack(value, self.info.name, self.shares_main)
        if began_ns:
            tell_packed(request, began_ns, len(packed.body))
        if self.requests.pop(request.call_id, None) is None or request.is_dropped:
            if packed.transfer is not None:
                packed.transfer.on_not_sent()
            return
        request.phase = "reply"
        message = Reply(request.call_id, packed.codec, len(packed.body))
        stream, reader, now = self.stream, self.reader, time.monotonic()
        deadline = min(max(request.deadline, now + _LATE_S), now + _REPLY_S)
        if request.notes:
            try:
                codec.attach_to_reply(message.notes, self.info, request.function, packed, request.notes)
            except Exception as error:
                self._fail_instead(request, packed, error)
                return
        if began_ns:
            began_ns = time.monotonic_ns()
        try:
            # While more requests lie here already, small replies wait for each other and leave together.
            if reader is not None and reader.inbox and reader.has_more():
                stream.send(message, packed.body, packed.tensors, deadline, True)
                reader.must_flush = True
                if not reader.has_more():  # taken over in the meantime, possibly flushed before this reply
                    stream.flush()
            else:
                stream.send(message, packed.body, packed.tensors, deadline)
            if began_ns:
                tell_replied(request, message, began_ns)
        except (LimitExceeded, TypeError) as error:  # nothing was sent yet
            self._fail_instead(request, packed, error)
        except (TransportError, TimeoutError) as error:
            self._on_not_sent("a reply", error)
        except Exception as error:  # such as a tensor that cannot be read
            if stream.is_closed:  # part of it may be out
                self._on_not_sent("a reply", error)
            else:
                self._fail_instead(request, packed, error)

    def _fail_instead(self, request: Request, packed: Packed, error: Exception) -> None:
        """Send an error in place of a reply of which nothing was sent."""
        if packed.transfer is not None:
            packed.transfer.on_not_sent()
        self.requests[request.call_id] = request
        self.fail(request, error)

    def fail(self, request: Request, error: BaseException) -> None:
        """Send an error, unless the caller no longer waits for it."""
        if self.requests.pop(request.call_id, None) is None or request.is_dropped:
            return
        request.phase = "reply"
        began_ns = time.monotonic_ns() if events.sink is not None and self.lane == "calls" else 0
        described = exceptions.describe_exception(error, self.agent.info.name, self.agent.config.limits)
        message = Failure(request.call_id, described)
        now = time.monotonic()
        deadline = min(max(request.deadline, now + _LATE_S), now + _REPLY_S)
        try:
            self.stream.send(message, deadline=deadline)
            if began_ns:
                tell_replied(request, message, began_ns)
        except (TransportError, TimeoutError) as problem:
            self._on_not_sent("an error", problem)

    def _on_not_sent(self, what: str, error: BaseException) -> None:
        _log.info("%s could not send %s to %s: %s", self.agent.info.name, what, self.info.name, error)
        if self.stream.is_closed:  # half of it is out, and the descriptor's number may be another's soon
            self.end(ConnectionClosed("a message was interrupted while being sent"))

    def end(self, error: Exception) -> None:
        """Close the connection and fail the calls in progress on it. Idempotent."""
        if self.reader is not None:
            self.reader.end(error)
            if self.peer is not None:
                self.peer.forget_lane(self)  # the thread that ends it may not have done so yet
        else:
            self.stream.close()
            self._drop_requests()
            self.fail_calls(f"{self.info.name} has shut down")

    def end_when_read(self, error: ConnectionLost, deadline: float = _NEVER) -> None:
        """Close it once the replies and the goodbye that the peer sent have been read."""
        self.reader.end_when_read(error, deadline)
        self.end(error)

    def fail_calls(self, reason: str) -> None:
        for call in list(self.calls.values()):
            if self.calls.pop(call.call_id, None) is not None:
                lost = self.peer.lost(reason, call) if self.peer is not None else None
                text = f"{call.what} failed: {reason}"
                self.agent.client.finish(call, None, lost or WorkerLost(text, self.info.name))
        self._room.set()

    def _drop_requests(self) -> None:
        for request in list(self.requests.values()):
            self.server.drop(request)
        self.requests.clear()

    def _on_end(self, error: Exception) -> None:
        """Fail the calls in progress when the reader has ended, and find out whether the other worker is dead."""
        agent, goodbye = self.agent, self._goodbye
        if self.peer is not None:
            self.peer.forget_lane(self)
        else:
            self.server.incoming.discard(self)
        self._drop_requests()
        agent.traffic.on_ended(self)
        if not self.lane:
            if isinstance(error, DecodeError):
                _log.warning("%s refused a connection: %s", agent.info.name, error)
            return
        if events.sink is not None:
            is_orderly = isinstance(error, ConnectionClosed) or goodbye is not None
            self._tell_event("end", "ok" if is_orderly else type(error).__name__)
        address, name = self.address, self.info.name
        if isinstance(error, ConnectionClosed):
            reason, is_cut = "this worker closed the connection", self.peer is not None
        elif isinstance(error, DecodeError):
            reason, is_cut = f"it sent an invalid message ({error}); only this connection was closed", True
            if self.peer is None:
                _log.warning("%s closed a connection from %s: %s", agent.info.name, name, error)
        elif goodbye is not None and goodbye != "shutdown":
            reason, is_cut = f"it closed the connection: {goodbye}", self.peer is not None
            if self.peer is None:
                _log.info("%s: worker %s closed its connection: %s", agent.info.name, name, goodbye)
        else:
            ended = "connection closed unexpectedly (the process died or was killed, or the network failed)"
            reason = "it has shut down" if goodbye else ended
            is_cut = False
            # A worker that dies loses both lanes; one that abandons a reply loses only the other.
            if self.lane == "control" and self._is_welcome:
                agent.on_worker_ended(address, reason, was_orderly=goodbye is not None, num_ends=self.num_ends)
        self.fail_calls(reason)
        if is_cut:
            agent.notices.lane_ended(name)
        agent.liveness.connection_ended(address)

    def say_goodbye(self, reason: str, timeout_s: float = 0.0) -> None:
        """Send the reason for closing the connection, if that is possible without blocking."""
        with contextlib.suppress(TransportError, TimeoutError, OSError):
            self.stream.send(Goodbye(reason), deadline=time.monotonic() + timeout_s)


class LoopbackStream:
    """Stream for calls of a worker to itself: a sent frame arrives as a copy. Calls get slots in the order of `send`.

    Attributes:
        connection: The connection that is both ends.
    """

    connection: Connection

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._arrived: collections.deque[tuple[Frame, Call]] = collections.deque()
        self._lock = threading.Lock()  # makes the order of admission that of arrival
        self.is_closed = False

    def send(
        self,
        message: Call | Reply | Failure,
        body: bytes = b"",
        values: Sequence[torch.Tensor] = (),
        deadline: float | None = None,
        hold_back: bool = False,
        devices: DeviceNames | None = None,
    ) -> None:
        """Hand a frame over: the function of a call runs in a service thread, answers are handled in this one."""
        if self.is_closed:
            raise ConnectionClosed("this worker has shut down")
        buffers: list[bytearray] = []
        if values:
            assert not isinstance(message, Failure)
            metas, views, copies = [], [], None  # each view with the tensor that keeps its memory alive
            for value in values:
                meta, parts = tensors.describe(value, self._agent.config.limits, devices)
                metas.append(meta)
                for part in parts:
                    if part.is_cpu:
                        views.append(tensors.as_bytes(part))
                    else:
                        copies = copies or start_copies()
                        views.append(copies.launch_bytes(part))
            if copies is not None:
                copies.wait(deadline)
            buffers = [bytearray(view) for view, _ in views]
            message.tensors = tuple(metas)
        frame = Frame(message, body, buffers)
        if isinstance(message, Call):
            self._arrived.append((frame, message))
            self._agent.reactor.run_soon(self._deliver)
        else:
            self.connection._on_answer(frame)

    def _deliver(self) -> None:
        # In a service thread: a caller must not wait for locks, as it may be a finalizer, nor be interrupted with a slot.
        server, admitted = self._agent.server, []
        with self._lock:
            while self._arrived:  # those of other threads, too
                frame, message = self._arrived.popleft()
                request = None if self.is_closed else self.connection.admit(frame, message)[0]
                if request is not None:
                    admitted.append(request)
        for request in admitted[1:]:
            server.run_soon(request)
        if admitted:
            server.run(admitted[0])

    def close(self) -> None:
        self.is_closed = True
