"""A scheduler of plain processes on this machine, to test what all schedulers need.

    test  --- length, message --->  worker process (`worker_program.py`)
          <--- length, message ---

``prefix`` goes in front of the command: ``["ip", "netns", "exec", "gw1"]``: the process is then on another "machine".
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import quick_python
from gradwire.cluster.scheduler import RemoteProcess
from gradwire.cluster.status import describe_exit
from gradwire.errors import WorkerStartFailed

PROGRAM = Path(__file__).with_name("worker_program.py")
SIZE = struct.Struct("!I")


@dataclass(frozen=True)
class Machine:
    """Where processes run, and how they are told about it."""

    prefix: Sequence[str] = ()  # of the command
    host: str = "machine0"  # the name that workers give
    address: str | None = None  # where others reach it; None for the way to the driver
    environment: Mapping[str, str] = field(default_factory=dict)
    program: str = str(PROGRAM)


def receive(channel: socket.socket) -> bytes | None:
    """Read one message; None at the end of the channel."""
    head = _receive_exactly(channel, SIZE.size)
    return None if head is None else _receive_exactly(channel, SIZE.unpack(head)[0])


def send(channel: socket.socket, message: bytes) -> None:
    channel.sendall(SIZE.pack(len(message)) + message)


def _receive_exactly(channel: socket.socket, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        part = channel.recv(count - len(data))
        if not part:
            return None
        data += part
    return data


class ScheduledProcess:
    """One process.

    Attributes:
        traffic: All that went over its channel.
        last_words: What it had printed when it was closed.
    """

    last_words = ""

    def __init__(self, machine: Machine, local_index: int, log: Path) -> None:
        self.place = f"{machine.host}, slot {local_index}"
        self.machine = machine
        self.local_index = local_index
        self.traffic: list[bytes] = []
        self._log = log
        self._channel, theirs = socket.socketpair()
        command = [
            *machine.prefix,
            sys.executable,
            machine.program,
            str(theirs.fileno()),
            machine.host,
            str(local_index),
        ]
        with theirs, open(log, "wb") as output:
            self._process = quick_python.Popen(
                [*command, machine.address or ""],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path)), **machine.environment},
                start_new_session=True,  # Ctrl-C in a terminal reaches the driver alone, as with a real scheduler
            )
        self.pid = self._process.pid

    def exchange(self, message: bytes, deadline: float) -> bytes:
        self._channel.settimeout(max(0.001, deadline - time.monotonic()))
        self.traffic.append(message)
        answer: bytes | None = None
        try:
            send(self._channel, message)
            answer = receive(self._channel)
        except TimeoutError as error:
            raise TimeoutError(f"{self.place} printed:\n{self.printed()}") from error
        except OSError:
            pass  # it has ended
        if answer is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, min(10.0, deadline - time.monotonic())))
            raise WorkerStartFailed(f"{self.end_reason() or 'closed its channel'}; it printed:\n{self.printed()}")
        self.traffic.append(answer)
        return answer

    def printed(self) -> str:
        return self._log.read_text(errors="replace")

    def end_reason(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        return describe_exit(code << 8 if code >= 0 else -code)

    def kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._process.wait(30.0)
        self._channel.close()
        if self._log.exists():
            self.last_words = self.printed()


class ProcessScheduler:
    """Starts processes on "machines" in turn: process i on machine ``i % len(machines)``.

    Attributes:
        processes: All that were started.
    """

    def __init__(self, machines: Sequence[Machine] = (Machine(),), bind_host: str = "127.0.0.1") -> None:
        self.processes: list[ScheduledProcess] = []
        self._machines = machines
        self._bind_host = bind_host
        self._folder = tempfile.TemporaryDirectory(prefix="logs-")
        self.is_closed = False

    def launch(self, count: int, deadline: float, replaces: RemoteProcess | None = None) -> Sequence[ScheduledProcess]:
        made = []
        for number in range(count):
            if isinstance(replaces, ScheduledProcess):
                machine, local_index = replaces.machine, replaces.local_index
            else:
                machine = self._machines[number % len(self._machines)]
                local_index = sum(process.machine is machine for process in self.processes)
            log = Path(self._folder.name) / f"{len(self.processes)}.log"
            made.append(ScheduledProcess(machine, local_index, log))
            self.processes.append(made[-1])
        return made

    def bind_host(self) -> str:
        return self._bind_host

    def describe(self) -> str:
        return f"processes {', '.join(str(process.pid) for process in self.processes)} of the tests"

    def close(self) -> None:
        self.is_closed = True
        for process in self.processes:
            process.close()
        self._folder.cleanup()
