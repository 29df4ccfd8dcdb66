"""One worker: makes calls, serves calls, notices who is gone.

The agent is the thin driver: `_calls` and `_slots` decide, `reactor` and `reader` lend the threads, `peers` and `serving`
are its two halves, and this module is where they meet.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gradwire.config import WorkerConfig
from gradwire.errors import (
    CallCancelled,
    ConnectionClosed,
    ConnectionLost,
    NotInitialized,
    RpcError,
    RpcTimeout,
    TransportError,
    WorkerLost,
)
from gradwire.rpc._calls import PendingCall, new_call_id
from gradwire.rpc.codec import Codec, describe_function
from gradwire.rpc.collectives import Gathering
from gradwire.rpc.directory import Directory
from gradwire.rpc.futures import CallFuture
from gradwire.rpc.interceptors import Envelope, Interceptor
from gradwire.rpc.local import LocalSource
from gradwire.rpc.peers import OpenLane, Peer
from gradwire.rpc.reactor import Reactor
from gradwire.rpc.serving import Server, current_request, is_serving
from gradwire.transports.base import Listener, Transport
from gradwire.transports.handshake import Identity
from gradwire.transports.stream import StreamConnection
from gradwire.types import Trust, WorkerAddress, WorkerInfo
from gradwire.wire.messages import Call, Goodbye

_log = logging.getLogger("gradwire")

_PHASE_GRACE_S = 0.25  # how long a callee may take to say how far a timed-out call got
_SWEEP_S = 1.0

To = str | int | WorkerInfo


@dataclass(frozen=True, slots=True)
class AgentStatistics:
    """A snapshot of one worker."""

    name: str
    rank: int
    incarnation: int
    num_calls_made: int
    num_calls_served: int
    num_pending: int
    num_running: int
    num_waiting: int
    num_queued: int
    num_threads: int
    num_connections: int
    bytes_sent: int
    bytes_received: int


class Agent:
    """One worker of a cluster; `gradwire.runtime.start_worker` builds it.

    Args:
        address: This worker, without its URIs, which `start` fills in.
        config: How it runs.
        trust: The cluster's trust level.
        directory: Who else is there.
        transports: By scheme.
        on_close: Called at the end, to remove what the worker left on disk.
    """

    def __init__(
        self,
        address: WorkerAddress,
        config: WorkerConfig,
        trust: Trust,
        directory: Directory,
        transports: dict[str, Transport],
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self.config = config
        self.trust: Trust = trust
        self.directory = directory
        self.transports = transports
        self.interceptors: list[Interceptor] = []
        self.codec = Codec(trust, config.limits, self.interceptors)
        self.reactor = Reactor(address.info.name, config.num_worker_threads, self._sweep)
        self.server = Server(self, config.num_worker_threads)
        self.default_timeout_s = config.rpc_timeout_s
        self._on_close = on_close
        self._listeners: list[Listener] = []
        self._peers: dict[str, Peer] = {}
        self._local = LocalSource(self)
        self._incarnations: dict[str, int] = {}
        self._ended: set[tuple[str, int]] = set()
        self._lost_callbacks: list[Callable[[WorkerAddress, str], None]] = []
        self._lock = threading.Lock()  # guards _peers, _incarnations, _ended and _is_closed
        self._is_closed = False
        self._closed = threading.Event()  # set when close() has ended
        self.num_calls_made = 0
        self.gathering = Gathering(self)
        self.server.register_control("cancel", self.server.cancel)

    def __repr__(self) -> str:
        return f"<Agent {self.info.name} rank {self.info.id} {'closed' if self._is_closed else 'open'}>"

    @property
    def info(self) -> WorkerInfo:
        """This worker's name and rank."""
        return self.address.info

    @property
    def identity(self) -> Identity:
        """What this worker says of itself in handshakes."""
        return Identity(address=self.address, trust=self.trust, token=self.config.token)

    @property
    def is_closed(self) -> bool:
        """Whether `close` has begun."""
        return self._is_closed

    def start(self) -> None:
        """Begins to listen and to serve.

        Raises:
            ConfigurationError: An address cannot be bound.
        """
        try:
            for transport in self.transports.values():
                self._listeners.append(transport.listen(self.info.name))
        except BaseException:
            for listener in self._listeners:
                listener.close()
            self.reactor.close()
            raise
        self.address = msgspec.structs.replace(self.address, uris=tuple(item.uri for item in self._listeners))
        self.directory.update(self.address)
        self.reactor.start()
        for listener in self._listeners:
            on_ready = functools.partial(self.server.on_listener_ready, listener)
            self.reactor.add(listener.fileno(), on_ready, armed=True)

    # -- making calls --------------------------------------------------------------------------------------------

    def call(
        self,
        to: To,
        function: Callable[..., Any] | str,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Runs a function on another worker and returns its result.

        Raises:
            CannotSend: An argument cannot travel.
            RpcTimeout: The deadline passed; `phase` says where.
            WorkerLost: The worker died or cannot be reached.
            Exception: Whatever the function raised.
        """
        pending = self._start(to, function, args, kwargs, timeout_s, None)
        if not pending.is_done:
            self.wait(pending)
        if pending.error is not None:
            raise pending.error
        return pending.value

    def submit(
        self,
        to: To,
        function: Callable[..., Any] | str,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> CallFuture[Any]:
        """Starts a call and returns its future. Arguments are captured: changing them later has no effect.

        Raises:
            CannotSend: An argument cannot travel.
            RpcTimeout: No connection, or no room on it, before the deadline.
            WorkerLost: The worker cannot be reached.
        """
        holder: list[PendingCall] = []
        future: CallFuture[Any] = CallFuture(lambda: self.wait(holder[0]), lambda: self.cancel(holder[0]))
        holder.append(self._start(to, function, args, kwargs, timeout_s, future))
        return future

    def _start(
        self,
        to: To,
        function: Callable[..., Any] | str,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout_s: float | None,
        future: CallFuture[Any] | None,
    ) -> PendingCall:
        if self._is_closed:
            raise NotInitialized(f"worker {self.info.name} has shut down; call init_rpc again")
        name = self._name_of(to)
        timeout_s = self.server.time_left(self.default_timeout_s if timeout_s is None else timeout_s)
        function_name, packed = self.codec.pack_call(function, args, kwargs or {})
        label = function_name or describe_function(function)
        call = PendingCall(new_call_id(), name, label, time.monotonic(), timeout_s)
        call.future = future
        self.num_calls_made += 1
        if name == self.info.name:
            self._local.start(call, function_name, packed)
            return call
        lane = self._room_on(self.peer(name), call)
        message = Call(call.call_id, function_name, timeout_s, packed.codec, len(packed.body))
        if self.interceptors:
            message.notes = self.codec.outgoing_notes(Envelope("call", lane.address.info, label), packed.tensors)
        self._send(lane, call, message, packed.body, packed.tensors)
        if future is not None:
            lane.reader.ensure_watched()
        return call

    def _send(self, lane: OpenLane, call: PendingCall, message: Call, body: bytes, values: Any) -> None:
        lane.calls.add(call)
        self.reactor.expect(call.deadline)
        try:
            lane.connection.send(message, body, values, call.deadline if call.deadline < float("inf") else None)
        except (ConnectionLost, ConnectionClosed) as error:
            lane.reader.end(error)
            lane.peer.forget_lane(lane)  # it may have ended in the middle of a Ctrl-C
            if lane.calls.pop(call.call_id) is not None:  # the lane had ended before the call was in its table
                self.finish(call, None, lane.peer.lost(str(error), call))
        except TimeoutError as error:
            self._give_up_sending(lane, call)
            raise RpcTimeout(call.timeout_text("send", time.monotonic()), call.worker, "send") from error
        except BaseException:
            self._give_up_sending(lane, call)
            raise

    def _give_up_sending(self, lane: OpenLane, call: PendingCall) -> None:
        lane.calls.pop(call.call_id)
        if lane.connection.is_closed:  # half of the message is out: the next call needs another connection
            lane.reader.end(ConnectionClosed("a message was cut off"))

    def _room_on(self, peer: Peer, call: PendingCall) -> OpenLane:
        """The calls lane, once it has room for one more call."""
        lane = peer.lanes.get("calls") or peer.lane("calls", call.deadline)
        limit = self.config.limits.calls_in_flight
        if len(lane.calls) < limit:
            return lane
        lane.num_waiting_for_room += 1
        try:
            with self.server.waiting():
                while len(lane.calls) >= limit:
                    left = call.deadline - time.monotonic()
                    if left <= 0:
                        raise RpcTimeout(call.timeout_text("send", time.monotonic()), call.worker, "send")
                    lane.room.clear()
                    if not lane.reader.read_until(lambda: len(lane.calls) < limit, call.deadline):
                        lane.room.wait(min(left, 0.01))
        finally:
            lane.num_waiting_for_room -= 1
        return lane

    def control(
        self, to: str, operation: str, args: tuple[Any, ...], timeout_s: float, on_done: Callable[[PendingCall], None]
    ) -> None:
        """Starts a control operation on another worker; `on_done` runs when it has ended, however it did.

        Raises:
            WorkerLost, RpcTimeout: It could not even be sent.
        """
        packed = self.codec.pack_control(args)
        call = PendingCall(new_call_id(), to, f"~{operation}", time.monotonic(), timeout_s)
        call.on_done = on_done
        lane = self.peer(to).lane("control", call.deadline)
        message = Call(call.call_id, call.function, timeout_s, packed.codec, len(packed.body))
        self._send(lane, call, message, packed.body, packed.tensors)

    # -- waiting, ending -----------------------------------------------------------------------------------------

    def wait(self, call: PendingCall) -> None:
        """Blocks until a call has ended; reads its answer in this thread if nobody else does."""
        if call.is_done:
            return
        if is_serving():
            with self.server.waiting(), self._waiting_inside(call):
                self._wait(call)
        else:
            self._wait(call)

    @contextlib.contextmanager
    def _waiting_inside(self, call: PendingCall) -> Iterator[None]:
        """A function that was called waits for a call of its own: whoever drops the one drops the other."""
        request = current_request()
        if request is None:
            yield
            return
        outer, request.waits_for = request.waits_for, call
        if request.is_dropped:
            self.cancel(call)
        try:
            yield
        finally:
            request.waits_for = outer

    def _wait(self, call: PendingCall) -> None:
        reader = call.table.reader if call.table is not None else None
        while not call.is_done:
            # Past the deadline the clock ends the call; until it has, look often.
            until = max(call.deadline, time.monotonic() + 0.005)
            if reader is None or not reader.read_until(lambda: call.is_done, until):
                self._wait_for_others(call, until)

    def _wait_for_others(self, call: PendingCall, until: float) -> None:
        """Another thread reads the connection; it will release the lock."""
        if call.waiter is None:
            lock = threading.Lock()  # released by the thread that finishes the call
            lock.acquire()
            call.waiter = lock
        if not call.is_done and call.waiter.acquire(timeout=max(0.0, min(0.2, until - time.monotonic()))):
            with contextlib.suppress(RuntimeError):
                call.waiter.release()  # somebody else may wait for the same call

    def finish(self, call: PendingCall, value: Any, error: Exception | None) -> None:
        """Ends a call; only for whoever took it out of its table."""
        call.value, call.error = value, error
        future = call.future
        if future is not None:
            # After the end no service thread is left, and a future that is never completed is worse than a callback here.
            if future.has_callbacks and not (self._is_closed or self.reactor.is_service_thread()):
                self.reactor.run_soon(lambda: self._complete(call, future))
                return
            self._complete(call, future)
            return
        call.is_done = True
        if call.waiter is not None:
            with contextlib.suppress(RuntimeError):
                call.waiter.release()
        if call.on_done is not None:
            call.on_done(call)

    def _complete(self, call: PendingCall, future: CallFuture[Any]) -> None:
        try:
            if call.error is not None:
                future.set_exception(call.error)
            else:
                future.set_result(call.value)
        except Exception:
            _log.exception("%s: a callback of %r failed", self.info.name, call)
        call.value = None  # the future holds it
        call.is_done = True
        if call.waiter is not None:
            with contextlib.suppress(RuntimeError):
                call.waiter.release()

    def cancel(self, call: PendingCall) -> bool:
        """Gives a call up; the callee is told to drop it."""
        if call.table is None or call.table.pop(call.call_id) is None:
            return False
        self._tell_to_drop(call, lambda phase: None)
        self.finish(call, None, CallCancelled(f"call of {call.function} on worker {call.worker} was cancelled here"))
        return True

    def _tell_to_drop(self, call: PendingCall, on_phase: Callable[[str], None]) -> None:
        """Tells the callee that nobody waits for the call any more; it says how far the call got."""
        if call.worker == self.info.name:
            on_phase(self._local.cancel(call.call_id))
            return

        def on_done(answer: PendingCall) -> None:
            on_phase(answer.value if answer.error is None else "unknown")

        try:
            self.control(call.worker, "cancel", (call.call_id,), _PHASE_GRACE_S, on_done)
        except (RpcError, TransportError):
            on_phase("unknown")

    # -- the clock's sweep -----------------------------------------------------------------------------------------

    def _sweep(self, now: float) -> float:
        wanted = self.server.sweep(now)
        tables = [self._local.calls]
        for peer in list(self._peers.values()):
            for lane in list(peer.lanes.values()):
                tables.append(lane.calls)
                if len(lane.calls) and lane.connection.is_vanished():
                    lane.reader.end(ConnectionLost("the other machine does not acknowledge anything"))
        for table in tables:
            expired, earliest = table.expire(now)
            for call in expired:
                self._expire(call)
            wanted = min(wanted, earliest)
            if len(table):
                wanted = min(wanted, now + _SWEEP_S)
        return min(wanted, self.gathering.sweep(now))

    def _expire(self, call: PendingCall) -> None:
        """The deadline of a call has passed: ask the callee how far it got, then end the call."""

        def end(phase: str) -> None:
            if call.table is not None and call.table.pop(call.call_id) is not None:
                now = time.monotonic()
                self.finish(call, None, RpcTimeout(call.timeout_text(phase, now), call.worker, phase))

        if call.function.startswith("~"):
            end("unknown")
        else:
            self._tell_to_drop(call, end)

    # -- who is there --------------------------------------------------------------------------------------------

    def _name_of(self, to: To) -> str:
        if isinstance(to, str):
            return to
        if isinstance(to, WorkerInfo):
            return to.name
        if isinstance(to, int):
            return self.directory.find(to).info.name
        name = getattr(to, "name", None)
        if isinstance(name, str):
            return name
        raise TypeError(f"a worker is named by its name, rank or WorkerInfo, not by {to!r}")

    def peer(self, name: str) -> Peer:
        """The other worker of that name.

        Raises:
            UnknownWorker: There is none.
        """
        peer = self._peers.get(name)
        if peer is None:
            self.directory.find(name)
            with self._lock:
                peer = self._peers.setdefault(name, Peer(self, name))
        return peer

    def worker_info(self, worker: To | None = None) -> WorkerInfo:
        """Name and rank of a worker; of this one if none is named.

        Raises:
            UnknownWorker: There is none.
        """
        if worker is None:
            return self.info
        return self.directory.find(worker if isinstance(worker, str | int) else self._name_of(worker)).info

    def is_current(self, address: WorkerAddress) -> bool:
        """Whether no newer incarnation of that worker has been seen."""
        return address.incarnation >= self._incarnations.get(address.info.name, 0)

    def on_connected(self, address: WorkerAddress) -> None:
        """We reached a worker; whatever was known of an earlier connection to it no longer counts."""
        with self._lock:
            self._ended.discard((address.info.name, address.incarnation))
        self._note(address)
        self.gathering.on_returned(address.info.name)

    def on_introduced(self, address: WorkerAddress) -> None:
        """A worker opened a connection to us; an older incarnation of it has no say any more."""
        with self._lock:
            self._ended.discard((address.info.name, address.incarnation))
        self._note(address)
        self.gathering.on_returned(address.info.name)

    def _note(self, address: WorkerAddress) -> None:
        name = address.info.name
        with self._lock:
            known = self._incarnations.get(name, 0)
            self._incarnations[name] = max(known, address.incarnation)
        self.directory.update(address)
        if known and known < address.incarnation:
            older = msgspec.structs.replace(address, incarnation=known)
            self.on_worker_ended(older, "it was restarted", was_orderly=False)

    def on_worker_ended(self, address: WorkerAddress, reason: str, *, was_orderly: bool) -> None:
        """A worker is gone: everything that waits for it fails, and the layers above are told, once."""
        name, key = address.info.name, (address.info.name, address.incarnation)
        with self._lock:
            if self._is_closed or key in self._ended:
                return
            self._ended.add(key)
        if not was_orderly:
            _log.info("%s lost worker %s: %s", self.info.name, name, reason)
        peer = self._peers.get(name)
        if peer is not None:
            peer.end_lanes(address.incarnation, reason)
        self.server.end_incoming(name, address.incarnation)
        for callback in list(self._lost_callbacks):
            callback(address, reason)

    def on_worker_lost(self, callback: Callable[[WorkerAddress, str], None]) -> None:
        """Asks to be told of every worker that dies or leaves, once for each incarnation."""
        self._lost_callbacks.append(callback)

    def forget(self, name: str, reason: str) -> None:
        """Whoever supervises the workers knows that one has ended, and how (``killed by SIGKILL``)."""
        peer = self.peer(name)
        peer.lost_reason = reason
        address = self.directory.find(name)
        incarnation = max(address.incarnation, self._incarnations.get(name, 0))
        self.on_worker_ended(msgspec.structs.replace(address, incarnation=incarnation), reason, was_orderly=False)
        peer.end_lanes(1 << 63, reason)

    # -- end -----------------------------------------------------------------------------------------------------

    def shutdown(self, graceful: bool = True, timeout_s: float = 0.0) -> None:
        """Leaves the cluster.

        Args:
            graceful: Wait until every worker has called `shutdown` and all calls have ended.
            timeout_s: How long to wait for that; 0 waits as long as the others live.

        Raises:
            RpcTimeout: Not everybody came in time; this worker has left all the same.
        """
        try:
            if graceful and not self._is_closed:
                self._wait_for_others_to_leave(time.monotonic() + timeout_s if timeout_s > 0 else float("inf"))
        finally:
            self.close()

    def _wait_for_others_to_leave(self, deadline: float) -> None:
        names: list[str] | None = None
        while True:
            try:
                self.gathering.wait_all_quiet(deadline, names)
                return
            except WorkerLost as lost:
                known = names or [info.name for info in self.directory.infos()]
                names = [name for name in known if name != lost.worker]
                _log.warning("%s shuts down without waiting for %s: %s", self.info.name, lost.worker, lost)
                if names == known or self.info.name not in names:
                    return

    def close(self) -> None:
        """Ends everything now: pending calls fail, running functions lose their callers. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        for listener in self._listeners:
            self.reactor.remove(listener.fileno())
            listener.close()
        for peer in list(self._peers.values()):
            peer.close(_say_goodbye)
        self.server.close(_say_goodbye)
        self._local.close()
        self.reactor.close()
        self._on_close()
        self._closed.set()

    def abandon_after_fork(self) -> None:
        """In a forked child: closes the copies of the parent's descriptors, so that the parent's end is noticed."""
        self._is_closed = True
        lanes = [lane for peer in self._peers.values() for lane in peer.lanes.values()]
        streams = [lane.connection for lane in lanes] + self.server.connections()
        for descriptor in [*(item.fileno() for item in streams), *(item.fileno() for item in self._listeners)]:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def wait_closed(self, timeout_s: float) -> bool:
        """Whether the worker was closed within that time."""
        return self._closed.wait(timeout_s)

    @property
    def is_quiet(self) -> bool:
        """Whether no call is under way from here or to here."""
        return self.server.is_idle and not self._num_pending()

    def _num_pending(self) -> int:
        lanes = [peer.lanes.get("calls") for peer in list(self._peers.values())]
        return len(self._local.calls) + sum(len(lane.calls) for lane in lanes if lane is not None)

    def statistics(self) -> AgentStatistics:
        """What this worker does right now."""
        running, waiting, queued, num_incoming = self.server.numbers()
        lanes = [lane for peer in list(self._peers.values()) for lane in list(peer.lanes.values())]
        streams = [lane.connection for lane in lanes] + self.server.connections()
        return AgentStatistics(
            name=self.info.name,
            rank=self.info.id,
            incarnation=self.address.incarnation,
            num_calls_made=self.num_calls_made,
            num_calls_served=self.server.num_served,
            num_pending=self._num_pending(),
            num_running=running,
            num_waiting=waiting,
            num_queued=queued,
            num_threads=self.reactor.num_threads,
            num_connections=len(lanes) + num_incoming,
            bytes_sent=sum(stream.bytes_sent for stream in streams),
            bytes_received=sum(stream.bytes_received for stream in streams),
        )


def _say_goodbye(connection: StreamConnection) -> None:
    with contextlib.suppress(TransportError, TimeoutError, OSError):
        connection.send(Goodbye("shutdown"), deadline=time.monotonic() + 0.2)
