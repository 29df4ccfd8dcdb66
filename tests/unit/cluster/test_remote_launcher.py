"""Processes of a scheduler that do not become workers: the error says which, why, and what to do; nothing is left."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from gradwire import _interrupts
from gradwire.cluster import enrolment
from gradwire.cluster.enrolment import Assign, Failed, Introduce, Introduction, Ready
from gradwire.cluster.remote_launcher import RemoteOptions, start_remote
from gradwire.cluster.scheduler import RemoteProcess
from gradwire.config import WorkerConfig
from gradwire.errors import ConfigurationError, NotInitialized, WorkerStartFailed
from gradwire.rpc.api import current_agent
from gradwire.transports.certificates import ProcessKey
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.versions import Versions, own_versions

Answer = Callable[["FakeProcess", Introduce | Assign, float], bytes]


class FakeProcess:
    """Answers as a test wants; `is_killed` ends its waits."""

    def __init__(self, place: str, answer: Answer) -> None:
        self.place = place
        self.key = ProcessKey()
        self.is_killed = threading.Event()
        self.asked: list[Introduce | Assign] = []
        self._answer = answer

    def exchange(self, message: bytes, deadline: float) -> bytes:
        question = enrolment.decode_question(message)
        self.asked.append(question)
        return self._answer(self, question, deadline)

    def end_reason(self) -> str | None:
        return None

    def kill(self) -> None:
        self.is_killed.set()


class FakeScheduler:
    def __init__(self, *answers: Answer) -> None:
        self.processes = [FakeProcess(f"slot {index}", answer) for index, answer in enumerate(answers)]
        self.is_closed = False

    def launch(self, count: int, deadline: float, replaces: RemoteProcess | None = None) -> Sequence[FakeProcess]:
        return self.processes

    def bind_host(self) -> str:
        return "127.0.0.1"

    def describe(self) -> str:
        return "processes of a test"

    def close(self) -> None:
        self.is_closed = True


def introduce(process: FakeProcess, versions: Versions | None = None) -> bytes:
    own = versions or own_versions()
    return enrolment.encode(Introduction(process.key.request(), "node1", "127.0.0.1", 0, 17, own))


def honest_until_assigned(then: Answer) -> Answer:
    def answer(process: FakeProcess, question: Introduce | Assign, deadline: float) -> bytes:
        return introduce(process) if isinstance(question, Introduce) else then(process, question, deadline)

    return answer


def hang(process: FakeProcess, question: Introduce | Assign, deadline: float) -> bytes:
    if process.is_killed.wait(max(0.0, deadline - time.monotonic())):
        raise WorkerStartFailed("it was killed")
    raise TimeoutError("it has printed: waiting for a licence")


def end(process: FakeProcess, question: Introduce | Assign, deadline: float) -> bytes:
    raise WorkerStartFailed("exited with code 3; it printed:\nno disk space")


def send(data: bytes) -> Answer:
    return lambda process, question, deadline: data


def fail_to_start(
    *answers: Answer, n: int | None = None, timeout_s: float = 20.0, trust: str = "code"
) -> tuple[str, FakeScheduler]:
    """Start a cluster of these processes, which fails; return what the error says."""
    scheduler = FakeScheduler(*answers)
    config = WorkerConfig(trust=trust)  # type: ignore[arg-type]
    options = RemoteOptions(num_workers=n or len(answers), start_timeout_s=timeout_s, config=config)
    with pytest.raises(WorkerStartFailed) as caught:
        start_remote(scheduler, options)
    assert scheduler.is_closed
    assert all(process.is_killed.is_set() for process in scheduler.processes)
    with pytest.raises(NotInitialized):
        current_agent()
    return str(caught.value), scheduler


def test_process_that_ends_before_it_is_asked() -> None:
    text, _ = fail_to_start(honest_until_assigned(hang), end)
    assert text == "slot 1 exited before it was ready: exited with code 3; it printed:\nno disk space"


def test_process_that_ends_when_it_has_a_name() -> None:
    text, _ = fail_to_start(honest_until_assigned(end))
    assert text.startswith(
        "worker0 (slot 0) exited before it was ready: exited with code 3; it printed:\nno disk space"
    )


@pytest.mark.parametrize("is_named", [False, True])
def test_process_that_hangs_is_named_at_the_deadline(is_named: bool) -> None:
    began = time.monotonic()
    text, _ = fail_to_start(honest_until_assigned(hang) if is_named else hang, timeout_s=0.5)
    assert time.monotonic() - began < 10.0
    who = "worker0 (slot 0)" if is_named else "slot 0"
    # Of the 0.5 s, the start of the driver itself has taken some.
    assert re.search(rf"{re.escape(who)} was not ready after 0\.\d s; raise start_timeout_s", text), text
    assert "it has printed: waiting for a licence" in text


def test_scheduler_that_does_not_keep_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.cluster.remote_launcher._STOP_S", 0.2)

    def wait_for_ever(process: FakeProcess, question: Introduce | Assign, deadline: float) -> bytes:
        process.is_killed.wait(60.0)
        raise WorkerStartFailed("it was killed")

    text, _ = fail_to_start(wait_for_ever, timeout_s=0.2)
    assert "slot 0" in text
    assert "did not respond in time" in text


def test_process_that_failed_shows_its_traceback() -> None:
    failed = enrolment.encode(Failed("Traceback ...\nImportError: no module licence\n"))
    text, _ = fail_to_start(honest_until_assigned(send(failed)))
    assert text == "worker0 (slot 0) could not start:\nTraceback ...\nImportError: no module licence\n"


@pytest.mark.parametrize("data", [b"", b"\xc1" * 10, enrolment.encode(Introduce("x")), bytes(5 << 20)])
def test_answer_that_cannot_be_read(data: bytes) -> None:
    for answer, who in ((send(data), "slot 0"), (honest_until_assigned(send(data)), r"worker0 (slot 0)")):
        text, _ = fail_to_start(answer)
        assert text.startswith(f"cannot read the reply of {who}: ")
        assert text.endswith("install the same version of gradwire on all machines")


def test_channel_that_breaks() -> None:
    def break_off(process: FakeProcess, question: Introduce | Assign, deadline: float) -> bytes:
        raise OSError("no route to host")

    text, _ = fail_to_start(break_off)
    assert text == "the scheduler cannot deliver messages to slot 0: OSError: no route to host"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gradwire": "0.0.1"}, "gradwire 0.0.1"),
        ({"python": "3.9.1"}, "Python 3.9.1"),
        ({"torch": "2.1.0"}, "torch 2.1.0"),
    ],
)
def test_versions_that_differ_are_named_with_the_place(change: dict[str, str], words: str) -> None:
    own = own_versions()
    there = Versions(**{name: change.get(name, getattr(own, name)) for name in ("python", "torch", "gradwire")})
    text, scheduler = fail_to_start(
        honest_until_assigned(hang), lambda process, question, deadline: introduce(process, there)
    )
    assert text.startswith("worker driver runs ")
    assert f"but worker at slot 1 on node1 runs {words}" in text
    assert "install " in text
    assert not any(isinstance(item, Assign) for process in scheduler.processes for item in process.asked)


def test_request_that_is_not_one_gets_no_certificate() -> None:
    def answer(process: FakeProcess, question: Introduce | Assign, deadline: float) -> bytes:
        return enrolment.encode(Introduction(b"no request", "node1", "127.0.0.1", 0, 17, own_versions()))

    text, scheduler = fail_to_start(answer)
    assert text.startswith("cannot issue a certificate to worker0 (slot 0): not a certificate request")
    assert not any(isinstance(item, Assign) for item in scheduler.processes[0].asked)


def test_process_that_says_it_is_another_worker() -> None:
    ready = enrolment.encode(Ready(WorkerAddress(WorkerInfo("worker7", 7), 1, "x", ("tcp://127.0.0.1:1?tls",))))
    text, _ = fail_to_start(honest_until_assigned(send(ready)))
    assert text.startswith("worker0 (slot 0) replied as WorkerInfo(id=7, name=worker7)")


def test_worker_that_does_not_listen_where_it_says() -> None:
    address = WorkerAddress(WorkerInfo("worker0", 0), 1, "elsewhere", ("tcp://127.0.0.1:1?tls",))
    text, _ = fail_to_start(honest_until_assigned(send(enrolment.encode(Ready(address)))))
    assert text.startswith("driver (127.0.0.1) cannot reach worker0 (slot 0) at tcp://127.0.0.1:1?tls: ")
    assert text.endswith("choose another network (interface=) or other ports (port_range=)")


def test_scheduler_that_starts_too_few() -> None:
    text, _ = fail_to_start(honest_until_assigned(hang), n=2)
    assert text == "the scheduler started 1 processes, expected 2"


def test_ctrl_c_while_workers_start_ends_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = FakeScheduler(hang, hang)

    def interrupted(condition: threading.Condition, predicate: Callable[[], bool], timeout: float) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_interrupts, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start_remote(scheduler, RemoteOptions(num_workers=2))
    assert scheduler.is_closed
    assert all(process.is_killed.is_set() for process in scheduler.processes)


def test_everything_is_closed_when_the_driver_cannot_listen() -> None:
    scheduler = FakeScheduler(hang)
    with pytest.raises(ConfigurationError, match="cannot listen at"):
        start_remote(scheduler, RemoteOptions(num_workers=1, bind_host="203.0.113.7"))
    assert scheduler.is_closed
    with pytest.raises(ConfigurationError, match="has no address"):
        start_remote(scheduler, RemoteOptions(num_workers=1, interface="nosuch0"))
