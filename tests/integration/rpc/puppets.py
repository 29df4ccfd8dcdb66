"""Worker processes that a test directs line by line.

    test --source--> puppet (a process of its own): runs it in its main thread
         <--value or error--

One nursery process forks puppets, because importing torch takes longer than most tests; it is a fork itself. A puppet is an
ordinary process: it can be stopped, killed and interrupted, and what it defines belongs to ``__main__``.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import FrameType
from typing import Any

import quick_python

TESTS = Path(__file__).resolve().parents[2]
SOURCES = TESTS.parent / "src"
_START_S = 60.0
_END_S = 60.0
"""Ending an interpreter that has imported torch takes 0.7 s of a processor; others may want the processor, too."""
_SOURCE = "<puppet>"  # the file that tracebacks and frames name for what a test sent
_BEGUN = "begun"  # a puppet's first message about what a test sent


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0) -> bool:
    """Whether the condition becomes true in time."""
    pause, deadline = threading.Event(), time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.01)
    return True


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def environment(folder: str) -> dict[str, str]:
    """What a process needs to find the package, the tests and a short folder for its sockets."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    return {
        **inherited,
        "PYTHONPATH": f"{SOURCES}:{TESTS}:{TESTS / 'integration'}",
        "TMPDIR": folder,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


@dataclass
class PuppetError(Exception):
    """What a puppet's code raised there.

    Attributes:
        kinds: Names of the exception's class and of its bases.
        text: ``str(exception)``.
        traceback: The printed traceback, with all causes.
        fields: The exception's own attributes.
    """

    kinds: list[str]
    text: str
    traceback: str
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.kinds[0]

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}\n{self.traceback}"


class Puppet:
    """One process, seen from the test."""

    def __init__(self, connection: Connection, pid: int) -> None:
        self._connection = connection
        self._has_begun = True
        self.pid = pid

    def start(self, source: str) -> None:
        """Lets the puppet run something; `result` fetches what came of it."""
        self._has_begun = False
        self._connection.send(source)

    def wait_begun(self, timeout_s: float = 20.0) -> None:
        """Waits until the puppet runs what `start` sent: a signal that is sent after this interrupts it."""
        if not self._has_begun:
            message = self._receive(timeout_s)
            if message != _BEGUN:  # it cannot be compiled
                raise PuppetError(*message[1])
            self._has_begun = True

    def result(self, timeout_s: float = 20.0) -> Any:
        """The value of the last line that `start` ran.

        Raises:
            PuppetError: It raised there.
            TimeoutError: Nothing came back in time.
        """
        self.wait_begun(timeout_s)
        is_error, value = self._receive(timeout_s)
        if is_error:
            raise PuppetError(*value)
        return value

    def do(self, source: str, timeout_s: float = 20.0) -> Any:
        """Runs something there and returns the value of its last line."""
        self.start(source)
        return self.result(timeout_s)

    def has_answered(self) -> bool:
        """Whether `result` would return at once."""
        if not self._has_begun and self._connection.poll(0):
            self.wait_begun()
        return self._has_begun and self._connection.poll(0)

    def _receive(self, timeout_s: float) -> Any:
        if not self._connection.poll(timeout_s):
            raise TimeoutError(f"puppet {self.pid} said nothing for {timeout_s} s")
        return self._connection.recv()

    def signal(self, number: int) -> None:
        """Sends a signal; one that stops the process has stopped every thread of it on return."""
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            assert wait_until(self._is_stopped)

    def _is_stopped(self) -> bool:
        tasks = Path(f"/proc/{self.pid}/task").glob("*/stat")
        try:
            return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)
        except OSError:  # a thread has just ended
            return False

    def kill(self) -> None:
        """Ends the process without a word and waits until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        assert wait_until(lambda: not is_alive(self.pid), _END_S)

    def leave(self) -> None:
        """Lets the process end by itself, and waits until it has."""
        self._connection.send(None)
        assert wait_until(lambda: not is_alive(self.pid), _END_S), f"puppet {self.pid} does not end"

    def close(self) -> None:
        self.kill()
        self._connection.close()


class Nursery:
    """Forks puppets; those of a fresh interpreter end as an interpreter does, with all modules taken apart."""

    def __init__(self, *, is_fresh: bool = False) -> None:
        self.folder = tempfile.mkdtemp(prefix="gwr-", dir="/tmp")  # short: socket paths have 107 bytes
        popen = subprocess.Popen if is_fresh else quick_python.Popen
        self._process = popen(
            [sys.executable, "-m", "rpc.puppets"],
            stdin=subprocess.PIPE,
            env=environment(self.folder),
            cwd=TESTS,
            text=True,
        )
        self._num = 0

    def make(self) -> Puppet:
        """A new puppet."""
        assert self._process.stdin is not None
        self._num += 1
        address = f"{self.folder}/p{self._num}"
        with Listener(address, "AF_UNIX") as listener:
            listener._listener._socket.settimeout(_START_S)  # type: ignore[attr-defined]
            self._process.stdin.write(address + "\n")
            self._process.stdin.flush()
            connection = listener.accept()
        return Puppet(connection, connection.recv())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_END_S)
        shutil.rmtree(self.folder, ignore_errors=True)  # killed workers could not remove their sockets


# -- in the nursery and in the puppets -----------------------------------------------------------------------------


def _nursery() -> None:
    import torch

    import gradwire.rpc  # noqa: F401  (imported here, so that every puppet has it)

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # else each puppet would look through all of torch at its end, for half a second
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how puppets ended
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            _serve(line.strip())
            return


def _serve(address: str) -> None:
    signal.signal(signal.SIGINT, _on_interrupt)
    connection = Client(address, "AF_UNIX")
    connection.send(os.getpid())
    namespace = sys.modules["__main__"].__dict__
    exec("import os, sys, threading, time, operator, signal, torch\nfrom gradwire import rpc", namespace)
    exec("from gradwire.errors import *\nfrom rpc import handlers as h", namespace)
    namespace["rpc"] = sys.modules["gradwire.rpc"]
    namespace["_say_begun"] = functools.partial(connection.send, _BEGUN)
    while True:
        try:
            source = connection.recv()
        except EOFError:  # the test is over
            os._exit(0)
        if source is None:
            return
        connection.send(_run(source, namespace))


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    """As gradwire's own inside what the test sent; elsewhere it would cut what puppet and test say to each other."""
    from gradwire import _interrupts

    outer = frame
    while outer is not None:
        if outer.f_code.co_filename == _SOURCE:
            _interrupts._on_interrupt(number, frame)
            return
        outer = outer.f_back
    _interrupts._deferred_since = None


def _run(source: str, namespace: dict[str, Any]) -> tuple[bool, Any]:
    namespace["_value"] = None
    try:
        tree = ast.parse(source)
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            tree.body[-1] = ast.Assign([ast.Name("_value", ast.Store())], tree.body[-1].value)
        # One piece of code, which says itself that it has begun: a signal that comes later hits no other frame.
        tree.body[:0] = ast.parse("_say_begun()").body
        exec(compile(ast.fix_missing_locations(tree), _SOURCE, "exec"), namespace)
        return False, namespace.pop("_value")
    except BaseException as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        plain = {key: value for key, value in vars(error).items() if isinstance(value, str | int | float | None)}
        return True, (kinds, str(error), "".join(traceback.format_exception(error)), plain)


if __name__ == "__main__":
    _nursery()
