"""A worker's part of a trace of its cluster: it records, and hands over what it recorded in pieces.

    driver  -- trace.clock() ---------------------> worker     its clock, several times
            -- trace.start(number, ...) ---------->            begins to record
            -- trace.stop(number) ---------------->            how many pieces there are
            -- trace.piece(number, index) -------->            one of them
            -- trace.end(number) ----------------->            forgets them; a trace that was given up ends so, too

These are control operations: a worker serves them even if all of its threads are busy. Only the driver may ask for them.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from gradwire import _interrupts
from gradwire.errors import ConfigurationError
from gradwire.observe.recorder import Recorder, encode_events, thread_names
from gradwire.rpc.futures import InterruptibleFuture
from gradwire.types import WorkerInfo

if TYPE_CHECKING:
    from gradwire.observe.operators import OperatorProfile
    from gradwire.rpc.agent import Agent

CLOCK = "trace.clock"
START = "trace.start"
STOP = "trace.stop"
PIECE = "trace.piece"
END = "trace.end"

MAX_EVENTS = 10_000_000
MAX_PIECE_BYTES = 16 << 20

_SETTLE_S = 0.02  # for events whose message has arrived elsewhere before they are told here
_MAX_THREADS = 4096

Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
NumEvents = Annotated[int, Meta(ge=1, le=MAX_EVENTS)]
_Name = Annotated[str, Meta(max_length=256)]


class Started(msgspec.Struct, frozen=True, array_like=True):
    """The answer to `START`: where the worker runs."""

    pid: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    host: _Name


class Recorded(msgspec.Struct, frozen=True, array_like=True):
    """The answer to `STOP`: what there is."""

    num_pieces: Annotated[int, Meta(ge=0, le=MAX_EVENTS)]
    num_dropped: Number
    threads: Annotated[list[tuple[Number, _Name]], Meta(max_length=_MAX_THREADS)]
    problem: _Name = ""  # why operators are missing


class Recording:
    """What one worker records for one trace.

    Args:
        worker: Name of the worker.
        max_events: Most events to keep, and most operators.
        has_profile: Whether to record the operators of torch as well.

    Raises:
        ConfigurationError: `torch.profiler` cannot be started.
    """

    def __init__(self, worker: str, max_events: int, has_profile: bool) -> None:
        self._worker = worker
        self._max_events = max_events
        self._recorder = Recorder(worker, max_events)
        self._profile: OperatorProfile | None = None
        self._threads: dict[int, str] = {}
        if has_profile:
            from gradwire.observe.operators import OperatorProfile

            self._profile = OperatorProfile()
            self._profile.start()
        self._recorder.start()

    def stop(self) -> tuple[list[bytes], Recorded]:
        """Stop recording; return the events in pieces, and a description of them."""
        problem = ""
        try:
            _interrupts.sleep(_SETTLE_S)
            events = self._recorder.stop()
            num_dropped = self._recorder.num_dropped
            if self._profile is not None:
                try:
                    operators, num_left_out = self._profile.stop(self._worker, self._max_events)
                except ConfigurationError as error:
                    problem = str(error)[:256]
                else:
                    events += operators
                    num_dropped += num_left_out
        finally:
            self.close()
        threads = [(number, name[:256]) for number, name in sorted(thread_names().items())[:_MAX_THREADS]]
        pieces = list(encode_events(events))
        return pieces, Recorded(len(pieces), num_dropped, threads, problem)

    def close(self) -> None:
        """Stop recording. Idempotent."""
        self._recorder.stop()
        if self._profile is not None:
            self._profile.close()


class TraceServer:
    """Serves the driver's requests on one worker."""

    def __init__(self, agent: Agent, driver: str) -> None:
        self._agent = agent
        self._driver = driver
        self._lock = threading.Lock()  # guards the fields below
        self._number = 0  # of the trace that they belong to
        self._ended = 0  # the number of the trace that ended last; a late request must not start it again
        self._recording: Recording | None = None
        self._pieces: list[bytes] = []

    def register(self) -> None:
        server, only = self._agent.server, {"only_for": self._driver, "purpose": "record a trace"}
        server.register_control(CLOCK, self._on_clock, **only)
        server.register_control(START, self._on_start, Number, NumEvents, bool, **only)
        server.register_control(STOP, self._on_stop, Number, **only)
        server.register_control(PIECE, self._on_piece, Number, Number, **only)
        server.register_control(END, self._on_end, Number, **only)
        self._agent.before_close.append(self.close)

    def _on_clock(self, _: WorkerInfo) -> int:
        return time.monotonic_ns()

    def _on_start(self, _: WorkerInfo, number: int, max_events: int, has_profile: bool) -> Any:
        return self._later(partial(self._start, number, max_events, has_profile))

    def _later(self, action: Callable[[], Any]) -> InterruptibleFuture[Any]:
        """Act in another thread, because this one reads, and starting a profiler takes long; return a future."""
        answer: InterruptibleFuture[Any] = InterruptibleFuture()

        def act() -> None:
            try:
                value = action()
            except Exception as error:
                answer.set_exception(error)
            else:
                answer.set_result(msgspec.to_builtins(value, builtin_types=(bytes,)))

        self._agent.reactor.run_soon(act)
        return answer

    def _start(self, number: int, max_events: int, has_profile: bool) -> Started:
        with self._lock:
            if number == self._ended or self._agent.is_closed:
                raise ConfigurationError(f"trace {number} has ended on worker {self._agent.info.name}")
            if self._recording is None or self._number != number:  # else it was asked twice, because it has just joined
                self._forget()  # a trace that the driver has given up
                self._recording, self._number = Recording(self._agent.info.name, max_events, has_profile), number
        return Started(os.getpid(), socket.gethostname()[:256])

    def _forget(self) -> None:
        recording, self._recording, self._pieces = self._recording, None, []
        if recording is not None:
            recording.close()

    def _on_stop(self, _: WorkerInfo, number: int) -> Any:
        return self._later(partial(self._stop, number))

    def _stop(self, number: int) -> Recorded:
        with self._lock:
            if self._recording is None or self._number != number:
                raise ConfigurationError(f"worker {self._agent.info.name} is not recording trace {number}")
            recording, self._recording = self._recording, None
            self._pieces, recorded = recording.stop()
        return recorded

    def _on_piece(self, _: WorkerInfo, number: int, index: int) -> Any:
        return self._later(partial(self._piece, number, index))

    def _piece(self, number: int, index: int) -> bytes:
        with self._lock:
            if self._number != number or index >= len(self._pieces):
                raise ConfigurationError(f"worker {self._agent.info.name} has no piece {index} of trace {number}")
            return self._pieces[index]

    def _on_end(self, _: WorkerInfo, number: int) -> Any:
        return self._later(partial(self._end, number))

    def _end(self, number: int) -> None:
        with self._lock:
            self._ended = number
            if self._number == number:
                self._forget()

    def close(self) -> None:
        """Stop recording, because the worker ends. Idempotent."""
        with self._lock:
            self._forget()


def serve_traces(agent: Agent, driver: str) -> None:
    """Let the driver record traces of this worker."""
    TraceServer(agent, driver).register()
