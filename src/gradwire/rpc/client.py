r"""The half of a worker that makes calls: starts them, waits for them, ends them.

    start --> sent --> answered, or lost with its worker
                 \--> deadline: the callee is asked how far it got, then it ends
                 \--> cancelled: the callee is told to drop it

`_calls` keeps the books; whoever takes a call out of its table ends it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gradwire.errors import (
    CallCancelled,
    ConnectionClosed,
    ConnectionLost,
    DecodeError,
    NotInitialized,
    RpcTimeout,
)
from gradwire.rpc.codec import describe_function
from gradwire.rpc.connection import LocalSource, current_request, is_serving
from gradwire.rpc.futures import CallFuture
from gradwire.rpc.interceptors import Envelope
from gradwire.rpc.peers import OpenLane, To
from gradwire.rpc.pending_calls import PHASE_TEXT, CallHolder, CallTable, PendingCall, check_timeout, new_call_id
from gradwire.transports.stream import StreamConnection
from gradwire.wire.messages import Call, read_plain
from gradwire.wire.serialization import Packed

if TYPE_CHECKING:
    from gradwire.rpc.agent import Agent


_log = logging.getLogger("gradwire")


class Finisher:
    """Ends one worker's calls."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._completing: set[PendingCall] = set()  # answered, and their callbacks run or are about to

    def finish(self, call: PendingCall, value: Any, error: Exception | None) -> None:
        """Ends a call; only for whoever took it out of its table."""
        call.value, call.error = value, error
        call.disembark()
        future = call.future
        if future is not None:
            self._completing.add(call)
            if self._must_run_elsewhere(future):
                call.is_answered = True
                self._agent.reactor.run_soon(lambda: self._complete(call, future))
            else:
                self._complete(call, future)
            return
        call.mark_done()
        on_done, call.on_done = call.on_done, None  # it may know a future that is to keep the call
        if on_done is not None:
            on_done(call)

    def _must_run_elsewhere(self, future: CallFuture[Any]) -> bool:
        """Callbacks run in service threads: a thread that waits has no time for them, and the clock must never wait."""
        reactor = self._agent.reactor
        if self._agent.is_closed:  # no service thread may be left; better a callback here than a thread for each
            return False
        return reactor.is_clock_thread() or (future.has_callbacks and not reactor.is_service_thread())

    def finish_surely(self, call: PendingCall, value: Any, error: Exception | None) -> None:
        """As `finish`; after Ctrl-C, a service thread does it again."""
        try:
            self.finish(call, value, error)
        except BaseException:
            self.finish_soon(call, value, error)
            raise

    def finish_soon(self, call: PendingCall, value: Any, error: Exception | None) -> None:
        """As `finish`, in a service thread: Ctrl-C has hit the thread that took the call out of its table."""

        def finish_again() -> None:
            if not call.is_done and call.table is not None and call.call_id not in call.table:
                self.finish(call, value, error)

        self._agent.reactor.run_soon(finish_again)

    def fail_all(
        self, calls: CallTable, make_error: Callable[[PendingCall], Exception], arriving: Container[int] = ()
    ) -> None:
        """Ends the calls of a connection that is gone; after Ctrl-C, a service thread ends the rest of them.

        Args:
            calls: Those under way on it.
            make_error: What each of them fails with.
            arriving: Calls whose answers other threads are reading; those end them.
        """
        current: PendingCall | None = None
        try:
            for call in [item for item in list(calls.values()) if item.call_id not in arriving]:
                current = call  # known before it is taken out
                if calls.pop(call.call_id, None) is not None:
                    self.finish(call, None, make_error(call))
                current = None
        except BaseException:
            self._agent.reactor.run_soon(partial(self._fail_rest, calls, make_error, arriving, current))
            raise

    def _fail_rest(
        self,
        calls: CallTable,
        make_error: Callable[[PendingCall], Exception],
        arriving: Container[int],
        interrupted: PendingCall | None,
    ) -> None:
        self.fail_all(calls, make_error, arriving)
        if interrupted is not None and not interrupted.is_done:
            self.finish(interrupted, None, make_error(interrupted))

    def _complete(self, call: PendingCall, future: CallFuture[Any]) -> None:
        is_over = True
        try:
            if call.error is not None:
                future.set_exception(call.error)
            else:
                future.set_result(call.value)
        except Exception:
            _log.exception("%s: a callback of %r failed", self._agent.info.name, call)
        except BaseException:
            is_over = future.done()  # else Ctrl-C hit before: a service thread finishes the call again
            raise
        finally:
            if is_over:
                call.value = call.future = None  # the future holds the value, and must not hold itself
                self._completing.discard(call)
                call.mark_done()


_PHASE_GRACE_S = 0.25  # how long a callee may take to say how far a timed-out call got
_SWEEP_S = 1.0
_NEVER = float("inf")


class Caller(Finisher):
    """Makes this worker's calls.

    Attributes:
        default_timeout_s: Deadline of calls that name none; 0 for none.
        num_made: Calls made so far.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.local = LocalSource(agent)
        self.default_timeout_s = agent.config.rpc_timeout_s
        self.num_made = 0
        self._max_in_flight = agent.config.limits.calls_in_flight

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
        holder = CallHolder()
        try:
            pending = self.start(to, function, args, kwargs, timeout_s, holder)
            try:
                if not pending.is_done:
                    self.wait(pending)
                if pending.error is not None:
                    raise pending.error
                return pending.value
            finally:
                del pending  # an error knows this frame, and would know itself through it
        except KeyboardInterrupt:
            if holder.call is not None:
                self.cancel_soon(holder.call)
            raise
        finally:
            holder.call = None

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
        future: CallFuture[Any] = CallFuture(self)
        try:
            self.start(to, function, args, kwargs, timeout_s, future)
        except KeyboardInterrupt:
            if future.call is not None:
                self.cancel_soon(future.call)
            raise
        return future

    def start(
        self,
        to: To,
        function: Callable[..., Any] | str,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout_s: float | None,
        holder: CallHolder | CallFuture[Any],
    ) -> PendingCall:
        """Starts a call on behalf of the layers above.

        Raises:
            CannotSend, RpcTimeout, WorkerLost: As `submit`; `holder.on_done` is not called then.
        """
        agent = self._agent
        if agent.is_closed:
            raise _closed(agent)
        name = to if type(to) is str else agent.peers.name_of(to)
        if timeout_s is None:
            timeout_s = self.default_timeout_s
        if not 0.0 <= timeout_s < _NEVER:
            timeout_s = check_timeout(timeout_s)
        if current_request() is not None:
            timeout_s = agent.server.time_left(timeout_s)
        peer = agent.peers.known(name)
        lane = peer.lanes.get("calls") if peer is not None else None
        shares_main = lane.shares_main if lane is not None else self._shares_main(name)
        function_name, packed = agent.codec.pack_call(function, args, kwargs or {}, name, shares_main)
        label = function_name or describe_function(function)
        now, future = time.monotonic(), holder if isinstance(holder, CallFuture) else None
        deadline = now + timeout_s if timeout_s > 0 else _NEVER
        call = PendingCall(new_call_id(), name, label, now, deadline, holder.on_done, future)
        holder.call = call
        self.num_made += 1
        if name == agent.address.info.name:
            self.local.start(call, function_name, packed, holder.notes)
            return call
        message = Call(call.call_id, function_name, timeout_s, packed.codec, len(packed.body))
        if packed.trip is None:
            return self._send_somehow(lane, call, message, packed, holder)
        call.embark(packed.trip.passage)
        try:
            return self._send_somehow(lane, call, message, packed, holder)
        except BaseException as error:
            packed.trip.passage.call_id = 0
            if isinstance(error, Exception):  # after Ctrl-C the callee may have all of it
                packed.trip.on_not_sent()
            raise

    def _send_somehow(
        self,
        lane: OpenLane | None,
        call: PendingCall,
        message: Call,
        packed: Packed,
        holder: CallHolder | CallFuture[Any],
    ) -> PendingCall:
        """Sends a call, over another connection if the first is closed here meanwhile; returns what was sent."""
        agent = self._agent
        if lane is None or len(lane.calls) >= self._max_in_flight:
            lane = self._room_on(call)
        if agent.codec.has_interest_in_calls():
            envelope = Envelope("call", lane.address.info, call.function)
            message.notes = agent.codec.outgoing_notes(envelope, packed)
        if holder.notes is not None:
            message.notes = {**message.notes, **holder.notes}
        while not self._send(lane, call, message, packed):
            if agent.is_closed:
                raise _closed(agent)
            # Another one for each attempt: whoever ends the connection may be about to end the first.
            holder.call = call = call.again()
            message.call_id = call.call_id
            lane = self._room_on(call)
        if holder.is_watched:
            lane.reader.ensure_watched()
        return call

    def _shares_main(self, name: str) -> bool:
        return self._agent.address.shares_main(self._agent.directory.find(name))

    def _send(self, lane: OpenLane, call: PendingCall, message: Call, packed: Packed) -> bool:
        """Sends a call; False if the connection was closed here before, so that another one is needed."""
        try:
            lane.calls.add(call)
            self._agent.reactor.expect(min(call.deadline, call.started + _SWEEP_S))
            if lane.reader.is_reading and lane.reader.is_cut_off():
                raise ConnectionClosed("reading was interrupted")
            deadline = call.deadline if call.deadline < _NEVER else None
            # Whoever reads answers sends what was held back, once for many calls that nobody waits for yet.
            hold_back = call.future is not None and lane.reader.will_flush
            lane.connection.send(message, packed.body, packed.tensors, deadline, hold_back)
            if hold_back and not lane.reader.will_flush:
                lane.connection.flush(deadline)
        except ConnectionClosed as error:  # the callee has not got all of it, so it cannot have begun
            is_ours = lane.calls.pop(call.call_id, None) is not None
            lane.reader.end(error)
            lane.peer.forget_lane(lane)  # it may have ended in the middle of a Ctrl-C
            return not is_ours and (call.future is not None or call.on_done is not None)  # those have been told
        except ConnectionLost as error:
            lane.reader.end(error)
            lane.peer.forget_lane(lane)
            if lane.calls.pop(call.call_id, None) is not None:  # the lane had ended before the call was in its table
                self.finish_surely(call, None, lane.peer.lost(str(error), call))
        except TimeoutError as error:
            self._give_up_sending(lane, call)
            raise RpcTimeout(call.timeout_text("send", time.monotonic()), call.worker, "send") from error
        except KeyboardInterrupt:  # the callee may have all of it
            self._give_up_sending(lane, call)
            if not (lane.connection.is_closed or call.function.startswith("~")):
                self._agent.reactor.run_soon(lambda: self._tell_to_drop(call, lambda phase: None))
            raise
        except BaseException:
            self._give_up_sending(lane, call)
            raise
        return True

    def _give_up_sending(self, lane: OpenLane, call: PendingCall) -> None:
        lane.calls.pop(call.call_id, None)
        if lane.connection.is_closed:  # half of the message is out: the next call needs another connection
            lane.reader.end(ConnectionClosed("a message was cut off"))

    def _room_on(self, call: PendingCall) -> OpenLane:
        """The calls lane, opened if it is not, once it has room for one more call."""
        lane = self._agent.peers.peer(call.worker).lane("calls", call.deadline)
        if len(lane.calls) >= self._max_in_flight:
            with self._agent.server.waiting():
                lane.wait_for_room(call, self._max_in_flight)
        return lane

    def control(
        self,
        to: str,
        operation: str,
        args: tuple[Any, ...],
        timeout_s: float,
        on_done: Callable[[PendingCall], None],
        answer: Any = Any,
    ) -> None:
        """Starts a control operation on another worker; see `Agent.control`.

        Raises:
            WorkerLost, RpcTimeout: It could not even be sent.
        """

        def check(call: PendingCall) -> None:
            if call.error is None:
                try:
                    problem = f"what {to} answered to {call.function} is not valid"
                    call.value = read_plain(call.value, answer, problem)
                except DecodeError as error:  # another one is kept: the frames of this one know the call and its value
                    call.value, call.error = None, DecodeError(str(error))
            on_done(call)

        packed = self._agent.codec.pack_control(args)
        now = time.monotonic()
        deadline = now + timeout_s if timeout_s > 0 else _NEVER
        call = PendingCall(new_call_id(), to, f"~{operation}", now, deadline, check)
        message = Call(call.call_id, call.function, timeout_s, packed.codec, len(packed.body))
        while not self._send(self._agent.peers.peer(to).lane("control", call.deadline), call, message, packed):
            if self._agent.is_closed:
                raise _closed(self._agent)

    # -- waiting, ending -----------------------------------------------------------------------------------------

    def wait(self, call: PendingCall, deadline: float = _NEVER) -> None:
        """Blocks until a call has ended, or the deadline is over; reads its answer in this thread if no other does."""
        if call.is_done:
            return
        if is_serving():
            with self._agent.server.waiting(), self._waiting_inside(call):
                self._wait(call, deadline)
        else:
            self._wait(call, deadline)

    def wait_until(self, call: PendingCall, deadline: float) -> None:
        """As `wait`, but no longer than that; nobody gives the call up for it."""
        if is_serving():
            with self._agent.server.waiting():
                self._wait(call, deadline)
        else:
            self._wait(call, deadline)

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

    def _wait(self, call: PendingCall, deadline: float = _NEVER) -> None:
        def is_over() -> bool:
            return call.is_done or call.is_answered

        reader = call.table.reader if call.table is not None else None
        while not call.is_done and (now := time.monotonic()) < deadline:
            # Past its own deadline the clock ends the call; until it has, look often.
            until = min(max(call.deadline, now + 0.005), deadline)
            if call.is_answered or reader is None or not reader.read_until(is_over, until):
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

    def cancel(self, call: PendingCall) -> bool:
        """Gives a call up; the callee is told to drop it."""
        if call.table is None or call.table.pop(call.call_id, None) is None:
            return False
        error = CallCancelled(f"call of {call.function} on worker {call.worker} was cancelled here")
        try:
            self._tell_to_drop(call, lambda phase: None)
            self.finish(call, None, error)
        except BaseException:  # Ctrl-C: somebody else may wait for it
            self.finish_soon(call, None, error)
            raise
        return True

    def cancel_soon(self, call: PendingCall) -> None:
        """Cancel a call in another thread.

        For an event loop, which must not wait for the control lane, and after Ctrl-C: a second one would cut that lane
        off, and the callee would take this worker for dead.
        """

        def cancel() -> None:
            self.cancel(call)

        self._agent.reactor.run_soon(cancel)

    def _tell_to_drop(self, call: PendingCall, on_phase: Callable[[str], None]) -> None:
        """Tells the callee that nobody waits for the call any more; it says how far the call got."""
        if call.worker == self._agent.info.name:
            on_phase(self.local.cancel(call.call_id))
            return

        def on_done(answer: PendingCall) -> None:
            on_phase(answer.value if answer.error is None and answer.value in PHASE_TEXT else "unknown")

        try:
            self.control(call.worker, "cancel", (call.call_id,), _PHASE_GRACE_S, on_done, str)
        except Exception:  # it is lost, say, or no descriptor is left for a connection
            on_phase("unknown")

    # -- the clock's sweep -----------------------------------------------------------------------------------------

    def sweep(self, now: float) -> float:
        """Ends calls whose time is over; returns when to look again."""
        wanted, run_soon = _NEVER, self._agent.reactor.run_soon  # the clock itself must not wait for anybody
        lanes = [lane for lane in self._agent.peers.lanes() if lane.calls]
        for lane in lanes:
            if lane.calls.has_older_than(now - _SWEEP_S):  # Ctrl-C has hit between sending a call and waiting for it
                lane.reader.ensure_watched()
        for table in [self.local.calls, *(lane.calls for lane in lanes)]:
            expired, earliest = table.expire(now)
            for call in expired:
                run_soon(partial(self._expire, call))
            wanted = min(wanted, earliest)
            if len(table):
                wanted = min(wanted, now + _SWEEP_S)
        return wanted

    def _expire(self, call: PendingCall) -> None:
        """The deadline of a call has passed: ask the callee how far it got, then end the call."""

        def end(phase: str) -> None:
            if call.table is not None and call.table.pop(call.call_id, None) is not None:
                now = time.monotonic()
                self.finish(call, None, RpcTimeout(call.timeout_text(phase, now), call.worker, phase))

        if call.function.startswith("~"):
            end("unknown")
        else:
            self._tell_to_drop(call, end)

    @property
    def num_pending(self) -> int:
        """Calls under way, those included whose callbacks have not ended."""
        on_lanes = sum(len(lane.calls) for lane in self._agent.peers.lanes() if lane.kind == "calls")
        return on_lanes + len(self.local.calls) + len(self._completing)

    def close(self, say_goodbye: Callable[[StreamConnection], None]) -> None:
        """Ends every connection in good order; what is still under way fails."""
        for peer in self._agent.peers:
            peer.close(say_goodbye)
        self.local.close()


def _closed(agent: Agent) -> NotInitialized:
    return NotInitialized(f"worker {agent.info.name} has shut down; call init_rpc again, or use another Cluster")
