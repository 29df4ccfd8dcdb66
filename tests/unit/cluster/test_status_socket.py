"""Who may ask a driver for the status of its cluster, where its socket is, and what is left of it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradwire.cluster import status_socket
from gradwire.cluster.status import ClusterStatus, WorkerStatus
from gradwire.cluster.status_socket import (
    ClusterGone,
    NoReport,
    StatusSocket,
    list_sockets,
    read_report,
    read_reports,
    run_operation,
)
from gradwire.errors import ConfigurationError
from gradwire.testing import wait_until

_WORKER = WorkerStatus(
    name="worker0",
    rank=0,
    role="worker",
    pid=4711,
    state="running",
    uptime_s=3.25,
    rss_bytes=1 << 20,
    calls_served=12,
    restarts=0,
    exit_reason=None,
)


@pytest.fixture(autouse=True)
def runtime_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the test's own for sockets, with a short path."""
    folder = Path(tempfile.mkdtemp(prefix="gwr-", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr(sys, "argv", ["/some/where/train.py", "--lr", "0.1"])
    # Other clusters of this user are not the test's business.
    monkeypatch.setattr(status_socket, "_folders", lambda: [folder / "gradwire"])
    yield folder
    shutil.rmtree(folder)


def answer() -> ClusterStatus:
    return ClusterStatus([_WORKER, dataclasses.replace(_WORKER, name="worker1", state="lost", exit_reason="killed")])


def opened() -> StatusSocket:
    found = StatusSocket.open(answer, lambda: _WORKER)
    assert found is not None
    return found


def test_a_driver_answers_with_the_status_of_its_cluster() -> None:
    with opened() as here:
        assert here.name == f"train-{os.getpid()}"
        (path,) = list_sockets()
        report = read_report(path, 5.0)
        assert (report.name, report.pid) == (here.name, os.getpid())
        assert report.command == ("/some/where/train.py", "--lr", "0.1")
        assert ClusterStatus(report.workers) == answer()
        (again,) = read_reports([path], 5.0)
        assert not isinstance(again, NoReport)
    assert list_sockets() == []


def test_the_socket_is_in_a_folder_of_the_user_alone(runtime_folder: Path) -> None:
    with opened():
        folder = runtime_folder / "gradwire"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o705])
def test_a_folder_that_is_open_to_others_is_not_used(
    runtime_folder: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    (runtime_folder / "gradwire").mkdir()
    (runtime_folder / "gradwire").chmod(mode)
    assert StatusSocket.open(answer, lambda: _WORKER) is None
    assert "`gradwire status` will not show this cluster" in caplog.text
    assert list_sockets() == []


def test_a_link_to_a_folder_is_not_followed(runtime_folder: Path) -> None:
    (runtime_folder / "elsewhere").mkdir(mode=0o700)
    (runtime_folder / "gradwire").symlink_to(runtime_folder / "elsewhere")
    assert StatusSocket.open(answer, lambda: _WORKER) is None


def test_processes_of_other_users_get_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened():
        monkeypatch.setattr(status_socket, "_user_of", lambda _: os.geteuid() + 1)
        with pytest.raises(NoReport, match="being closed"):
            read_report(list_sockets()[0], 5.0)


def test_the_user_of_a_process_is_the_kernel_s_word() -> None:
    here, there = socket.socketpair()
    with here, there:
        assert status_socket._user_of(here) == os.geteuid()


@pytest.mark.parametrize(
    "request_", [b"\x00" * 10_000, b"{}\n", b'{"operation": 1}\n', b'{"operation": "status", "x": 1}\n']
)
def test_a_request_that_is_not_valid_gets_no_answer(request_: bytes) -> None:
    with opened():
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(list_sockets()[0]))
            with contextlib.suppress(ConnectionError):  # the driver has closed already
                client.sendall(request_)
                assert client.recv(1) == b""
        assert read_report(list_sockets()[0], 5.0).workers


def test_an_operation_gives_its_text_or_the_reason_why_not() -> None:
    def refuse(_is_gone: object) -> str:
        raise ConfigurationError("install it")

    with StatusSocket(answer, lambda: _WORKER, {"link": lambda _is_gone: "there", "other": refuse}):
        (path,) = list_sockets()
        assert run_operation(path, "link", 5.0) == "there"
        with pytest.raises(NoReport, match=r"^install it"):
            run_operation(path, "other", 5.0)
        with pytest.raises(NoReport, match="has no 'nothing'"):
            run_operation(path, "nothing", 5.0)


@pytest.mark.parametrize("kind", [RuntimeError, TypeError, KeyError])
def test_what_fails_is_named_and_logged_and_ends_neither_the_driver_nor_the_socket(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> Any:
        raise kind("the agent was shut down")

    with StatusSocket(fail, lambda: _WORKER, {"link": fail}):
        (path,) = list_sockets()
        for _ in range(2):
            with pytest.raises(NoReport, match=rf"{kind.__name__}: .*the agent was shut down"):
                read_report(path, 5.0)
        with pytest.raises(NoReport, match=rf"{kind.__name__}: .*the agent was shut down"):
            run_operation(path, "link", 5.0)
    assert "`gradwire status` failed" in caplog.text
    assert "`gradwire link` failed" in caplog.text


def test_a_silent_client_does_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_socket, "_READ_TIMEOUT_S", 20.0)
    with opened(), contextlib.ExitStack() as stack:
        (path,) = list_sockets()
        for _ in range(3):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX))
            silent.connect(str(path))
        assert read_report(path, 5.0).workers


def test_a_client_that_sends_slowly_has_one_deadline_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_socket, "_READ_TIMEOUT_S", 0.3)
    is_over = threading.Event()
    with opened(), socket.socket(socket.AF_UNIX) as slow:
        slow.connect(str(list_sockets()[0]))

        def drip() -> None:
            with contextlib.suppress(OSError):  # closed by the driver
                while not is_over.wait(0.05):
                    slow.sendall(b" ")

        thread = threading.Thread(target=drip, name="drip")
        thread.start()
        try:
            slow.settimeout(5.0)
            with contextlib.suppress(ConnectionResetError):
                assert slow.recv(1) == b""
        finally:
            is_over.set()
            thread.join(5.0)


def leave_behind(folder: Path, name: str) -> Path:
    """A socket as a driver leaves it that was killed."""
    path = folder / f"{name}.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
        killed.listen()
    return path


def test_what_a_killed_driver_left_is_removed_by_the_one_who_asks(runtime_folder: Path) -> None:
    (runtime_folder / "gradwire").mkdir(mode=0o700)
    path = leave_behind(runtime_folder / "gradwire", "old-1")
    assert list_sockets() == [path]
    with pytest.raises(ClusterGone):
        read_report(path, 5.0)
    assert list_sockets() == []


def test_a_driver_removes_what_others_left_and_asks_none_that_lives(
    runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runtime_folder / "gradwire").mkdir(mode=0o700)
    left = [leave_behind(runtime_folder / "gradwire", name) for name in (f"old-{2**22 + 1}", f"old-{2**22 + 1}-2")]
    questions: list[None] = []

    def count() -> ClusterStatus:
        questions.append(None)
        return answer()

    living = StatusSocket.open(count, lambda: _WORKER)
    assert living is not None
    monkeypatch.setattr(sys, "argv", ["/some/where/other.py"])
    with living, opened():
        wait_until(lambda: not any(path.exists() for path in left))
        assert len(list_sockets()) == 2
    assert questions == []


def test_a_driver_takes_the_name_of_one_that_was_killed_but_not_of_one_that_lives(runtime_folder: Path) -> None:
    (runtime_folder / "gradwire").mkdir(mode=0o700)
    leave_behind(runtime_folder / "gradwire", f"train-{os.getpid()}")
    with opened() as first, opened() as second:
        assert first.name == f"train-{os.getpid()}"
        assert second.name == f"train-{os.getpid()}-2"
        assert [read_report(path, 5.0).name for path in list_sockets()] == [second.name, first.name]


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("", "python"),
        ("-c", "python"),
        ("/x/ipykernel_launcher.py", "notebook"),
        ("/x/package/__main__.py", "package"),
        ("/x/my script;rm.py", "my_script_rm"),
        ("/x/" + "long" * 30 + ".py", "long" * 10),
    ],
)
def test_names_need_no_quotes_in_a_shell(monkeypatch: pytest.MonkeyPatch, argument: str, name: str) -> None:
    monkeypatch.setattr(sys, "argv", [argument])
    with opened() as here:
        assert here.name == f"{name}-{os.getpid()}"


def test_a_path_that_is_too_long_is_not_used(monkeypatch: pytest.MonkeyPatch, runtime_folder: Path) -> None:
    long = runtime_folder / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(status_socket, "_folders", lambda: [long / "gradwire", runtime_folder / "gradwire"])
    with opened():
        assert list_sockets()[0].parent == runtime_folder / "gradwire"


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # of Python 3.12, because there are threads
def test_a_process_that_the_driver_forked_neither_removes_nor_keeps_the_socket() -> None:
    with opened() as here:
        pid = os.fork()
        if pid == 0:
            here.close()
            os._exit(0 if here._listener.fileno() == -1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert read_report(list_sockets()[0], 5.0).name == here.name


def test_a_driver_that_does_not_answer_is_given_up() -> None:
    go_on = threading.Event()

    def wait() -> ClusterStatus:
        go_on.wait(20.0)
        return answer()

    here = StatusSocket.open(wait, lambda: _WORKER)
    assert here is not None
    with here:
        with pytest.raises(NoReport, match=r"no response within 0\.05 s"):
            read_report(list_sockets()[0], 0.05)
        go_on.set()


def test_a_stopped_driver_that_many_have_asked_is_still_said_to_be_silent(runtime_folder: Path) -> None:
    (runtime_folder / "gradwire").mkdir(mode=0o700)
    path = runtime_folder / "gradwire" / "stopped-1.sock"
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(path))
        stopped.listen(1)
        for _ in range(4):  # more than it keeps
            with pytest.raises(NoReport, match=r"no response within 0\.01 s"):
                read_report(path, 0.01)


def test_another_version_of_gradwire_is_named_as_the_reason(runtime_folder: Path) -> None:
    (runtime_folder / "gradwire").mkdir(mode=0o700)
    path = runtime_folder / "gradwire" / "other-1.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        thread = threading.Thread(target=lambda: _answer_once(other), name="other-version")
        thread.start()
        with pytest.raises(NoReport, match="another version of gradwire"):
            read_report(path, 5.0)
        thread.join(5.0)


def _answer_once(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b'{"name": "other-1"}')


def test_close_may_be_called_again() -> None:
    here = opened()
    here.close()
    here.close()
