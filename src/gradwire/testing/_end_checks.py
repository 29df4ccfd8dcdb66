"""What a transport must do when a connection ends, breaks, is full, or carries what is no message."""

from __future__ import annotations

import threading
import time
from functools import partial

import torch

from gradwire.config import KIB, MIB, Limits
from gradwire.errors import ConnectionClosed, ConnectionLost, DecodeError, LimitExceeded, TransportError
from gradwire.testing._pairs import (
    TIMEOUT_S,
    MakePair,
    Sender,
    call_ids,
    end_of,
    hold_call,
    make_call,
    receive_frames,
    send_call,
    write_raw,
)
from gradwire.testing.leaks import LeakCheck
from gradwire.testing.waiting import wait_until
from gradwire.transports.stream import StreamConnection, StreamOptions
from gradwire.wire import framing
from gradwire.wire.messages import Call


def check_peer_close_is_a_loss(make_pair: MakePair) -> None:
    """The end of the other side is `ConnectionLost`, for the reader at once and for the sender soon."""
    for closer, other in ((0, 1), (1, 0)):
        with make_pair(StreamOptions()) as pair:
            ends = (pair.near, pair.far)
            send_call(ends[closer], 1, b"last words")
            ends[closer].close()
            assert bytes(receive_frames(ends[other], 1)[0].body) == b"last words"
            assert type(end_of(ends[other])) is ConnectionLost
            error: list[BaseException] = []
            wait_until(partial(_cannot_send, ends[other], error), TIMEOUT_S, "the sender notices")
            assert type(error[0]) is ConnectionLost


def check_own_close_is_told_apart(make_pair: MakePair) -> None:
    """After `close`, which may be repeated, sending and reading say that it was this side."""
    with make_pair(StreamOptions()) as pair:
        pair.near.close()
        pair.near.close()
        assert pair.near.is_closed
        for values in ([], [torch.ones(3)], [torch.ones(100_000)]):
            try:
                send_call(pair.near, 1, b"", values)
            except ConnectionClosed:
                continue
            raise AssertionError("a closed connection took a message")
        assert type(end_of(pair.near)) is ConnectionClosed


def check_close_wakes_a_waiting_reader(make_pair: MakePair) -> None:
    """A thread that waits for something to read does not outlive the connection."""
    with make_pair(StreamOptions()) as pair:
        outcome: list[BaseException] = []
        is_waiting = threading.Event()

        def read() -> None:
            is_waiting.set()
            outcome.append(end_of(pair.near))

        with Sender(read):
            assert is_waiting.wait(TIMEOUT_S)
            pair.near.close()
        assert isinstance(outcome[0], ConnectionClosed)


def check_close_wakes_a_waiting_sender(make_pair: MakePair) -> None:
    """A thread that waits for room is told that this side has closed the connection."""
    with make_pair(StreamOptions(shared_memory_from=1 << 40)) as pair:
        outcome: list[BaseException] = []
        before = pair.near.bytes_sent

        def send() -> None:
            try:
                send_call(pair.near, 1, b"", [torch.zeros(32 * MIB, dtype=torch.uint8)])
            except BaseException as error:
                outcome.append(error)

        with Sender(send):
            wait_until(lambda: pair.near.bytes_sent > before, TIMEOUT_S, "the first bytes leave")
            pair.near.close()
        assert [type(error) for error in outcome] == [ConnectionClosed]


def check_end_inside_a_frame(make_pair: MakePair) -> None:
    """A frame that was cut never arrives, whatever was there of it."""
    whole = framing.encode(make_call(1, b"x" * 1000), 1000) + b"x" * 1000
    for size in (1, framing.PREFIX_BYTES, framing.PREFIX_BYTES + 3, len(whole) - 1):
        with make_pair(StreamOptions()) as pair:
            write_raw(pair.near, whole[:size])
            pair.near.close()
            assert isinstance(end_of(pair.far), ConnectionLost)


def check_garbage_ends_only_its_connection(make_pair: MakePair) -> None:
    """Bytes that are no frame are `DecodeError`; a second connection never notices."""
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
    """What is too large is refused before it leaves, and where it arrives all the same before it is allocated."""
    with make_pair(StreamOptions(limits=Limits(frame_bytes=100 * KIB), shared_memory_from=1 << 40)) as pair:
        try:
            send_call(pair.near, 1, b"", [torch.zeros(100_000)])
        except LimitExceeded:
            pass
        else:
            raise AssertionError("a frame beyond the limit was sent")
        send_call(pair.near, 2, b"still fine")
        assert call_ids(receive_frames(pair.far, 1)) == [2]
        write_raw(pair.near, framing.encode(Call(1, "f", 0.0, 0, 1 << 30), 1 << 30))
        assert isinstance(end_of(pair.far), LimitExceeded)


def check_send_has_a_deadline(make_pair: MakePair) -> None:
    """A peer that does not read costs the sender its deadline, no more; a frame that was cut ends the connection."""
    with make_pair(StreamOptions(shared_memory_from=1 << 40)) as pair:
        large = torch.zeros(32 * MIB, dtype=torch.uint8)
        start = time.monotonic()
        try:
            send_call(pair.near, 1, b"", [large], deadline=start + 0.2)
        except TimeoutError:
            pass
        else:
            raise AssertionError("32 MiB went to a peer that does not read")
        assert time.monotonic() - start < TIMEOUT_S
        assert pair.near.is_closed, "half a frame is on its way, nothing sensible can follow it"
        assert isinstance(end_of(pair.far), ConnectionLost)


def check_full_connection_recovers(make_pair: MakePair) -> None:
    """A small frame that found no room before its deadline either never existed or ended the connection."""
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
    """Closing gives back every descriptor and mapping, with tensors still lent and messages unread."""
    with LeakCheck(TIMEOUT_S):
        with make_pair(StreamOptions()) as pair:
            values = [torch.ones(100_000) for _ in range(4)]
            with Sender(lambda: send_call(pair.near, 1, b"", values)):
                frames = receive_frames(pair.far, 1)
            send_call(pair.near, 2, b"", [torch.ones(8)])
        del frames


def _cannot_send(connection: StreamConnection, error: list[BaseException]) -> bool:
    try:
        send_call(connection, 1, b"x", deadline=time.monotonic() + TIMEOUT_S)
    except TransportError as found:
        error.append(found)
    return bool(error)
