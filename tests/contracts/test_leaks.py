"""A leak of any kind is found, named, and makes the test fail that has it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import conftest
from gradwire import rpc
from gradwire.observe import events
from gradwire.testing import LeakCheck, LeakFound, local_agents, wait_until
from gradwire.transports.shared_memory import LendingArena, is_available

Leak = Callable[[], contextlib.AbstractContextManager[object]]


@contextlib.contextmanager
def thread(name: str, *, daemon: bool) -> Iterator[None]:
    end = threading.Event()
    leaked = threading.Thread(target=end.wait, args=(30,), name=name, daemon=daemon)
    leaked.start()
    yield
    end.set()
    leaked.join(10)


@contextlib.contextmanager
def folder() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="gradwire-"):
        yield


@contextlib.contextmanager
def process() -> Iterator[None]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield
    child.communicate(b"\n", timeout=20)


@contextlib.contextmanager
def mapping() -> Iterator[None]:
    if not is_available():
        pytest.skip("needs sealed memfds")
    arena = LendingArena(1 << 20)
    descriptor = arena.offer(100)
    assert descriptor is not None
    os.close(descriptor)
    yield
    arena.close()


@contextlib.contextmanager
def file_descriptor() -> Iterator[None]:
    descriptor = os.open(__file__, os.O_RDONLY)
    yield
    os.close(descriptor)


@contextlib.contextmanager
def eventfd() -> Iterator[None]:
    descriptor = os.eventfd(0)
    yield
    os.close(descriptor)


@contextlib.contextmanager
def shared_file() -> Iterator[None]:
    path = Path(f"/dev/shm/gradwire-test-{os.getpid()}")
    path.touch()
    yield
    path.unlink()


@contextlib.contextmanager
def subscription() -> Iterator[None]:
    unsubscribe = events.subscribe(on_event)
    yield
    unsubscribe()


def on_event(event: events.Event) -> None:
    """Do nothing."""


@contextlib.contextmanager
def log_handler() -> Iterator[None]:
    handler = logging.NullHandler()
    logging.getLogger("gradwire").addHandler(handler)
    yield
    logging.getLogger("gradwire").removeHandler(handler)


@contextlib.contextmanager
def current_worker() -> Iterator[None]:
    with local_agents(1) as (agent,):
        rpc.set_current_agent(agent)
    try:
        yield  # it is closed and still the current one, so that no cluster can be started
    finally:
        rpc.set_current_agent(None)


@pytest.mark.parametrize(
    ("leak", "name"),
    [
        (lambda: thread("gradwire-a-clock", daemon=True), "thread gradwire-a-clock"),
        (lambda: thread("somebody", daemon=False), "thread somebody"),
        (lambda: socket.socket(socket.AF_UNIX), "descriptor socket"),
        (file_descriptor, f"descriptor {__file__}"),
        (eventfd, "descriptor anon_inode:[eventfd]"),
        (mapping, "shared memory /memfd:gradwire"),
        (shared_file, f"shared file /dev/shm/gradwire-test-{os.getpid()}"),
        (folder, "folder /tmp/"),
        (process, "process python"),
        (subscription, "subscription of on_event"),
        (log_handler, "log handler NullHandler"),
        (current_worker, "current worker a"),
    ],
    ids=[
        "thread",
        "other thread",
        "socket",
        "file",
        "eventfd",
        "mapping",
        "shared file",
        "folder",
        "process",
        "subscription",
        "log handler",
        "current worker",
    ],
)
def test_a_leak_is_found_and_named(leak: Leak, name: str) -> None:
    check = LeakCheck(timeout_s=0.05)
    assert check.leaks() == []
    with leak():
        with pytest.raises(LeakFound, match="left behind") as found:
            check.check()
        assert name in str(found.value)
    check.check()
    assert check.leaks() == []


def test_what_was_there_before_is_no_leak() -> None:
    with socket.socket(), thread("gradwire-old", daemon=True):
        with LeakCheck(timeout_s=0.05) as check:
            assert check.leaks() == []
        assert "clean" in repr(check)


def test_a_second_of_the_same_kind_is_a_leak() -> None:
    with socket.socket():
        check = LeakCheck(timeout_s=0.05)
        with socket.socket():
            assert check.leaks() == ["descriptor socket"]


def test_daemon_threads_of_others_are_no_leak() -> None:
    check = LeakCheck(timeout_s=0.05)
    with thread("somebody", daemon=True):
        assert check.leaks() == []


def test_what_ends_in_time_is_no_leak() -> None:
    check = LeakCheck(timeout_s=10)
    end = threading.Event()
    late = threading.Thread(target=lambda: end.wait(10), name="gradwire-late")
    late.start()
    assert check.leaks() == ["thread gradwire-late"]
    threading.Timer(0.1, end.set).start()
    check.check()
    assert not late.is_alive()


def test_the_failure_of_the_block_comes_first() -> None:
    problem = ValueError("the real problem")
    check = LeakCheck(timeout_s=0.05)
    with thread("gradwire-left", daemon=True):
        assert check.leaks() == ["thread gradwire-left"]
        check.__exit__(ValueError, problem, None)
        with pytest.raises(LeakFound):
            check.__exit__(None, None, None)


def test_a_fork_server_may_stay() -> None:
    check = LeakCheck(timeout_s=0.05)
    program = "open('/proc/self/comm', 'w').write('gw-forkserver'); print(flush=True); input()"
    ours, theirs = socket.socketpair()
    with (
        theirs,
        subprocess.Popen([sys.executable, "-c", program], stdin=ours, stdout=subprocess.PIPE) as server,
    ):
        ours.close()
        assert server.stdout is not None
        assert server.stdout.readline() == b"\n"
        assert check.leaks() == []
        theirs.send(b"\n")
        assert server.wait(20) == 0


@pytest.mark.slow
def test_a_leak_fails_the_test(tmp_path: Path) -> None:
    """The whole way: a test that leaks, run by pytest under the conftest of this project."""
    text = Path(conftest.__file__).read_text()
    patience = "LeakCheck(timeout_s=15.0)"
    assert patience in text
    (tmp_path / "conftest.py").write_text(text.replace(patience, "LeakCheck(timeout_s=0.2)"))
    (tmp_path / "test_leaking.py").write_text(
        "import os\nkept = []\ndef test_leaking(): kept.append(os.eventfd(0))\ndef test_clean(): assert kept\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    path = os.pathsep.join(sys.path)
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert run.returncode == 1
    assert "left behind: descriptor anon_inode:[eventfd]" in run.stdout
    assert "2 passed, 1 error" in run.stdout


def test_waiting_names_what_did_not_come() -> None:
    with pytest.raises(TimeoutError, match=r"timed out after 0.02 s waiting for: the moon"):
        wait_until(lambda: False, 0.02, "the moon")
    answers = iter([False, False, True])
    wait_until(lambda: next(answers), 5)
    assert next(answers, "used up") == "used up"
