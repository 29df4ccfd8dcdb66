r"""The client half of a worker: starts calls, waits for them and completes them.

    start --> sent --> answered, or lost with its worker
                 \--> deadline: the callee is asked for the call's progress, then the call ends
                 \--> cancelled: the callee is told to drop it

The thread that removes a call from the table of its connection completes it (`pending_calls`).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from signal import SIGINT, default_int_handler
from typing import TYPE_CHECKING, Any

from gradwire import _interrupts
from gradwire.errors import CallCancelled, ConnectionClosed, ConnectionLost, DecodeError, NotInitialized, RpcTimeout
from gradwire.observe import events
from gradwire.observe.log import get_logger
from gradwire.rpc.call_events import CallTrace, tell_not_packed
from gradwire.rpc.codec import attach, describe_function
from gradwire.rpc.connection import Connection, while_waiting
from gradwire.rpc.futures import CallFuture
from gradwire.rpc.interceptors import Envelope
from gradwire.rpc.peers import To
from gradwire.rpc.pending_calls import PHASE_TEXT, CallTable, PendingCall, check_timeout, new_call_id
from gradwire.rpc.reader import current
from gradwire.wire.devices import record_use
from gradwire.wire.messages import Call, read_plain
from gradwire.wire.serialization import Packed

if TYPE_CHECKING:
    from gradwire.rpc.agent import Agent


_getsignal: Any = _signal.getsignal  # `signal.getsignal` is several calls around it
_log = get_logger(__name__)
_PHASE_GRACE_S = 0.25  # how long a callee may take to report the progress of a timed-out call
_EXPIRE_LOOK_S = 0.005  # poll interval for a call whose deadline has passed and which the clock is about to end
_SWEEP_S = 1.0
LONG_CALL_S = 60.0
_REPORT_INTERVAL_S = 10.0
_NEVER = float("inf")


class Client:
    """Makes this worker's calls.

    Attributes:
        loopback: The connection for calls of this worker to itself.
        default_timeout_s: Default timeout of calls; 0 for no timeout.
        num_made: Calls made so far.
        completing: Answered calls whose callbacks are running or about to run.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.loopback = Connection.loopback(agent)
        self.default_timeout_s = agent.config.rpc_timeout_s
        self.num_made = 0
        self._next_report = 0.0
        self.completing: set[PendingCall] = set()

    def call(
        self,
        to: To,
        function: Callable[..., Any] | str,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Run a function on another worker and return its result.

        Raises:
            CannotSend: An argument cannot be sent.
            RpcTimeout: The deadline passed; `phase` says how far the call had got.
            WorkerLost: The worker died or cannot be reached.
            Exception: The function's exception.
        """
        call = self.start(to, function, args, kwargs, timeout_s)
        try:
            if not call.is_done:
                self.wait(call)
            if call.error is not None:
                raise call.error
            if call.on_device:
                record_use(call.on_device)
            return call.value
        except KeyboardInterrupt:
            self.cancel_soon(call)
            raise
        finally:
            del call  # an error refers to this frame, and would refer to itself through it

    def submit(
        self,
        to: To,
        function: Callable[..., Any] | str,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> CallFuture[Any]:
        """Start a call and return its future. Arguments are captured: changing them later has no effect.

        Raises:
            CannotSend: An argument cannot travel.
            RpcTimeout: No connection, or no room on it, before the deadline.
            WorkerLost: The worker cannot be reached.
        """
        future: CallFuture[Any] = CallFuture(self)
        self.start(to, function, args, kwargs, timeout_s, future=future, is_watched=True)
        return future

    def start(
        self,
        to: To,
        function: Callable[..., Any] | str,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout_s: float | None,
        *,
        future: CallFuture[Any] | None = None,
        on_done: Callable[[PendingCall], None] | None = None,
        notes: dict[str, Any] | None = None,
        is_watched: bool = False,
    ) -> PendingCall:
        """Start a call.

        Args:
            on_done: Runs in the thread that completes the call; must not block. Not called if this raises.
            notes: Sent with the call, in addition to those of the interceptors.
            is_watched: Whether the reply is read as soon as it arrives; otherwise it is read by a thread that waits for it
                or for another reply of that worker, or by the clock within a second or two.
        """
        agent = self._agent
        if agent.is_closed:
            raise _closed(agent)
        if _getsignal(SIGINT) is default_int_handler:  # a notebook puts it back before each cell
            _interrupts.ensure_installed()
        name = to if type(to) is str else agent.peers.name_of(to)
        if timeout_s is None:
            timeout_s = self.default_timeout_s
        if not 0.0 <= timeout_s < _NEVER:
            timeout_s = check_timeout(timeout_s)
        if current.request is not None:
            timeout_s = agent.server.time_left(timeout_s)
        peer = agent.peers.by_name.get(name)
        connection = peer.lanes.get("calls") if peer is not None else None
        if connection is None and name == agent.info.name:
            connection = self.loopback
        shares_main = self._shares_main(name) if connection is None else connection.shares_main
        began_ns = time.monotonic_ns() if events.sink is not None else 0
        try:
            function_name, packed = agent.codec.pack_call(function, args, kwargs, name, shares_main)
        except Exception as error:
            if began_ns:
                tell_not_packed(agent, name, describe_function(function), began_ns, error)
            raise
        packed_ns = time.monotonic_ns() if began_ns else 0
        now = time.monotonic()
        deadline = now + timeout_s if timeout_s > 0 else _NEVER
        label = function_name or describe_function(function)
        call = PendingCall(new_call_id(), name, label, now, deadline, on_done, future)
        if future is not None:
            future.call = call
        self.num_made += 1
        message = Call(call.call_id, function_name, timeout_s, packed.codec, len(packed.body))
        transfer, is_sent, trace = packed.transfer, False, None
        if began_ns:
            trace = call.trace = CallTrace(agent, call, began_ns)
        if transfer is not None:
            call.transfer_status, transfer.status.call_id = transfer.status, call.call_id
        try:
            if connection is None or len(connection.calls) >= connection.max_in_flight:
                connection = self._connect(call)
            for interceptor in agent.interceptors:
                if interceptor.wants_calls():
                    envelope = Envelope("call", connection.info, label, None, call.call_id)
                    attach(message.notes, interceptor, envelope, packed)
            if notes is not None:
                message.notes.update(notes)
            if trace is not None:
                trace.tell_packed(message, packed_ns)
            while not self._send(connection, call, message, packed):
                connection = self._connect(call)
            is_sent = True
            if trace is not None:
                trace.tell_sent(message)
        finally:
            if trace is not None and not is_sent:
                call.trace = None
                trace.tell_ended(sys.exc_info()[1])
            if transfer is not None and not is_sent:
                transfer.status.call_id = 0
                transfer.on_not_sent()
        if is_watched and connection.reader is not None:
            connection.reader.ensure_watched()
        return call

    def _shares_main(self, name: str) -> bool:
        return self._agent.address.shares_main(self._agent.directory.find(name))

    def _connect(self, call: PendingCall) -> Connection:
        """Return the connection for a call, opened if it is not, once it has room for one more."""
        if call.worker == self._agent.info.name:
            return self.loopback
        connection = self._agent.peers.peer(call.worker).lane("calls", call.deadline)
        if len(connection.calls) >= connection.max_in_flight:
            with self._agent.server.waiting():
                connection.wait_for_room(call)
        return connection

    def _send(self, connection: Connection, call: PendingCall, message: Call, packed: Packed) -> bool:
        """Send a call; False if the connection was closed here before, so that another one is needed."""
        calls, reader, clock, is_sent = connection.calls, connection.reader, self._agent.reactor.clock, False
        call.table = calls
        calls[call.call_id] = call
        expected = min(call.deadline, call.started + _SWEEP_S)
        if expected < clock.next_sweep:
            clock.expect(expected)
        deadline = call.deadline if call.deadline < _NEVER else None
        devices = None if connection.devices is None else connection.devices.there
        try:
            # Held back while a thread handles answers, which sends it afterwards: once for many calls.
            if call.future is not None and reader is not None and reader.will_flush:
                connection.stream.send(message, packed.body, packed.tensors, deadline, True, devices)
                reader.must_flush = True  # only now: an earlier flush has not sent it
                if not reader.will_flush:
                    connection.stream.flush(deadline)
            else:
                connection.stream.send(message, packed.body, packed.tensors, deadline, False, devices)
            is_sent = True
        except ConnectionClosed as error:  # the callee has not got all of it, so it cannot have begun
            is_sent = calls.pop(call.call_id, None) is None  # the thread that removed it has completed the call
            connection.end(error)
            if not is_sent and self._agent.is_closed:
                raise _closed(self._agent) from error
        except ConnectionLost as error:
            is_sent = True
            connection.end_when_read(error, call.deadline)
            if calls.pop(call.call_id, None) is not None:  # the connection closed before the call was in its table
                assert connection.peer is not None
                self.finish(call, None, connection.peer.lost(str(error), call))
        except TimeoutError as error:
            text = call.timeout_text("send", time.monotonic())
            raise RpcTimeout(f"{text} ({error})", call.worker, "send") from error
        finally:
            if not is_sent:
                calls.pop(call.call_id, None)
                if connection.stream.is_closed:  # half of the message is out: the next call needs another connection
                    connection.end(ConnectionClosed("a message was interrupted while being sent"))
        return is_sent

    def control(
        self,
        to: str,
        operation: str,
        args: tuple[Any, ...],
        timeout_s: float,
        on_done: Callable[[PendingCall], None],
        answer: Any = Any,
    ) -> None:
        """Start a control operation on another worker; `on_done`, which must not block, runs when it has completed.

        The arguments are plain data and tensors. The reply is validated against `answer`, a type that msgspec supports.
        """

        def check(call: PendingCall) -> None:
            if call.error is None:
                try:
                    problem = f"worker {to} sent an invalid result for {call.function}"
                    call.value = read_plain(call.value, answer, problem)
                except (
                    DecodeError
                ) as error:  # a new error is kept: the frames of this one refer to the call and its value
                    call.value, call.error = None, DecodeError(str(error))
            on_done(call)

        packed = self._agent.codec.pack_control(args)
        now = time.monotonic()
        deadline = now + timeout_s if timeout_s > 0 else _NEVER
        call = PendingCall(new_call_id(), to, f"~{operation}", now, deadline, check)
        message = Call(call.call_id, call.function, timeout_s, packed.codec, len(packed.body))
        peer = self._agent.peers.peer(to)
        while not self._send(peer.lane("control", deadline), call, message, packed):
            pass

    def wait(self, call: PendingCall, deadline: float = _NEVER, is_released: bool = False) -> None:
        """Block until a call has completed or the deadline has passed; read its reply in this thread if no other does.

        The call is cancelled if the function that waits for it here is. `is_released`: the thread has already released
        what it must not hold while it waits.
        """
        if not is_released and (current.request is not None or current.holds):
            with self._agent.server.waiting(), self._nested(call):
                self.wait(call, deadline, is_released=True)
            return
        reader = call.table.reader if call.table is not None else None
        while not call.is_done:
            now = time.monotonic()
            if now >= deadline:
                return
            # After its deadline, the clock ends the call; poll until it has.
            until = min(max(call.deadline, now + _EXPIRE_LOOK_S), deadline)
            if call.is_over or reader is None or not reader.read_until(call, until):
                self._wait_for_others(call, until)

    def wait_until(self, call: PendingCall, deadline: float) -> None:
        """Wait like `wait`, but do not cancel the call if the function that waits for it is cancelled."""
        with while_waiting():
            self.wait(call, deadline, is_released=True)

    @contextlib.contextmanager
    def _nested(self, call: PendingCall) -> Iterator[None]:
        """Record that the function being served waits for its own call: cancelling the one cancels the other."""
        request = current.request
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

    def _wait_for_others(self, call: PendingCall, until: float) -> None:
        ended = threading.Lock()  # released by the thread that finishes the call
        ended.acquire()
        call.waiters.append(ended)
        try:
            if not call.is_done:
                _interrupts.acquire(ended, max(0.0, min(_SWEEP_S, until - time.monotonic())))
        finally:
            call.waiters.remove(ended)

    def finish(self, call: PendingCall, value: Any, error: Exception | None) -> None:
        """Complete a call; only for the thread that removed it from its table."""
        call.value, call.error = value, error
        if call.trace is not None:
            trace, call.trace = call.trace, None  # the two refer to each other
            trace.tell_ended(error)
        if call.transfer_status is not None:
            call.transfer_status.call_id = 0  # its contents have arrived, or are no longer wanted there
        future = call.future
        if future is not None:
            self.completing.add(call)
            if self._must_run_elsewhere(future):
                call.is_over = True
                self._agent.reactor.run_soon(partial(self._complete, call, future))
            else:
                self._complete(call, future)
            return
        call.is_over = call.is_done = True
        if call.waiters:
            call.wake()
        on_done, call.on_done = call.on_done, None  # it may refer to a future that refers to the call
        if on_done is not None:
            on_done(call)

    def _must_run_elsewhere(self, future: CallFuture[Any]) -> bool:
        """Return whether callbacks need a service thread: not one that waits, nor the clock, which never may."""
        reactor = self._agent.reactor
        if self._agent.is_closed:  # no service thread may be left; better a callback here than a thread for each
            return False
        return reactor.is_clock_thread() or (future.has_callbacks and not reactor.is_service_thread())

    def _complete(self, call: PendingCall, future: CallFuture[Any]) -> None:
        try:
            if call.error is not None:
                future.set_exception(call.error)
            else:
                future.set_result(call.value)
        except Exception:
            _log.exception("a callback of %r failed", call)
        finally:
            call.value = call.future = None  # the future holds the value, and must not hold itself
            self.completing.discard(call)
            call.is_over = call.is_done = True
            if call.waiters:
                call.wake()

    def cancel(self, call: PendingCall) -> bool:
        """Cancel a call and tell the callee to drop it; return False if it had already completed."""
        if call.table is None or call.table.pop(call.call_id, None) is None:
            return False
        self._tell_to_drop(call, lambda phase: None)
        self.finish(call, None, CallCancelled(f"{call.what} was cancelled by the caller"))
        return True

    def cancel_soon(self, call: PendingCall) -> None:
        """Cancel a call in another thread: an event loop, or a user who pressed Ctrl-C, must not wait for a connection."""
        self._agent.reactor.run_soon(partial(self.cancel, call))

    def _tell_to_drop(self, call: PendingCall, on_phase: Callable[[str], None]) -> None:
        """Tell the callee that the result is no longer wanted; it replies with the call's progress."""
        if call.worker == self._agent.info.name:
            on_phase(self.loopback.cancel(call.call_id))
            return

        def on_done(answer: PendingCall) -> None:
            on_phase(answer.value if answer.error is None and answer.value in PHASE_TEXT else "unknown")

        try:
            self.control(call.worker, "cancel", (call.call_id,), _PHASE_GRACE_S, on_done, str)
        except Exception:  # such as a lost worker, or no descriptor left for a connection
            on_phase("unknown")

    def sweep(self, now: float) -> float:
        """End calls whose deadline has passed and return when to check again; called by the clock."""
        wanted, run_soon = _NEVER, self._agent.reactor.run_soon  # the clock itself must not wait
        for connection in [self.loopback, *self._agent.peers.lanes()]:
            calls = connection.calls
            if not calls:
                continue
            if connection.reader is not None and calls.has_older_than(now - _SWEEP_S):
                connection.reader.ensure_watched()  # of a call that was not watched, and that no thread waits for
            if _log.isEnabledFor(logging.INFO):
                self._report_unanswered(calls, now)
            expired, earliest = calls.expire(now)
            for call in expired:
                run_soon(partial(self._expire, call))
            wanted = min(wanted, earliest, now + _SWEEP_S)
        return wanted

    def _report_unanswered(self, calls: CallTable, now: float) -> None:
        """Log calls that have run for long, each once; that is not unusual, so the level is INFO."""
        for call in list(calls.values()):
            if call.started > now - LONG_CALL_S or call.is_control or now < self._next_report:
                return  # the others began later
            if not call.is_reported:
                call.is_reported, self._next_report = True, now + _REPORT_INTERVAL_S
                text = (
                    "%s: the call to %s on worker %s has not been answered for %.0f s; for a Cluster, `gradwire top` "
                    "shows what it is doing"
                )
                args = (self._agent.info.name, call.function, call.worker, now - call.started)
                self._agent.reactor.run_soon(partial(_log.info, text, *args))

    def _expire(self, call: PendingCall) -> None:
        def end(phase: str) -> None:
            if call.table is not None and call.table.pop(call.call_id, None) is not None:
                now = time.monotonic()
                self.finish(call, None, RpcTimeout(call.timeout_text(phase, now), call.worker, phase))

        if call.is_control:
            end("unknown")
        else:
            self._tell_to_drop(call, end)

    @property
    def num_pending(self) -> int:
        """Calls in progress, including those whose callbacks are still running."""
        on_lanes = sum(len(lane.calls) for lane in self._agent.peers.lanes() if lane.lane == "calls")
        return on_lanes + len(self.loopback.calls) + len(self.completing)

    def close(self) -> None:
        for peer in self._agent.peers:
            peer.close()
        self.loopback.end(ConnectionClosed("shutdown"))


def _closed(agent: Agent) -> NotInitialized:
    return NotInitialized(f"worker {agent.info.name} has shut down; call init_rpc again, or start another Cluster")
