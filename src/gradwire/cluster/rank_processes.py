"""`gradwire run`: one program in several processes of this machine, each of which knows its rank from its environment.

    gradwire run --+-- rank 0, 1, ...    each in a session of its own; the kernel kills them with their parent
                   +-- guard             ends what the ranks started, if `gradwire run` itself is killed

`RunState` decides; `RankProcesses` starts, signals, reaps and prints.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import IO, NamedTuple

from gradwire.cluster._output import Stream, WorkerOutput
from gradwire.cluster._process import die_with_parent
from gradwire.cluster.status import describe_exit

_LOOPBACK = "127.0.0.1"
_READ_BYTES = 1 << 16
_LAST_READS = 16  # a pipe holds 64 KiB; further output of a detached process is not waited for
_OTHER_LAUNCHERS = ("TORCHELASTIC_",)  # variables that describe a world outside this one


class SignalRanks(NamedTuple):
    """Send a signal to these ranks."""

    ranks: tuple[int, ...]
    signum: int


class Say(NamedTuple):
    """Print a line for the user."""

    text: str


Action = SignalRanks | Say


class RunState:
    """Decides when to stop the ranks and which exit code to use. No processes and no clock."""

    def __init__(self, num_ranks: int, grace_s: float) -> None:
        self._grace_s = grace_s
        self._running = set(range(num_ranks))
        self.exit_code: int | None = None  # decided by the first that fails, or by a signal; None for no trouble so far
        self.deadline: float | None = None  # when the ranks that are left are killed; None while they may run

    @property
    def is_over(self) -> bool:
        return not self._running

    def on_exited(self, rank: int, status: int, now: float) -> list[Action]:
        """Handle the exit of a rank; `status` is that of `os.waitpid`."""
        self._running.discard(rank)
        code = os.waitstatus_to_exitcode(status)
        if code == 0 or self.exit_code is not None:
            return []
        self.exit_code = code if code > 0 else 128 - code
        text = f"rank {rank} {'was ' if code < 0 else ''}{describe_exit(status)}"
        if not self._running:
            return [Say(text)]
        return [Say(f"{text}; stopping {self._others()}"), *self._end(signal.SIGTERM, now)]

    def on_signal(self, signum: int, now: float) -> list[Action]:
        """Forward a signal; a second one, or one while the ranks are being stopped, kills them."""
        if self.exit_code is None:
            self.exit_code = 128 + signum
        if self.deadline is not None:
            return self._kill()
        return self._end(signum, now)

    def on_time(self, now: float) -> list[Action]:
        if self.deadline is None or now < self.deadline or not self._running:
            return []
        return [Say(f"killing {self._others()}: still running after {self._grace_s:g} s"), *self._kill()]

    def _end(self, signum: int, now: float) -> list[Action]:
        self.deadline = now + self._grace_s
        return [SignalRanks(tuple(sorted(self._running)), signum)]

    def _kill(self) -> list[Action]:
        self.deadline = float("inf")
        return [SignalRanks(tuple(sorted(self._running)), signal.SIGKILL)]

    def _others(self) -> str:
        ranks = ", ".join(map(str, sorted(self._running)))
        return f"rank{'s' if len(self._running) > 1 else ''} {ranks}"


def make_environment(
    rank: int, num_ranks: int, run_id: str, port: int, num_threads: int, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of one rank, as read by `init_rpc`, torch and `Cluster.from_env`.

    Args:
        rank: Rank of the process.
        num_ranks: Number of ranks.
        run_id: Identifies this run.
        port: Loopback port on which rank 0 may serve a meeting point.
        num_threads: Threads per torch operation, unless the user has set it.
        inherited: The environment of the command.
    """
    kept = {name: value for name, value in inherited.items() if not name.startswith(_OTHER_LAUNCHERS)}
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "PYTHONUNBUFFERED": "1",  # lines appear when they are printed
        **kept,
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(port),
        "GRADWIRE_RANK": str(rank),
        "GRADWIRE_WORLD_SIZE": str(num_ranks),
        "GRADWIRE_RUN_ID": run_id,
        "GRADWIRE_LAUNCHER": "gradwire run",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of `gradwire run`."""

    command: Sequence[str]  # the program of every rank, with its arguments
    num_ranks: int
    num_threads: int
    grace_s: float


def run_ranks(options: RunOptions, say: Callable[[str], None]) -> int:
    """Run a program in several processes until all have exited, and return the exit code of the command.

    Args:
        options: What to run.
        say: Called with lines for the user, who also sees what the ranks print.
    """
    with contextlib.ExitStack() as stack:
        return RankProcesses(options, say, stack).run()


class RankProcesses:
    """The processes of one run. Used by the main thread of a process that has no other; `stack` undoes what it does."""

    def __init__(self, options: RunOptions, say: Callable[[str], None], stack: contextlib.ExitStack) -> None:
        self._options = options
        self._say = say
        self._state = RunState(options.num_ranks, options.grace_s)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by rank: those that have not been reaped
        self._outputs = [WorkerOutput(f"rank{rank}", rank) for rank in range(options.num_ranks)]
        self._guard = _Guard()
        stack.callback(self._guard.close)
        self._selector = selectors.DefaultSelector()
        stack.callback(self._selector.close)
        stack.enter_context(self._watching_signals())
        self._port = stack.enter_context(reserve_port())
        stack.callback(self._end_all)

    def run(self) -> int:
        run_id = secrets.token_hex(8)
        for rank in range(self._options.num_ranks):
            self._start(rank, run_id)
        while not self._state.is_over:
            for key, _ in self._selector.select(self._time_left()):
                key.data()
            self._perform(self._state.on_time(time.monotonic()))
            self._refresh()
        return self._state.exit_code or 0

    def _start(self, rank: int, run_id: str) -> None:
        options = self._options
        process = subprocess.Popen(
            options.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=make_environment(rank, options.num_ranks, run_id, self._port, options.num_threads, os.environ),
            start_new_session=True,  # Ctrl-C comes from us alone, and SIGKILL can reach what the rank started
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509  # this process has one thread
        )
        self._processes[rank] = process
        self._guard.watch(process.pid)
        self._outputs[rank].release()
        for stream, pipe in _pipes_of(process):
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, partial(self._on_output, rank, stream, pipe))

    @contextlib.contextmanager
    def _watching_signals(self) -> Iterator[None]:
        """Deliver signals as bytes to a socket that the selector watches. The process exits after that."""
        arriving, wakeup = socket.socketpair()
        for end in (arriving, wakeup):
            end.setblocking(False)
        # What was ignored when the command began stays ignored, e.g. SIGHUP under nohup.
        ending = [signum for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if _is_handled(signum)]
        for signum in (*ending, signal.SIGCHLD):
            signal.signal(signum, _note_signal)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        self._selector.register(arriving, selectors.EVENT_READ, partial(self._on_signals, arriving))
        try:
            yield
        finally:
            for signum in ending:
                signal.signal(signum, signal.SIG_IGN)  # the command is about to end, and its code is decided
            signal.set_wakeup_fd(-1)
            arriving.close()
            wakeup.close()

    def _on_signals(self, arriving: socket.socket) -> None:
        for signum in arriving.recv(4096):
            if signum != signal.SIGCHLD:
                self._perform(self._state.on_signal(signum, time.monotonic()))
        self._reap()

    def _reap(self) -> None:
        for rank, process in tuple(self._processes.items()):
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            # While the zombie is there its number cannot mean another group: now is the time to end what it started.
            _kill_group(process.pid)
            del self._processes[rank]
            self._guard.forget(process.pid)
            _, status = os.waitpid(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            self._finish_output(rank, process)
            self._perform(self._state.on_exited(rank, status, time.monotonic()))

    def _finish_output(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        for stream, pipe in _pipes_of(process):
            for _ in range(_LAST_READS):
                if not self._on_output(rank, stream, pipe):
                    break
            self._close_output(rank, stream, pipe)

    def _on_output(self, rank: int, stream: Stream, pipe: IO[bytes]) -> bool:
        """Forward the output of a rank; return False if there is no more for now."""
        if pipe.closed:
            return False  # by an event before this one
        try:
            data = os.read(pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._outputs[rank].feed(stream, data, time.monotonic())
        else:
            self._close_output(rank, stream, pipe)
        return bool(data)

    def _close_output(self, rank: int, stream: Stream, pipe: IO[bytes]) -> None:
        if not pipe.closed:
            self._selector.unregister(pipe)
            pipe.close()
            self._outputs[rank].feed(stream, b"", time.monotonic())

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Say):
                self._say(action.text)
                continue
            for rank in action.ranks:
                if rank in self._processes:
                    os.kill(self._processes[rank].pid, action.signum)

    def _time_left(self) -> float | None:
        """Return the seconds until the next timed action, or None."""
        times = [output.refresh_at for output in self._outputs if output.refresh_at is not None]
        if self._state.deadline not in (None, float("inf")):
            times.append(self._state.deadline)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _refresh(self) -> None:
        now = time.monotonic()
        for output in self._outputs:
            output.refresh(now)

    def _end_all(self) -> None:
        """Kill the remaining processes if `run` failed unexpectedly."""
        for process in self._processes.values():
            _kill_group(process.pid)
            process.wait()
            for _, pipe in _pipes_of(process):
                pipe.close()


def _pipes_of(process: subprocess.Popen[bytes]) -> list[tuple[Stream, IO[bytes]]]:
    assert process.stdout is not None
    assert process.stderr is not None
    return [("stdout", process.stdout), ("stderr", process.stderr)]


class _Guard:
    """A process that waits for this one to exit, and then kills the processes started by the ranks.

    The kernel kills the ranks themselves, but not the processes that these have started.
    """

    def __init__(self) -> None:
        reader, self._pipe = os.pipe2(os.O_CLOEXEC)
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._pipe)
            _guard_until_end(reader)
            os._exit(0)
        os.close(reader)

    def watch(self, pid: int) -> None:
        self._tell(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        """Tell the guard that the process id of this rank may be reused from now on."""
        self._tell(f"-{pid}\n")

    def _tell(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it was killed; the ranks will still end with this process
            os.write(self._pipe, text.encode())

    def close(self) -> None:
        os.close(self._pipe)
        os.waitpid(self._pid, 0)  # it ends at once, or has been killed


def _guard_until_end(reader: int) -> None:
    os.setsid()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    silent = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(silent, fd)  # the reader of our output must not wait for the guard
    watched: set[int] = set()
    with open(reader, encoding="ascii") as lines:  # no deadline: this wait is the purpose of the process
        for line in lines:
            (watched.add if line[0] == "+" else watched.discard)(int(line[1:]))
    for pid in watched:
        _kill_group(pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _is_handled(signum: int) -> bool:
    return signal.getsignal(signum) is not signal.SIG_IGN


def _note_signal(signum: int, frame: FrameType | None) -> None:
    """Do nothing: Python writes the byte of a signal only if it has a handler. The loop does the rest."""


@contextlib.contextmanager
def reserve_port() -> Iterator[int]:
    """Reserve a free loopback port, on which a rank can still listen.

    Both ends ask for SO_REUSEADDR, as servers do, and this one never listens.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((_LOOPBACK, 0))
        yield int(holder.getsockname()[1])


def threads_for(num_ranks: int) -> int:
    """Return how many threads a torch operation may have in each rank, so that together they fit the processors."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


def python_command(program: str, arguments: Sequence[str], *, is_module: bool) -> list[str]:
    """Return the command that runs a script or module with the Python of this process."""
    return [sys.executable, *(["-m"] if is_module else []), program, *arguments]
