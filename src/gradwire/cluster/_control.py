"""The messages between the driver, the fork server and the workers of one machine.

    driver  -- MakeFolder, ForgetFolder, ForkWorker + 4 fds, SendSignal --> fork server
            <-- ForkServerReady, FolderMade, WorkerForked, WorkerExited --

    driver  -- Leave -->                                                    worker      (its lifeline)
            <-- Listening --

Both run over SOCK_SEQPACKET, so one send is one message and an empty read is the end. A packet is limited to some
hundred kilobytes, which the environment of a process may exceed; a worker's `WorkerStart` therefore travels in an
anonymous file whose descriptor is one of the four.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from gradwire.cluster.launcher import WorkerSpec
from gradwire.types import WorkerAddress

MAX_PACKET = 1 << 16
NUM_WORKER_FDS = 4  # WorkerStart, stdout, stderr, lifeline


class MakeFolder(msgspec.Struct, frozen=True, tag=True):
    """Make a private folder for sockets. The fork server makes it, so that it can remove it if the driver is killed."""

    base: str


class AdoptFolder(msgspec.Struct, frozen=True, tag=True):
    """Remove that folder if the driver is killed: another fork server made it, which has ended."""

    path: str


class ForgetFolder(msgspec.Struct, frozen=True, tag=True):
    """The driver has removed that folder itself."""

    path: str


class ForkWorker(msgspec.Struct, frozen=True, tag=True):
    """Fork a worker; the four descriptors come with this message. `ticket` names it until it has ended."""

    ticket: int


class SendSignal(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to a worker; SIGKILL reaches the processes that it started, too."""

    ticket: int
    signum: int


class ForkServerReady(msgspec.Struct, frozen=True, tag=True):
    """Everything is imported; `num_threads` must be 1 for a fork to be safe."""

    num_threads: int


class FolderMade(msgspec.Struct, frozen=True, tag=True):
    """The answer to MakeFolder; `error` is empty if there is a folder."""

    path: str
    error: str = ""


class WorkerForked(msgspec.Struct, frozen=True, tag=True):
    """The worker has a process."""

    ticket: int
    pid: int


class WorkerExited(msgspec.Struct, frozen=True, tag=True):
    """The worker's process is gone."""

    ticket: int
    status: int  # as `os.waitpid` gives it, or -1 if no process could be made
    error: str = ""  # why no process could be made


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The worker can be called."""

    address: WorkerAddress


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Shut down cleanly."""


ToForkServer = MakeFolder | AdoptFolder | ForgetFolder | ForkWorker | SendSignal
FromForkServer = ForkServerReady | FolderMade | WorkerForked | WorkerExited
ToWorker = Leave
ControlMessage = ToForkServer | FromForkServer | ToWorker | Listening


def text_path() -> list[str]:
    """Return `sys.path` without what Python ignores there, such as a `pathlib.Path` that was added by mistake."""
    entries: list[object] = list(sys.path)
    return [entry for entry in entries if isinstance(entry, str)]


class Surroundings(msgspec.Struct, frozen=True):
    """The part of the driver's process that a worker takes over. Bytes, because names of files need not be text."""

    environment: dict[bytes, bytes]
    path: tuple[bytes, ...]
    argv: tuple[bytes, ...]
    folder: bytes

    @classmethod
    def capture(cls, environment: dict[str, str]) -> Surroundings:
        """Return those of this process, with additions to the environment."""
        try:
            folder = os.getcwdb()
        except FileNotFoundError:
            folder = b""  # the driver's folder was removed: the worker stays where the fork server is
        return cls(
            environment={**os.environb, **{os.fsencode(k): os.fsencode(v) for k, v in environment.items()}},
            path=tuple(os.fsencode(entry) for entry in text_path()),
            argv=tuple(os.fsencode(argument) for argument in sys.argv),
            folder=folder,
        )

    def adopt(self) -> None:
        os.environb.clear()
        os.environb.update(self.environment)
        sys.path[:] = [os.fsdecode(entry) for entry in self.path]
        sys.argv[:] = [os.fsdecode(argument) for argument in self.argv]
        if self.folder:
            os.chdir(self.folder)
        importlib.invalidate_caches()  # files may have come since the fork server looked


class WorkerStart(msgspec.Struct, frozen=True):
    """Everything that a forked worker needs to know. Holds the cluster's token: never in argv or the environment."""

    spec: WorkerSpec
    socket_folder: str
    surroundings: Surroundings


def _rebuild(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(kind)


_encoder = msgspec.msgpack.Encoder(enc_hook=os.fspath)
_control_decoder = msgspec.msgpack.Decoder(ControlMessage)
_start_decoder = msgspec.msgpack.Decoder(WorkerStart, dec_hook=_rebuild)


def make_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_message(channel: socket.socket, message: ControlMessage, fds: tuple[int, ...] = ()) -> None:
    data = _encoder.encode(message)
    if fds:
        socket.send_fds(channel, [data], list(fds))
    else:
        channel.send(data)


def receive_message(channel: socket.socket) -> tuple[ControlMessage | None, list[int]]:
    """Read one message and its descriptors; None is the end of the channel."""
    try:
        data, fds, _, _ = socket.recv_fds(channel, MAX_PACKET, NUM_WORKER_FDS)
    except ConnectionResetError:
        return None, []  # the other side ended with messages unread
    for fd in fds:
        os.set_inheritable(fd, False)
    return (_control_decoder.decode(data) if data else None), fds


def write_start(start: WorkerStart) -> int:
    """Write it into an anonymous file and return the descriptor, which the caller closes."""
    fd = os.memfd_create("gradwire-worker-start", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(_encoder.encode(start))
    return fd


def read_start(fd: int) -> WorkerStart:
    with open(fd, "rb") as file:
        file.seek(0)
        return _start_decoder.decode(file.read())
