"""Sockets of one user: private folders, who may connect, and what is left of earlier workers."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import quick_python
from gradwire.errors import AuthenticationFailed, ConfigurationError, ConnectFailed, DecodeError, ResourceExhausted
from gradwire.testing import ConnectionPair, wait_until
from gradwire.testing.transports import ANYTHING, Sender, end_of, receive_frames, receive_tensors, send_call
from gradwire.transports import unix
from gradwire.transports.stream import StreamConnection, StreamOptions
from gradwire.transports.unix import SocketFolder, UnixListener, UnixTransport


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="s-") as path:
        yield Path(path)


@pytest.fixture
def transport(folder: Path) -> UnixTransport:
    return UnixTransport(folder, StreamOptions())


def soon() -> float:
    return time.monotonic() + 10


def connect(transport: UnixTransport, listener: UnixListener) -> tuple[StreamConnection, StreamConnection]:
    near = transport.connect(listener.uri, soon())
    far = listener.accept_nowait()
    assert far is not None
    return near, far


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o755, 0o777])
def test_a_folder_that_others_can_enter_is_refused(folder: Path, transport: UnixTransport, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(ConfigurationError, match="0700"):
        transport.listen("w")
    assert list(folder.iterdir()) == []


def test_a_folder_must_be_there_and_be_one(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be used"):
        UnixTransport(folder / "missing", StreamOptions()).listen("w")
    file = folder / "file"
    file.touch(mode=0o600)
    with pytest.raises(ConfigurationError, match="0700"):
        UnixTransport(file, StreamOptions()).listen("w")


def test_a_path_that_is_too_long_is_refused(folder: Path, transport: UnixTransport) -> None:
    with pytest.raises(ConfigurationError, match="107 bytes"):
        transport.listen("w" * 120)
    longest = 107 - len(os.fsencode(folder / ".sock"))
    listener = transport.listen("w" * longest)
    assert len(listener.uri.removeprefix("unix://")) == 107
    listener.close()


def test_any_name_makes_a_file_in_the_folder(folder: Path, transport: UnixTransport) -> None:
    listener = transport.listen("../a/b:0")
    assert [path.parent for path in folder.iterdir()] == [folder]
    near, far = connect(transport, listener)
    near.close()
    far.close()
    listener.close()


def test_another_user_is_not_let_in(transport: UnixTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = transport.listen("w")
    with monkeypatch.context() as patch:
        near = transport.connect(listener.uri, soon())
        patch.setattr(unix, "peer_uid", lambda sock: os.geteuid() + 1)
        assert listener.accept_nowait() is None
    near.decoder.accept = ANYTHING
    assert "closed by the peer" in str(end_of(near))
    near.close()
    listener.close()


def test_a_listener_of_another_user_is_refused(transport: UnixTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = transport.listen("w")
    monkeypatch.setattr(unix, "peer_uid", lambda sock: os.geteuid() + 1)
    with pytest.raises(AuthenticationFailed, match=f"not user {os.geteuid()}"):
        transport.connect(listener.uri, soon())
    listener.close()


def test_the_kernel_knows_the_user(transport: UnixTransport) -> None:
    first, second = socket.socketpair(socket.AF_UNIX)
    with first, second:
        assert unix.peer_uid(first) == os.geteuid()


def test_nobody_listens(folder: Path, transport: UnixTransport) -> None:
    with pytest.raises(ConnectFailed, match="no answer"):
        transport.connect(f"unix://{folder}/w.sock", soon())


def test_a_process_without_descriptors_says_so(folder: Path, transport: UnixTransport) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(ResourceExhausted, match="Too many open files"):
            transport.connect(f"unix://{folder}/w.sock", time.monotonic() + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_socket_that_was_left_is_replaced(folder: Path, transport: UnixTransport) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(folder / "w.sock"))
    assert (folder / "w.sock").is_socket()
    with pytest.raises(ConnectFailed):
        transport.connect(f"unix://{folder}/w.sock", soon())
    listener = transport.listen("w")
    near, far = connect(transport, listener)
    near.close()
    far.close()
    listener.close()
    assert list(folder.iterdir()) == []


def test_what_cannot_be_replaced_is_named(folder: Path, transport: UnixTransport) -> None:
    (folder / "w.sock").mkdir()
    with pytest.raises(ConfigurationError, match="cannot listen"):
        transport.listen("w")
    assert (folder / "w.sock").is_dir()


def test_a_late_end_leaves_the_successor_alone(transport: UnixTransport) -> None:
    older, newer = transport.listen("w"), transport.listen("w")
    older.close()
    older.close()
    near, far = connect(transport, newer)
    near.close()
    far.close()
    newer.close()
    with pytest.raises(ConnectFailed):
        transport.connect(newer.uri, soon())


def test_descriptors_that_are_no_slots_are_closed(transport: UnixTransport) -> None:
    listener = transport.listen("w")
    near, far = connect(transport, listener)
    read, write = os.pipe()
    far.decoder.accept = ANYTHING
    before = len(os.listdir("/proc/self/fd"))
    near.channel.write([b"G"], [read] * 50)
    assert isinstance(end_of(far), DecodeError)
    far.close()
    near.close()
    assert len(os.listdir("/proc/self/fd")) == before - 2
    for descriptor in (read, write):
        os.close(descriptor)
    listener.close()


def test_large_tensors_leave_the_socket_alone(transport: UnixTransport) -> None:
    listener = transport.listen("w")
    with ConnectionPair(*connect(transport, listener)) as pair:
        with Sender(lambda: send_call(pair.near, 1, b"", [torch.zeros(1 << 20)])):  # a slot for the next one goes along
            receive_frames(pair.far, 1)
        before = pair.near.bytes_sent
        send_call(pair.near, 2, b"", [torch.zeros(1 << 20)])
        assert pair.near.bytes_sent - before < 1000
        arena = pair.near.arena.statistics()
        assert (arena.num_slots, arena.num_created) == (1, 1)
    listener.close()


def test_a_receiver_without_descriptors_gets_its_tensors(transport: UnixTransport) -> None:
    listener = transport.listen("w")
    with ConnectionPair(*connect(transport, listener)) as pair:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        value = torch.arange(70_000.0)
        for number in range(3):
            with Sender(partial(send_call, pair.near, number, b"", [value])) as sender:
                wait_until(lambda: pair.far.wait_readable(0.1), 20, "the frame and its descriptor")
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # the kernel cannot hand any out
                try:
                    (frame,) = receive_frames(pair.far, 1)
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                assert sender.wait(20)
            assert torch.equal(receive_tensors(frame)[0], value)
        assert pair.far._slots is not None
        assert pair.far._slots.statistics().num_created == 0
    listener.close()


def test_descriptors_that_the_kernel_does_not_pass_are_left_out(transport: UnixTransport) -> None:
    listener = transport.listen("w")
    with ConnectionPair(*connect(transport, listener)) as pair:

        class Refusing:
            """Sends, but passes no descriptors: as the kernel does where too many are under way."""

            def sendmsg(self, buffers: Any, ancillary: Any = ()) -> int:
                if ancillary:
                    raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")
                return real.sendmsg(buffers)

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        channel: Any = pair.near.channel
        real, channel._socket = channel._socket, Refusing()
        with Sender(lambda: send_call(pair.near, 1, b"", [torch.ones(70_000)])):
            (frame,) = receive_frames(pair.far, 1)
        assert torch.equal(receive_tensors(frame)[0], torch.ones(70_000))
    listener.close()


def test_accepting_from_a_closed_listener_is_harmless(transport: UnixTransport) -> None:
    listener = transport.listen("w")
    listener.close()
    wait_until(lambda: listener.accept_nowait() is None, 1, "nobody comes")
    assert listener.fileno() == -1


def test_is_private_and_removed() -> None:
    folder = SocketFolder()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.close()
    folder.close()
    assert not folder.path.exists()


def test_one_of_a_killed_process_is_removed_by_the_next() -> None:
    program = (
        "from gradwire.transports.unix import SocketFolder; f = SocketFolder(); print(f.path, flush=True); input()"
    )
    process = quick_python.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": tempfile.gettempdir()},
    )
    assert process.stdout is not None
    path = process.stdout.readline().strip()
    SocketFolder().close()
    assert os.path.isdir(path), "the folder of a process that lives must stay"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    SocketFolder().close()
    assert not os.path.exists(path)
