"""What a transport must do with messages: all of them arrive, whole, in order, and as they were when they were sent."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from gradwire.config import KIB, MIB
from gradwire.testing._pairs import (
    TIMEOUT_S,
    MakePair,
    Sender,
    call_ids,
    hold_call,
    make_call,
    receive_frames,
    receive_tensors,
    send_call,
    write_raw,
)
from gradwire.transports.stream import StreamConnection, StreamOptions
from gradwire.wire import framing

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
    """Frames need not come one by one."""
    with make_pair(StreamOptions()) as pair:
        stream = b"".join(framing.encode(make_call(i, b"x" * i), i) + b"x" * i for i in range(200))
        with Sender(lambda: write_raw(pair.near, stream)):
            frames = receive_frames(pair.far, 200)
        assert [len(frame.body) for frame in frames] == list(range(200))


def check_a_reader_may_wait(make_pair: MakePair) -> None:
    """One read for each time that there is something: nothing is missed, whatever the transport has read ahead."""
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
    """They leave with the next frame or with `flush`, in order, and small or large makes no difference."""
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
    """What is changed right after `send` has returned was sent as it was before."""
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
    """What has arrived stays valid after both ends are closed."""
    with make_pair(StreamOptions()) as pair:
        with Sender(lambda: send_call(pair.near, 1, b"", [torch.ones(300_000)])):
            (frame,) = receive_frames(pair.far, 1)
        (arrived,) = receive_tensors(frame)
    assert float(arrived.sum()) == 300_000


def check_large_segments_are_read_into_place(make_pair: MakePair) -> None:
    """While a large segment arrives, its final buffer is what the bytes are read into."""
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
    """Small and large, every family of dtypes, views, conjugates, sparse layouts."""
    base = torch.arange(120_000, dtype=torch.float32)
    dense: list[Any] = [base.to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int8)]
    dense += [base > 5, torch.complex(base, -base).conj(), base, base.reshape(300, 400).t(), base[::7]]
    dense += [torch.ones(1).expand(2_000), torch.empty(0, 3), torch.tensor(5), torch.tensor(2.5, dtype=torch.float64)]
    matrix = torch.diag(torch.arange(1.0, 51.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that CSR is new
        return [*dense, matrix.to_sparse(), matrix.to_sparse_csr()]


def _are_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.layout != torch.strided:
        first, second = first.to_dense(), second.to_dense()
    return torch.equal(first.resolve_conj(), second.resolve_conj())


def _send_all(connection: StreamConnection, bodies: list[bytes], values: Sequence[torch.Tensor] = ()) -> None:
    for call_id, body in enumerate(bodies):
        send_call(connection, call_id, body, values)
