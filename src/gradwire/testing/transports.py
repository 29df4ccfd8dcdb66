"""The contract of transports, as checks that run on any implementation.

A check takes a function that creates two connected `StreamConnection`s, and uses them as rpc does. Run all checks with
`check_transport`, or each as a separate test:

    @pytest.mark.parametrize("check", TRANSPORT_CHECKS)
    def test_my_transport(check): check(make_pair)
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch

from gradwire.config import KIB, MIB, Limits
from gradwire.errors import ConnectionClosed, ConnectionLost, DecodeError, LimitExceeded, TransportError
from gradwire.testing.agents import wait_until
from gradwire.testing.leaks import LeakCheck
from gradwire.transports.stream import StreamConnection, StreamOptions
from gradwire.wire import framing, tensors
from gradwire.wire.messages import Call, Failure, Goodbye, Reply

__all__ = ["TRANSPORT_CHECKS", "ConnectionPair", "MakePair", "TransportCheck", "check_transport"]


TIMEOUT_S = 10.0
ANYTHING: frozenset[type] = frozenset({Call, Reply, Goodbye})


class Sender:
    """Runs a function in a thread; `join` raises its exception."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="gradwire-testing-sender", daemon=True)
        self._thread.start()

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.join()

    def _run(self) -> None:
        self._error = error_of(self._action)

    def wait(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def join(self) -> None:
        assert self.wait(TIMEOUT_S), "a sending or reading thread is stuck"
        if self._error is not None:
            raise self._error


def error_of(action: Callable[[], object]) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None


def make_call(call_id: int, body: bytes) -> Call:
    return Call(call_id, "function", 0.0, 0, len(body))


def send_call(
    connection: StreamConnection,
    call_id: int,
    body: bytes = b"",
    values: Sequence[torch.Tensor] = (),
    deadline: float | None = None,
) -> None:
    connection.send(make_call(call_id, body), body, values, deadline or time.monotonic() + TIMEOUT_S)


def hold_call(connection: StreamConnection, call_id: int, body: bytes = b"") -> None:
    """Send a message that may wait for the next one."""
    connection.send(make_call(call_id, body), body, (), time.monotonic() + TIMEOUT_S, hold_back=True)


def write_raw(connection: StreamConnection, data: bytes) -> None:
    """Send raw bytes, which need not be a frame."""
    connection._write([data], (), time.monotonic() + TIMEOUT_S)


def receive_frames(connection: StreamConnection, num_frames: int) -> list[framing.Frame]:
    frames: list[framing.Frame] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(frames) < num_frames:
        read = connection.read_nowait()
        frames += read or []
        if read is None:
            assert time.monotonic() < deadline, f"{len(frames)} of {num_frames} frames arrived in time"
            connection.wait_readable(0.1)
    assert len(frames) == num_frames
    return frames


def receive_tensors(frame: framing.Frame) -> list[torch.Tensor]:
    message = frame.message
    assert isinstance(message, Call | Reply)
    buffers = iter(frame.buffers)
    return [tensors.rebuild(meta, buffers) for meta in message.tensors]


def end_of(connection: StreamConnection, frames: list[framing.Frame] | None = None) -> TransportError:
    """Read to the end and return the error that ended it; earlier frames are added to `frames`."""
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


_SIZES = (0, 1, 100, 16 * KIB - 1, 16 * KIB, 64 * KIB - 200, 64 * KIB, 64 * KIB + 1, 200_000, 3 * MIB + 5)


def check_frames_of_all_sizes(make_pair: MakePair) -> None:
    """Bodies of any size arrive whole, both ways, in order."""
    with make_pair(StreamOptions()) as pair:
        for sender, receiver in pair.directions:
            bodies = [bytes([size % 251]) * size for size in _SIZES]
            with Sender(partial(_send_all, sender, bodies)):
                frames = receive_frames(receiver, len(bodies))
            assert call_ids(frames) == list(range(len(bodies)))
            assert [bytes(frame.body) for frame in frames] == bodies


def check_many_frames_in_one_write(make_pair: MakePair) -> None:
    """Several frames may arrive in one read."""
    with make_pair(StreamOptions()) as pair:
        stream = b"".join(framing.encode(make_call(i, b"x" * i), i) + b"x" * i for i in range(200))
        with Sender(lambda: write_raw(pair.near, stream)):
            frames = receive_frames(pair.far, 200)
        assert [len(frame.body) for frame in frames] == list(range(200))


def check_a_reader_may_wait(make_pair: MakePair) -> None:
    """One read for each time that data is ready misses nothing, whatever the transport has read ahead."""
    with make_pair(StreamOptions()) as pair:
        for size in _SIZES:
            with Sender(partial(send_call, pair.near, size, b"x" * size)):
                frames: list[framing.Frame] = []
                deadline = time.monotonic() + TIMEOUT_S
                while not frames and time.monotonic() < deadline:
                    if pair.far.has_hidden_bytes() or pair.far.wait_readable(0.1):
                        frames += pair.far.read_nowait() or []
            assert [len(frame.body) for frame in frames] == [size]
        assert not pair.far.has_hidden_bytes()


def check_frames_held_back(make_pair: MakePair) -> None:
    """Frames that were held back leave with the next frame or with `flush`, in order, small or large."""
    with make_pair(StreamOptions()) as pair:
        for number in range(50):
            hold_call(pair.near, number, b"x" * 900)  # together more than are joined
        send_call(pair.near, 50, b"y" * 100_000)
        assert call_ids(receive_frames(pair.far, 51)) == list(range(51))
        hold_call(pair.near, 51)
        assert pair.near.has_held_back
        pair.near.flush()
        assert not pair.near.has_held_back
        assert call_ids(receive_frames(pair.far, 1)) == [51]


def check_threads_may_send_at_once(make_pair: MakePair) -> None:
    """Frames of several threads never mix."""
    num_threads, num_frames = 6, 30
    with make_pair(StreamOptions()) as pair:

        def send(number: int) -> None:
            for i in range(num_frames):
                size = (number * 7919 + i * 3571) % (100 * KIB)
                values = [torch.full((size,), number, dtype=torch.uint8)] if i % 2 else []
                send_call(pair.near, number, bytes([number]) * (size // 3), values)

        senders = [Sender(partial(send, number)) for number in range(num_threads)]
        frames = receive_frames(pair.far, num_threads * num_frames)
        for sender in senders:
            sender.join()
    counts = [0] * num_threads
    for frame, number in zip(frames, call_ids(frames), strict=True):
        counts[number] += 1
        assert bytes(frame.body) == bytes([number]) * len(frame.body)
        assert all(bool((value == number).all()) for value in receive_tensors(frame))
    assert counts == [num_frames] * num_threads


def check_tensors_of_many_kinds(make_pair: MakePair) -> None:
    """Dtypes, layouts and views arrive as they were."""
    values = _sample_tensors()
    with make_pair(StreamOptions()) as pair:
        for sender, receiver in pair.directions:
            with Sender(partial(send_call, sender, 1, b"args", values)):
                (frame,) = receive_frames(receiver, 1)
            arrived = receive_tensors(frame)
            assert bytes(frame.body) == b"args"
            assert len(arrived) == len(values)
            for got, sent in zip(arrived, values, strict=True):
                assert (got.dtype, got.shape, got.layout) == (sent.dtype, sent.shape, sent.layout)
                assert _are_equal(got, sent), sent


def check_many_large_tensors(make_pair: MakePair) -> None:
    """More large tensors than one frame may carry descriptors for, frame after frame, while the receiver is late."""
    with make_pair(StreamOptions(shared_memory_from=4 * KIB)) as pair:
        values = [torch.full((4 * KIB,), i, dtype=torch.uint8) for i in range(70)]
        bodies = [b"b" * 60_000, b"b" * 60_000, b""]
        with Sender(partial(_send_all, pair.near, bodies, values)) as sender:
            sender.wait(0.3)  # by then everything is under way, or as much as the connection takes
            held = receive_frames(pair.far, len(bodies))
        for frame in held:
            assert all(bool((value == i).all()) for i, value in enumerate(receive_tensors(frame)))


def check_large_tensors_again_and_again(make_pair: MakePair) -> None:
    """Memory that is used again holds the new message, and never that of a tensor that is still in use."""
    with make_pair(StreamOptions()) as pair:
        kept = []
        for i in range(12):
            value = torch.full((256 * KIB,), float(i))
            with Sender(partial(send_call, pair.near, i, b"", [value])):
                (frame,) = receive_frames(pair.far, 1)
            (arrived,) = receive_tensors(frame)
            assert bool((arrived == i).all())
            if i % 3 == 0:
                kept.append((i, arrived))
            del frame, arrived
        assert all(bool((value == i).all()) for i, value in kept)


def check_sending_captures(make_pair: MakePair) -> None:
    """Changes after `send` has returned do not affect what is sent."""
    with make_pair(StreamOptions()) as pair:
        values = [torch.zeros(100), torch.zeros(500_000), torch.zeros(4_000)]

        def send_and_change() -> None:
            send_call(pair.near, 1, b"", values)
            for value in values:
                value.fill_(7)

        with Sender(send_and_change) as sender:
            frames = receive_frames(pair.far, 1)
            sender.join()
        assert all(not value.any() for value in receive_tensors(frames[0]))


def check_tensors_outlive_the_connection(make_pair: MakePair) -> None:
    """Received tensors stay valid after both ends are closed."""
    with make_pair(StreamOptions()) as pair:
        with Sender(lambda: send_call(pair.near, 1, b"", [torch.ones(300_000)])):
            (frame,) = receive_frames(pair.far, 1)
        (arrived,) = receive_tensors(frame)
    assert float(arrived.sum()) == 300_000


def check_large_segments_are_read_into_place(make_pair: MakePair) -> None:
    """Bytes of a large segment are read directly into its final buffer."""
    with make_pair(StreamOptions(shared_memory_from=1 << 40)) as pair:
        value = torch.arange(1 << 20)
        num_direct = 0
        frames: list[framing.Frame] = []
        with Sender(lambda: send_call(pair.near, 1, b"", [value])):
            deadline = time.monotonic() + TIMEOUT_S
            while not frames and time.monotonic() < deadline:
                num_direct += pair.far.decoder.writable() is not None
                read = pair.far.read_nowait()
                frames += read or []
                if read is None:
                    pair.far.wait_readable(0.1)
        assert torch.equal(receive_tensors(frames[0])[0], value)
        assert num_direct > 0


def _sample_tensors() -> list[torch.Tensor]:
    """Return small and large tensors of every family of dtypes, views, conjugates, sparse layouts."""
    base = torch.arange(120_000, dtype=torch.float32)
    dense: list[Any] = [base.to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int8)]
    dense += [base > 5, torch.complex(base, -base).conj(), base, base.reshape(300, 400).t(), base[::7]]
    dense += [torch.ones(1).expand(2_000), torch.empty(0, 3), torch.tensor(5), torch.tensor(2.5, dtype=torch.float64)]
    matrix = torch.diag(torch.arange(1.0, 51.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once that CSR is new
        return [*dense, matrix.to_sparse(), matrix.to_sparse_csr()]


def _are_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.layout != torch.strided:
        first, second = first.to_dense(), second.to_dense()
    return torch.equal(first.resolve_conj(), second.resolve_conj())


def _send_all(connection: StreamConnection, bodies: list[bytes], values: Sequence[torch.Tensor] = ()) -> None:
    for call_id, body in enumerate(bodies):
        send_call(connection, call_id, body, values)


def check_peer_close_is_a_loss(make_pair: MakePair) -> None:
    """A close by the peer raises `ConnectionLost`, for the reader at once and for the sender soon."""
    for closer, other in ((0, 1), (1, 0)):
        with make_pair(StreamOptions()) as pair:
            ends = (pair.near, pair.far)
            send_call(ends[closer], 1, b"last words")
            ends[closer].close()
            assert bytes(receive_frames(ends[other], 1)[0].body) == b"last words"
            assert type(end_of(ends[other])) is ConnectionLost
            wait_until(partial(_cannot_send, ends[other]), TIMEOUT_S, "the sender notices")


def check_own_close_is_told_apart(make_pair: MakePair) -> None:
    """After `close`, which may be repeated, sending and reading raise `ConnectionClosed`."""
    with make_pair(StreamOptions()) as pair:
        pair.near.close()
        pair.near.close()
        assert pair.near.is_closed
        for values in ([], [torch.ones(3)], [torch.ones(100_000)]):
            error = error_of(partial(send_call, pair.near, 1, b"", values))
            assert isinstance(error, ConnectionClosed), "a closed connection took a message"
        assert type(end_of(pair.near)) is ConnectionClosed


def check_close_wakes_a_waiting_reader(make_pair: MakePair) -> None:
    """Closing the connection wakes a thread that waits for data."""
    with make_pair(StreamOptions()) as pair:
        outcome: list[TransportError] = []
        is_waiting = threading.Event()

        def read() -> None:
            is_waiting.set()
            outcome.append(end_of(pair.near))

        with Sender(read):
            assert is_waiting.wait(TIMEOUT_S)
            pair.near.close()
        assert isinstance(outcome[0], ConnectionClosed)


def check_close_wakes_a_waiting_sender(make_pair: MakePair) -> None:
    """Closing the connection raises `ConnectionClosed` in a thread that waits to send."""
    with make_pair(StreamOptions(shared_memory_from=1 << 40)) as pair:
        outcome: list[Exception | None] = []
        before, large = pair.near.bytes_sent, torch.zeros(32 * MIB, dtype=torch.uint8)
        with Sender(lambda: outcome.append(error_of(lambda: send_call(pair.near, 1, b"", [large])))):
            wait_until(lambda: pair.near.bytes_sent > before, TIMEOUT_S, "the first bytes leave")
            pair.near.close()
        assert [type(error) for error in outcome] == [ConnectionClosed]


def check_end_inside_a_frame(make_pair: MakePair) -> None:
    """A truncated frame never arrives."""
    whole = framing.encode(make_call(1, b"x" * 1000), 1000) + b"x" * 1000
    for size in (1, framing.PREFIX_BYTES, framing.PREFIX_BYTES + 3, len(whole) - 1):
        with make_pair(StreamOptions()) as pair:
            write_raw(pair.near, whole[:size])
            pair.near.close()
            assert isinstance(end_of(pair.far), ConnectionLost)


def check_garbage_ends_only_its_connection(make_pair: MakePair) -> None:
    """Bytes that are not a frame raise `DecodeError`; a second connection is not affected."""
    garbage = [b"GET / HTTP/1.1\r\n" + b"x" * 100, b"\0" * 64, framing.encode(make_call(1, b""), 0)[:-1] + b"\xc1"]
    options = StreamOptions()
    with make_pair(options) as healthy:
        for data in garbage:
            with make_pair(options) as pair:
                write_raw(pair.near, data)
                assert isinstance(end_of(pair.far), DecodeError)
                pair.far.close()
                assert isinstance(end_of(pair.near), TransportError)
            send_call(healthy.near, 5, b"fine")
            assert bytes(receive_frames(healthy.far, 1)[0].body) == b"fine"


def check_limits_are_kept_on_both_sides(make_pair: MakePair) -> None:
    """A message that is too large is refused before it is sent; the receiver refuses it before it allocates memory."""
    with make_pair(StreamOptions(limits=Limits(frame_bytes=100 * KIB), shared_memory_from=1 << 40)) as pair:
        error = error_of(lambda: send_call(pair.near, 1, b"", [torch.zeros(100_000)]))
        assert isinstance(error, LimitExceeded), "a frame beyond the limit was sent"
        send_call(pair.near, 2, b"still fine")
        assert call_ids(receive_frames(pair.far, 1)) == [2]
        write_raw(pair.near, framing.encode(Call(1, "f", 0.0, 0, 1 << 30), 1 << 30))
        assert isinstance(end_of(pair.far), LimitExceeded)


def check_send_has_a_deadline(make_pair: MakePair) -> None:
    """A peer that does not read blocks the sender until its deadline; a truncated frame ends the connection."""
    with make_pair(StreamOptions(shared_memory_from=1 << 40)) as pair:
        large = torch.zeros(32 * MIB, dtype=torch.uint8)
        start = time.monotonic()
        error = error_of(lambda: send_call(pair.near, 1, b"", [large], deadline=start + 0.2))
        assert isinstance(error, TimeoutError), "32 MiB went to a peer that does not read"
        assert time.monotonic() - start < TIMEOUT_S
        assert pair.near.is_closed, "half a frame is on its way, nothing sensible can follow it"
        assert isinstance(end_of(pair.far), ConnectionLost)


def check_full_connection_recovers(make_pair: MakePair) -> None:
    """A small frame that timed out was either not sent at all or ended the connection."""
    with make_pair(StreamOptions()) as pair:
        num_sent = 0
        try:
            while num_sent < 100_000:
                hold_call(pair.near, num_sent, b"x" * 100)  # it was accepted, so it must not get lost either
                num_sent += 1
                send_call(pair.near, num_sent, b"x" * 8_000, deadline=time.monotonic() + 0.05)
                num_sent += 1
        except TimeoutError:
            pass
        assert 0 < num_sent < 100_000
        if pair.near.is_closed:
            frames: list[framing.Frame] = []
            assert isinstance(end_of(pair.far, frames), ConnectionLost)
        else:
            frames = receive_frames(pair.far, num_sent - 1)
            send_call(pair.near, num_sent, b"after", deadline=time.monotonic() + TIMEOUT_S)
            frames += receive_frames(pair.far, 2)
            assert bytes(frames[-1].body) == b"after"
        assert call_ids(frames) == list(range(len(frames)))


def check_nothing_is_left(make_pair: MakePair) -> None:
    """Closing frees every descriptor and mapping, also with tensors in use and messages unread."""
    with LeakCheck(TIMEOUT_S):
        with make_pair(StreamOptions()) as pair:
            values = [torch.ones(100_000) for _ in range(4)]
            with Sender(lambda: send_call(pair.near, 1, b"", values)):
                frames = receive_frames(pair.far, 1)
            send_call(pair.near, 2, b"", [torch.ones(8)])
        del frames


def _cannot_send(connection: StreamConnection) -> bool:
    error = error_of(lambda: send_call(connection, 1, b"x"))
    assert error is None or type(error) is ConnectionLost
    return error is not None


TRANSPORT_CHECKS: tuple[TransportCheck, ...] = tuple(
    found for name, found in list(globals().items()) if name.startswith("check_")
)
"""Every check above, in the order in which `check_transport` runs them."""


def check_transport(make_pair: MakePair) -> None:
    """Run every check.

    Args:
        make_pair: Creates a new connection with the given options.

    Raises:
        AssertionError: The transport breaks a rule.
    """
    for check in TRANSPORT_CHECKS:
        check(make_pair)
