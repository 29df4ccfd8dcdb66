"""Two ends of a connection, and what the checks do with them: send, receive, and send what no worker would."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from gradwire.errors import TransportError
from gradwire.transports.stream import StreamConnection, StreamOptions
from gradwire.wire import framing, tensors
from gradwire.wire.messages import Call, Failure, Goodbye, Reply

TIMEOUT_S = 10.0
ANYTHING: frozenset[type] = frozenset({Call, Reply, Goodbye})


class Sender:
    """Runs something in a thread of its own; whatever it raises is raised by `join`."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="gradwire-testing-sender", daemon=True)
        self._thread.start()

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.join()

    def _run(self) -> None:
        try:
            self._action()
        except BaseException as error:
            self._error = error

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within that time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def join(self) -> None:
        """Waits for its end.

        Raises:
            AssertionError: It does not end.
            BaseException: What it raised.
        """
        assert self.wait(TIMEOUT_S), "a sending or reading thread is stuck"
        if self._error is not None:
            raise self._error


def make_call(call_id: int, body: bytes) -> Call:
    """A message that carries these bytes."""
    return Call(call_id, "function", 0.0, 0, len(body))


def send_call(
    connection: StreamConnection,
    call_id: int,
    body: bytes = b"",
    values: Sequence[torch.Tensor] = (),
    deadline: float | None = None,
) -> None:
    """Sends one message with a body and tensors."""
    connection.send(make_call(call_id, body), body, values, deadline or time.monotonic() + TIMEOUT_S)


def hold_call(connection: StreamConnection, call_id: int, body: bytes = b"") -> None:
    """As `send_call`, but the message may wait for the next one."""
    connection.send(make_call(call_id, body), body, (), time.monotonic() + TIMEOUT_S, hold_back=True)


def write_raw(connection: StreamConnection, data: bytes) -> None:
    """Sends bytes that need not be a frame, past everything that makes frames."""
    connection._write([data], (), time.monotonic() + TIMEOUT_S)


def receive_frames(connection: StreamConnection, num_frames: int) -> list[framing.Frame]:
    """The next frames.

    Raises:
        AssertionError: They did not come in time, or more came.
    """
    frames: list[framing.Frame] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(frames) < num_frames:
        read = connection.read_nowait()
        frames += read or []
        if read is None:
            assert time.monotonic() < deadline, f"{len(frames)} of {num_frames} frames came in time"
            connection.wait_readable(0.1)
    assert len(frames) == num_frames
    return frames


def receive_tensors(frame: framing.Frame) -> list[torch.Tensor]:
    """The tensors of a frame."""
    message = frame.message
    assert isinstance(message, Call | Reply)
    buffers = iter(frame.buffers)
    return [tensors.rebuild(meta, buffers) for meta in message.tensors]


def end_of(connection: StreamConnection, frames: list[framing.Frame] | None = None) -> TransportError:
    """Reads to the end and returns the error that it was; what came before goes into `frames`.

    Raises:
        AssertionError: The connection did not end in time.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            read = connection.read_nowait()
        except TransportError as error:
            return error
        if read is None:
            connection.wait_readable(0.1)
        elif frames is not None:
            frames += read
    raise AssertionError(f"{connection!r} did not end")


def call_ids(frames: list[framing.Frame]) -> list[int]:
    """Which calls the frames belong to."""
    return [frame.message.call_id for frame in frames if isinstance(frame.message, Call | Reply | Failure)]


@dataclass
class ConnectionPair:
    """Two ends of one connection; ``near`` is the side that connected. Closed at the end of a ``with`` block."""

    near: StreamConnection
    far: StreamConnection

    def __enter__(self) -> ConnectionPair:
        for end in (self.near, self.far):
            end.decoder.accept = ANYTHING
        with Sender(lambda: send_call(self.near, 1)):  # a transport may shake hands with its first bytes
            receive_frames(self.far, 1)
        send_call(self.far, 2)
        receive_frames(self.near, 1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.near.close()
        self.far.close()

    @property
    def directions(self) -> tuple[tuple[StreamConnection, StreamConnection], ...]:
        """Sender and receiver, both ways."""
        return (self.near, self.far), (self.far, self.near)


MakePair = Callable[[StreamOptions], ConnectionPair]
TransportCheck = Callable[[MakePair], None]
