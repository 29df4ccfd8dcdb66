"""A connection: frames that are cut off, and frames that arrive before their shared memory is filled."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire
import quick_python
from cluster.processes import thread_states
from gradwire import _interrupts
from gradwire.errors import CannotSend, ConnectionClosed, ConnectionLost, DecodeError, LimitExceeded, RpcTimeout
from gradwire.testing import ConnectionPair, local_agents, wait_until
from gradwire.testing.transports import (
    ANYTHING,
    Sender,
    call_ids,
    end_of,
    hold_call,
    receive_frames,
    receive_tensors,
    send_call,
)
from gradwire.transports import stream
from gradwire.transports.shared_memory import is_available
from gradwire.transports.stream import Channel, StreamConnection, StreamOptions, _SharedParts
from gradwire.transports.unix import UnixListener, UnixTransport
from gradwire.wire.framing import Frame
from gradwire.wire.messages import Call, Goodbye
from gradwire.wire.serialization import EMPTY, pack_bare, unpack
from gradwire.wire.tensors import rebuild

KIB, MIB = 1 << 10, 1 << 20
DEADLINE_S = 20.0

pytestmark = pytest.mark.skipif(not is_available(), reason="needs sealed memfds")


@pytest.fixture(autouse=True)
def announcing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_ANNOUNCED_BYTES", MIB)  # also where there is one core


@pytest.fixture
def listener() -> Iterator[UnixListener]:
    with tempfile.TemporaryDirectory(prefix="s-") as path:
        made = UnixTransport(Path(path), StreamOptions()).listen("w")
        yield made
        made.close()


@pytest.fixture
def pair(listener: UnixListener) -> Iterator[ConnectionPair]:
    transport = UnixTransport(Path(listener.uri.removeprefix("unix://")).parent, StreamOptions())
    near = transport.connect(listener.uri, time.monotonic() + DEADLINE_S)
    far = listener.accept_nowait()
    assert far is not None
    with ConnectionPair(near, far) as made:
        for (
            sender,
            receiver,
        ) in made.directions:  # the first tensor goes through the socket, and a slot for the next along
            with Sender(partial(send_call, sender, 0, b"", [numbers(256 * KIB)])):
                receive_frames(receiver, 1)
        yield made


class Copying:
    """Stops every sender between its frame and the copy, until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        fill = _SharedParts.fill

        def held(shared: _SharedParts) -> None:
            self.begun.set()
            assert self.may_go_on.wait(DEADLINE_S)
            fill(shared)

        monkeypatch.setattr(_SharedParts, "fill", held)


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copying]:
    made = Copying(monkeypatch)
    yield made
    made.may_go_on.set()


def numbers(num_bytes: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + num_bytes // 4, dtype=torch.int32)


def read_in_vain(connection: StreamConnection) -> None:
    """Until the frame is there but for its shared memory."""
    wait_until(lambda: connection.read_nowait() == [], DEADLINE_S, "a frame")
    assert connection.has_hidden_bytes()


# Late bytes


def test_a_frame_is_handed_out_when_its_bytes_are_there(pair: ConnectionPair, copying: Copying) -> None:
    with Sender(lambda: send_call(pair.near, 1, b"", [numbers(256 * KIB)])) as sender:
        read_in_vain(pair.far)
        assert pair.far.read_nowait() == []
        assert not sender.wait(0.0)  # it has captured nothing yet
        copying.may_go_on.set()
        (frame,) = receive_frames(pair.far, 1)
    assert torch.equal(receive_tensors(frame)[0], numbers(256 * KIB))
    assert not pair.far.has_hidden_bytes()


def test_reading_in_vain_takes_no_time(pair: ConnectionPair, copying: Copying) -> None:
    with Sender(lambda: send_call(pair.near, 1, b"", [numbers(256 * KIB)])):
        read_in_vain(pair.far)
        began = time.monotonic()
        for _ in range(5):
            assert pair.far.read_nowait() == []
        assert time.monotonic() - began < 30.0
        copying.may_go_on.set()
        receive_frames(pair.far, 1)


def test_frames_behind_it_keep_their_order(pair: ConnectionPair, copying: Copying) -> None:
    with Sender(lambda: send_call(pair.near, 1, b"", [numbers(256 * KIB)])):
        assert copying.begun.wait(DEADLINE_S)
        send_call(pair.near, 2, b"body")  # the copy holds no lock
        read_in_vain(pair.far)
        send_call(pair.near, 3)
        assert pair.far.read_nowait() == []
        copying.may_go_on.set()
        frames: list[Frame] = []
        wait_until(lambda: frames.extend(pair.far.read_nowait() or ()) or len(frames) == 3, DEADLINE_S, "three frames")
    assert call_ids(frames) == [1, 2, 3]


def test_the_slot_counts_as_lent_and_is_used_again(pair: ConnectionPair, copying: Copying) -> None:
    with Sender(lambda: send_call(pair.near, 1, b"", [numbers(256 * KIB)])):
        read_in_vain(pair.far)
        assert pair.near.arena.statistics().num_lent == 1
        copying.may_go_on.set()
        receive_frames(pair.far, 1)
    assert pair.near.arena.statistics().num_lent == 0
    for number in range(3):
        send_call(pair.near, number, b"", [numbers(256 * KIB, number)])
        assert torch.equal(receive_tensors(receive_frames(pair.far, 1)[0])[0], numbers(256 * KIB, number))
    assert pair.near.arena.statistics().num_created == 1


# Mixed frames


def test_announced_copied_and_inline_parts_of_one_frame(pair: ConnectionPair) -> None:
    values = [
        numbers(256 * KIB),
        numbers(16),
        numbers(600 * KIB, 7),
        numbers(512 * KIB, 9),  # beyond what is announced in one frame
        torch.arange(300 * KIB, dtype=torch.uint8).view(-1, 64).t(),  # not in a row
        torch.eye(400, dtype=torch.int64).to_sparse(),
        numbers(4 * MIB),
        torch.empty(0),
        torch.ones(40_000, requires_grad=True),
        torch.ones(40_000, dtype=torch.complex64).conj(),
        torch.ones(100_000, dtype=torch.bool),
    ]
    for sender, receiver in pair.directions:
        for number in range(4):  # the first brings the slots for the others
            with Sender(partial(send_call, sender, number, b"body" * 1000, values)):
                (frame,) = receive_frames(receiver, 1)
            assert bytes(frame.body) == b"body" * 1000
            assert all(
                torch.equal(got.to_dense().resolve_conj(), sent.to_dense().resolve_conj())
                for got, sent in zip(receive_tensors(frame), values, strict=True)
            )


def test_many_senders_with_bodies_larger_than_the_socket_takes(pair: ConnectionPair) -> None:
    """A sender that waits for room on the socket has not filled its slot: nobody may wait for that instead of reading."""
    num_senders, num_calls, body = 4, 12, bytes(1 * MIB)

    def send_all(first: int) -> None:
        for number in range(first, first + num_calls):
            send_call(pair.near, number, body, [numbers(128 * KIB, number)])

    senders = [Sender(partial(send_all, index * 100)) for index in range(num_senders)]
    wrong, got, deadline = [], 0, time.monotonic() + DEADLINE_S
    while got < num_senders * num_calls and time.monotonic() < deadline:
        frames = pair.far.read_nowait()
        if frames is None:
            pair.far.wait_readable(0.1)
        for frame in frames or ():
            got += 1
            (number,) = call_ids([frame])
            wrong += [] if torch.equal(receive_tensors(frame)[0], numbers(128 * KIB, number)) else [number]
    for sender in senders:
        sender.join()
    assert (got, wrong) == (num_senders * num_calls, [])


def test_where_stores_are_not_ordered_bytes_go_first(
    pair: ConnectionPair, copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_ANNOUNCED_BYTES", 0)
    with Sender(lambda: send_call(pair.near, 1, b"", [numbers(256 * KIB)])):
        (frame,) = receive_frames(pair.far, 1)  # while the sender is held where it would copy
        assert torch.equal(receive_tensors(frame)[0], numbers(256 * KIB))
        copying.may_go_on.set()


# Nothing leaves that may not be followed by its bytes


class Foreign(torch.Tensor):
    """Not known to the other side."""


def test_what_cannot_be_sent_is_found_before_the_frame_leaves(pair: ConnectionPair) -> None:
    before = pair.near.bytes_sent
    with pytest.raises(CannotSend):
        send_call(pair.near, 1, b"", [numbers(256 * KIB), torch.ones(2).as_subclass(Foreign)])
    with pytest.raises(LimitExceeded):
        send_call(pair.near, 1, b"", [numbers(64 * KIB)] * 5000)
    assert pair.near.bytes_sent == before
    assert pair.near.arena.statistics().num_lent == 0
    send_call(pair.near, 2, b"", [numbers(256 * KIB)])
    assert torch.equal(receive_tensors(receive_frames(pair.far, 1)[0])[0], numbers(256 * KIB))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_copy_that_fails_ends_the_connection(
    pair: ConnectionPair, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fail(shared: _SharedParts) -> None:
        raise error

    monkeypatch.setattr(_SharedParts, "fill", fail)
    with pytest.raises(error):
        send_call(pair.near, 1, b"", [numbers(256 * KIB)])
    assert pair.near.is_closed
    frames: list[Frame] = []
    assert isinstance(end_of(pair.far, frames), ConnectionLost)
    assert frames == []


# Ends


def test_bytes_that_never_come_end_the_connection(
    pair: ConnectionPair, copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_FILL_S", 0.05)
    with Sender(lambda: send_call(pair.near, 1, b"", [numbers(256 * KIB)])):
        frames: list[Frame] = []
        error = end_of(pair.far, frames)
        assert isinstance(error, DecodeError)
        assert "not filled" in str(error)
        assert isinstance(end_of(pair.far, frames), DecodeError)  # and it stays so
        copying.may_go_on.set()
    assert frames == []


def test_the_end_of_the_sender_is_noticed(pair: ConnectionPair, copying: Copying) -> None:
    with Sender(lambda: send_call(pair.near, 1, b"", [numbers(256 * KIB)])):
        read_in_vain(pair.far)
        pair.near.close()
        began = time.monotonic()
        assert isinstance(end_of(pair.far), ConnectionLost)
        assert time.monotonic() - began < 30.0
        copying.may_go_on.set()


def test_the_own_end_is_noticed(pair: ConnectionPair, copying: Copying) -> None:
    with Sender(lambda: send_call(pair.near, 1, b"", [numbers(256 * KIB)])):
        read_in_vain(pair.far)
        pair.far.close()
        assert isinstance(end_of(pair.far), ConnectionClosed)
        copying.may_go_on.set()


def test_what_was_filled_before_the_end_counts(pair: ConnectionPair, copying: Copying) -> None:
    with Sender(lambda: send_call(pair.near, 1, b"", [numbers(256 * KIB)])):
        read_in_vain(pair.far)
        copying.may_go_on.set()
    pair.near.close()
    (frame,) = receive_frames(pair.far, 1)
    assert torch.equal(receive_tensors(frame)[0], numbers(256 * KIB))
    assert isinstance(end_of(pair.far), ConnectionLost)


SENDER = """
import os, signal, sys, time, torch
from pathlib import Path
from gradwire.testing.transports import ANYTHING, send_call
from gradwire.transports import stream
from gradwire.transports.stream import StreamOptions
from gradwire.transports.unix import UnixTransport

fill = stream._SharedParts.fill
def hit(shared):
    if shared._unfilled:
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
    fill(shared)
stream._SharedParts.fill = hit
stream._ANNOUNCED_BYTES = 1 << 20
near = UnixTransport(Path(sys.argv[1]).parent, StreamOptions()).connect("unix://" + sys.argv[1], time.monotonic() + 20)
send_call(near, 0, b"", [torch.arange(65536, dtype=torch.int32)])
while not any(slot.state.value == 0 for slot in near.arena._offered):
    time.sleep(0.001)
send_call(near, 1, b"", [torch.arange(65536, dtype=torch.int32)])
sys.stdin.read()
"""


@pytest.fixture
def start_sender(listener: UnixListener) -> Iterator[Callable[[str], tuple[int, StreamConnection]]]:
    """Starts a process that sends one tensor, and is hit by a signal between the frame and the copy."""
    processes: list[subprocess.Popen[bytes]] = []
    connections: list[StreamConnection] = []

    def start(signal_name: str) -> tuple[int, StreamConnection]:
        path = listener.uri.removeprefix("unix://")
        source = str(Path(gradwire.__file__).parents[1])
        processes.append(
            quick_python.Popen(
                [sys.executable, "-c", SENDER, path, signal_name],
                stdin=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
            )
        )
        wait_until(
            lambda: connections.extend(filter(None, [listener.accept_nowait()])) or connections, 60.0, "a connection"
        )
        connections[0].decoder.accept = ANYTHING
        assert call_ids(receive_frames(connections[0], 1)) == [0]  # it brings the slot
        return processes[0].pid, connections[0]

    yield start
    for process in processes:
        process.kill()
        process.communicate()
    for connection in connections:
        connection.close()


def test_a_sender_that_is_killed_in_between(start_sender: Callable[[str], tuple[int, StreamConnection]]) -> None:
    _, far = start_sender("SIGKILL")
    frames: list[Frame] = []
    assert isinstance(end_of(far, frames), ConnectionLost)
    assert frames == []


def test_a_sender_that_is_stopped_in_between(start_sender: Callable[[str], tuple[int, StreamConnection]]) -> None:
    pid, far = start_sender("SIGSTOP")
    read_in_vain(far)
    assert far.read_nowait() == []
    wait_until(lambda: set(thread_states(pid)) == {"T"}, 20.0, "that it is stopped")
    os.kill(pid, signal.SIGCONT)
    (frame,) = receive_frames(far, 1)
    assert torch.equal(receive_tensors(frame)[0], numbers(256 * KIB))


# Above the connection


def echo(value: torch.Tensor) -> torch.Tensor:
    return value


def test_a_call_keeps_its_deadline_and_the_connection_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on, fill = threading.Event(), threading.Event(), _SharedParts.fill

    def hold_replies(shared: _SharedParts) -> None:
        if threading.current_thread().name.startswith("gradwire-b-"):
            begun.set()
            assert may_go_on.wait(DEADLINE_S)
        fill(shared)

    monkeypatch.setattr(_SharedParts, "fill", hold_replies)
    with local_agents(2, trust="code") as (first, _):
        assert torch.equal(first.call("b", echo, (numbers(256 * KIB),)), numbers(256 * KIB))  # brings slots
        began = time.monotonic()
        for number in range(2):  # the second one waits behind the first
            with pytest.raises(RpcTimeout):
                first.call("b", echo, (numbers(256 * KIB, number),), timeout_s=0.3)
        assert begun.is_set()
        assert time.monotonic() - began < 10.0
        may_go_on.set()
        assert torch.equal(first.call("b", echo, (numbers(256 * KIB, 2),)), numbers(256 * KIB, 2))


# Frames that are cut off


class CutChannel(Channel):
    """Writes the first bytes of a frame, and then raises what it is told to; before the first byte, it has no room."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.error: BaseException | None = None
        self.num_bytes = 0

    def write(self, buffers: Sequence[Any], descriptors: Sequence[int]) -> int | None:
        if self.error is None:
            return super().write(buffers, descriptors)
        if self.num_bytes:
            size, self.num_bytes = self.num_bytes, 0
            return super().write([b"".join(buffers)[:size]], ())
        raise self.error


@pytest.fixture
def cut_pair() -> Iterator[ConnectionPair]:
    first, second = socket.socketpair()
    near = StreamConnection(CutChannel(first), StreamOptions(), slots=None, label="near")
    far = StreamConnection(Channel(second), StreamOptions(), slots=None, label="far")
    with ConnectionPair(near, far) as made:
        yield made


def channel_of(connection: StreamConnection) -> CutChannel:
    assert isinstance(connection.channel, CutChannel)
    return connection.channel


@pytest.mark.parametrize("num_bytes", [0, 1, 30])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), RuntimeError("?"), TimeoutError()], ids=repr)
def test_an_exception_in_the_middle_of_a_frame_closes_the_connection(
    cut_pair: ConnectionPair, error: BaseException, num_bytes: int
) -> None:
    channel_of(cut_pair.near).error, channel_of(cut_pair.near).num_bytes = error, num_bytes
    with pytest.raises(type(error)):
        send_call(cut_pair.near, 1, b"body", [torch.ones(3)])
    assert cut_pair.near.is_closed
    with pytest.raises(ConnectionClosed):
        send_call(cut_pair.near, 2)
    frames: list[Frame] = []
    assert isinstance(end_of(cut_pair.far, frames), ConnectionLost)
    assert frames == []


def test_the_end_of_a_connection_does_not_hide_what_came_before_it(cut_pair: ConnectionPair) -> None:
    send_call(cut_pair.far, 1, b"last words")
    channel_of(cut_pair.near).error = ConnectionLost("broken")
    with pytest.raises(ConnectionLost):
        send_call(cut_pair.near, 1)
    assert call_ids(receive_frames(cut_pair.near, 1)) == [1]


def test_nothing_follows_half_a_frame(cut_pair: ConnectionPair) -> None:
    """The connection stays open for what is unread, even if it could be written to again."""
    channel = channel_of(cut_pair.near)
    channel.error, channel.num_bytes = ConnectionLost("no buffer space"), 5
    with pytest.raises(ConnectionLost):
        send_call(cut_pair.near, 1, b"body")
    channel.error = None
    with pytest.raises(ConnectionLost, match="no buffer space"):
        send_call(cut_pair.near, 2)
    assert len(cut_pair.far.channel._socket.recv(100)) == 5
    assert not cut_pair.near.is_closed


@pytest.mark.parametrize("error", [KeyboardInterrupt, None], ids=["ctrl-c", "deadline"])
def test_an_exception_before_the_first_byte_leaves_the_connection_as_it_was(
    cut_pair: ConnectionPair, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None
) -> None:
    near, num_polls = cut_pair.near, 0

    def poll(poller: Any, timeout: float) -> Any:
        nonlocal num_polls
        num_polls += 1
        if error is not None:
            raise error
        return []

    hold_call(near, 1, b"held back")
    with monkeypatch.context() as patch:
        patch.setattr(_interrupts, "poll", poll)
        patch.setattr(CutChannel, "write", lambda *_: None)  # no room
        with pytest.raises(error or TimeoutError):
            near.send(Goodbye("too late"), deadline=time.monotonic())
    assert num_polls == 1
    assert not near.is_closed
    assert near.has_held_back
    send_call(near, 2)
    assert call_ids(receive_frames(cut_pair.far, 2)) == [1, 2]


def test_a_thread_that_waits_for_its_turn_lets_ctrl_c_in(
    cut_pair: ConnectionPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_interrupts, "deliver", interrupt)
    with cut_pair.near._write_lock, pytest.raises(KeyboardInterrupt):
        send_call(cut_pair.near, 1)
    assert not cut_pair.near.is_closed
    send_call(cut_pair.near, 2)
    assert call_ids(receive_frames(cut_pair.far, 1)) == [2]


def test_a_frame_to_be_held_back_waits_for_its_turn_no_longer_than_its_deadline(cut_pair: ConnectionPair) -> None:
    """Another thread may write to a worker that does not read, without a deadline of its own."""
    near, errors = cut_pair.near, []

    def send() -> None:
        try:
            near.send(Goodbye("too late"), deadline=time.monotonic() + 0.1, hold_back=True)
        except TimeoutError as error:
            errors.append(error)

    sender = threading.Thread(target=send)
    with near._write_lock:
        sender.start()
        sender.join(5.0)
        assert errors, "the thread still waits"
    assert not near.is_closed


# The path of a small message


def num_calls(function: Callable[[], object]) -> tuple[int, int]:
    """Return how many functions of gradwire were entered, and how many of C they called."""
    found: Counter[str] = Counter()
    package = str(Path(gradwire.__file__).parent)

    def note(frame: Any, event: str, argument: Any) -> None:
        found[event] += frame.f_code.co_filename.startswith(package)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found["call"], found["c_call"]


def test_a_small_message_takes_a_handful_of_calls(pair: ConnectionPair) -> None:
    tensor, limits = torch.ones(8), StreamOptions().limits

    def send_tensor() -> None:
        packed = pack_bare(((tensor,), {}))
        assert packed is not None
        pair.near.send(Call(1, "m:f", 1.0, packed.codec, 0), packed.body, packed.tensors)

    def send_oneway() -> None:
        pair.near.send(Call(0, "~m.f", 0.0, EMPTY, 0, (), {"note": [1, 2]}))

    def read() -> None:
        (frame,) = pair.far.read_nowait() or ()
        message = frame.message
        assert isinstance(message, Call)
        tensors = [rebuild(meta, iter(frame.buffers)) for meta in message.tensors]
        unpack(message.codec, frame.body, tensors, "code", limits)

    for _ in range(2):  # the first time, some things are made
        found = [num_calls(step) for step in (send_tensor, read, send_oneway, read)]
    bounds = [(7, 30), (9, 22), (4, 16), (7, 18)]
    assert all(python <= most[0] and c <= most[1] for (python, c), most in zip(found, bounds, strict=True)), found
