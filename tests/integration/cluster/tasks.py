"""Functions that the tests run on workers."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import torch

from gradwire import autograd, rpc
from gradwire.cluster import remote_worker
from gradwire.testing import wait_until


@rpc.expose
def add(left: int, right: int = 1) -> int:
    return left + right


def fail(text: str) -> None:
    raise ValueError(text)


def who_am_i() -> str:
    return rpc.get_worker_info().name


def ask_who(name: str) -> str:
    """Lets this worker ask another member of the cluster for its name."""
    return rpc.rpc_sync(name, who_am_i)


def square_unless_three(number: int) -> int:
    if number == 3:
        raise ValueError("three is not allowed")
    return number * number


def describe_process() -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "folder": os.getcwd(),
        "path": list(sys.path),
        "argv": list(sys.argv),
        "colour": os.environ.get("TEST_COLOUR"),
        "threads": torch.get_num_threads(),
        "thread_names": [thread.name for thread in threading.enumerate()],
        "sigint_is_ignored": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
    }


def draw() -> tuple[bool, float, float, float]:
    """Whether numpy's random numbers had been imported, and numbers of Python, numpy and torch."""
    import numpy as np

    return "numpy.random" in sys.modules, random.random(), np.random.random(), torch.rand(()).item()


def speak(out: str, err: str = "") -> None:
    sys.stdout.write(out)
    sys.stderr.write(err)


def process_id(_: int) -> int:
    return os.getpid()


def parent_id(_: int) -> int:
    return os.getppid()


def take_a_moment() -> str:
    threading.Event().wait(0.3)
    return "done"


def crash() -> None:
    ctypes.string_at(0)


def spawn_child() -> int:
    """Starts a process that outlives its parent unless somebody ends it."""
    return subprocess.Popen(["sleep", "100"]).pid


def block_until_killed(ready: str) -> None:
    Path(ready).touch()
    threading.Event().wait(100)


def hold_interpreter(ready: str) -> None:
    """Never gives the interpreter's lock back, and does not care about SIGTERM."""
    # One call of C says so and stays: between two, another thread could take the lock. Unlike CDLL, PyDLL keeps it.
    stay = f"touch {shlex.quote(ready)}; while kill -0 $PPID 2>/dev/null; do sleep 0.2; done"
    ctypes.PyDLL(None).system(stay.encode())


def ignore_sigterm() -> None:
    """Handlers belong to the main thread, which a call does not run in; a mask would not reach others. So ask the kernel."""
    sig_ign = ctypes.c_void_p(1)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(int(signal.SIGTERM), sig_ign)


def is_imported(module: str) -> bool:
    """Whether this worker has a module already."""
    return module in sys.modules


def show_bar(path: str) -> None:
    """Rewrites a line, as progress bars do, and ends it when a file is there."""
    for percent in range(11):
        sys.stderr.write(f"\r{percent:3}%")
        sys.stderr.flush()
    wait_until(Path(path).exists)
    sys.stderr.write("\r100%\n")


def wait_for_ever() -> None:
    threading.Event().wait(600.0)


def add_slowly(number: int) -> int:
    threading.Event().wait(0.2)
    return number + 1


def call_and_mark(name: str, path: str) -> str:
    """Lets this worker call another one, which makes a file and waits until it is gone."""
    return rpc.rpc_sync(name, mark_and_wait, args=(path,))


def mark_and_wait(path: str) -> str:
    Path(path).touch()
    wait_until(lambda: not Path(path).exists(), 60.0)
    return "too late"


def make_weight(value: torch.Tensor) -> torch.Tensor:
    return value.clone().requires_grad_()


def tanh_times(weight: rpc.RRef[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight.local_value())


def times(weight: rpc.RRef[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return x @ weight.local_value()


def gradient_of(context: int, weight: rpc.RRef[torch.Tensor]) -> torch.Tensor:
    return autograd.get_gradients(context)[weight.local_value()]


def print_error(text: str) -> None:
    print(text, file=sys.stderr)


def print_lines(count: int) -> None:
    for number in range(count):
        print(f"line {number}")


def private_key_number() -> bytes:
    """The secret number of this process's key, which the worker holds in memory."""
    key = next(item for item in gc.get_objects() if type(item).__name__ == "ProcessKey")
    return int(key._key.private_numbers().private_value).to_bytes(32, "big")


def ask_control(to: str, operation: str, args: tuple[object, ...]) -> object:
    """Sends a control operation from this worker."""
    return rpc.current_agent().ask(to, operation, tuple(args), 10.0).wait()


_stop_printing = threading.Event()
_num_printed = 0
_printer: threading.Thread | None = None


def start_printing() -> None:
    """Lets a thread of this worker print a line again and again."""
    global _printer

    def run() -> None:
        global _num_printed
        while not _stop_printing.wait(0.001):
            print(f"line {_num_printed}")
            _num_printed += 1

    _printer = threading.Thread(target=run)
    _printer.start()


def stop_printing() -> int:
    """Ends the thread, and returns how many lines it has printed."""
    assert _printer is not None
    _stop_printing.set()
    _printer.join()
    return _num_printed


def print_at_exit(text: str) -> None:
    atexit.register(print, text)


def print_without_end(text: str) -> None:
    print(text, end="")


def report_lost_workers_as_connected() -> None:
    """As if each loss were followed by a connection that was given up while it was being opened."""
    agent = rpc.current_agent()
    remote_worker._is_refusal = lambda error: False
    agent.on_worker_lost(lambda address, _: [callback(address) for callback in agent._connected_callbacks])
