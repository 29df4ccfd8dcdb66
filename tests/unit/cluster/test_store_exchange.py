"""Messages through a store arrive, and none that was forged, replayed or left behind is taken for one."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gradwire.cluster.kv_store import FolderStore, KeyValueStore
from gradwire.cluster.message_auth import CertificateAuth, MessageAuth, NoAuth, SharedSecret
from gradwire.cluster.store_exchange import DriverExchange, ExchangeProcess, Hello, WorkerExchange
from gradwire.errors import AuthenticationFailed, RendezvousFailed, WorkerStartFailed
from gradwire.testing import wait_until
from gradwire.transports.tls import keys_for, make_keys

TOPIC = "torchrun/run"


class FakeStore:
    """A dictionary; what is written can be looked at and changed."""

    where = "memory"

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.num_reads_of_round = 0

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes | None:
        value = self.values.get(key)
        self.num_reads_of_round += key == "round"
        return value

    def close(self) -> None:
        return


class Process:
    """A process that answers with what it was asked, backwards, until it is told to stop."""

    def __init__(self, store: KeyValueStore, number: int, auth: MessageAuth, deadline_s: float = 20.0) -> None:
        self.asked: list[bytes] = []
        self.error: Exception | None = None
        exchange = WorkerExchange(store, TOPIC, number, auth)

        def run() -> None:
            try:
                exchange.serve(self.answer, lambda: b"stop" in self.asked, time.monotonic() + deadline_s)
            except Exception as error:
                self.error = error

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def answer(self, message: bytes) -> bytes:
        self.asked.append(message)
        return message[::-1]

    def end(self) -> Exception | None:
        self.thread.join(10)
        assert not self.thread.is_alive()
        return self.error


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "a"
    make_keys(folder)
    make_keys(folder, ["one"])
    make_keys(folder.with_name("b"))
    return folder


@pytest.fixture(params=["none", "secret", "certificates"])
def auths(request: pytest.FixtureRequest, keys: Path) -> Callable[[], MessageAuth]:
    makers: dict[str, Callable[[], MessageAuth]] = {
        "none": NoAuth,
        "secret": lambda: SharedSecret(b"s" * 32),
        "certificates": lambda: CertificateAuth(keys_for(keys)),
    }
    return makers[request.param]


def test_messages_go_both_ways(auths: Callable[[], MessageAuth], tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    processes = [Process(store, number, auths()) for number in (1, 2)]
    driver = DriverExchange(store, TOPIC, auths(), "rank")
    hellos = driver.wait_hellos([1, 2], soon())
    assert list(hellos) == [1, 2]
    assert driver.exchange(2, b"first", soon()) == b"tsrif"
    for number in (1, 2):
        assert driver.exchange(number, b"stop", soon()) == b"pots"
    assert [process.end() for process in processes] == [None, None]
    assert [process.asked for process in processes] == [[b"stop"], [b"first", b"stop"]]


def test_what_an_earlier_round_left_is_not_looked_at() -> None:
    store = FakeStore()
    old = DriverExchange(store, TOPIC, NoAuth(), "rank")
    process = Process(store, 1, NoAuth())
    old.wait_hellos([1], soon())
    new = DriverExchange(store, TOPIC, NoAuth(), "rank")
    new.wait_hellos([1], soon())
    assert new.exchange(1, b"stop", soon()) == b"pots"
    assert process.end() is None


def test_a_process_that_comes_back_before_its_driver_waits_for_the_next_round() -> None:
    """torchrun keeps its store when it starts all ranks again: what it holds is of the round before."""
    store, secret = FakeStore(), SharedSecret(b"s" * 32)
    old = DriverExchange(store, TOPIC, secret, "rank")
    first = Process(store, 1, secret)
    old.wait_hellos([1], soon())
    old.exchange(1, b"stop", soon())
    assert first.end() is None
    store.num_reads_of_round = 0
    second = Process(store, 1, secret)
    wait_until(lambda: store.num_reads_of_round > 1)  # it has looked, and stays
    new = DriverExchange(store, TOPIC, secret, "rank")
    new.wait_hellos([1], soon())
    new.exchange(1, b"stop", soon())
    assert (second.end(), second.asked) == (None, [b"stop"])


def test_a_driver_that_gave_up_in_an_earlier_round_does_not_end_this_one() -> None:
    store = FakeStore()
    DriverExchange(store, TOPIC, NoAuth(), "rank").give_up("the first attempt failed")
    process = Process(store, 1, NoAuth())
    wait_until(lambda: any(key.endswith("hello") for key in store.values))
    new = DriverExchange(store, TOPIC, NoAuth(), "rank")
    new.wait_hellos([1], soon())
    new.exchange(1, b"stop", soon())
    assert process.end() is None


def test_processes_that_wait_learn_why_the_driver_gave_up() -> None:
    store = FakeStore()
    driver = DriverExchange(store, TOPIC, SharedSecret(b"s" * 32), "rank")
    process = Process(store, 1, SharedSecret(b"s" * 32))
    driver.wait_hellos([1], soon())
    driver.give_up("rank 2 never arrived", [1, 2], 60.0)
    assert any(key.endswith(".1.left") for key in store.values), "it knows when that returns: the store may go"
    assert str(process.end()) == "the driver aborted the start: rank 2 never arrived"


def test_processes_that_the_driver_has_not_looked_for_learn_why_it_gave_up() -> None:
    """It may fail for another reason before it waits for them."""
    store = FakeStore()
    driver = DriverExchange(store, TOPIC, NoAuth(), "rank")
    process = Process(store, 1, NoAuth())
    wait_until(lambda: any(key.endswith(".1.hello") for key in store.values))
    driver.give_up("no such interface", [1, 2], 60.0)
    assert any(key.endswith(".1.left") for key in store.values)
    assert str(process.end()) == "the driver aborted the start: no such interface"


def test_a_driver_that_gives_up_does_not_wait_for_ever_for_a_process_that_is_gone() -> None:
    store = FakeStore()
    driver = DriverExchange(store, TOPIC, NoAuth(), "rank")
    process = Process(store, 1, NoAuth(), deadline_s=0.2)
    driver.wait_hellos([1], soon())
    assert "did not make this process a worker in time" in str(process.end())
    driver.give_up("over", [1], 0.1)
    assert not any(key.endswith("left") for key in store.values)


def test_ranks_that_never_arrive_are_named() -> None:
    store = FakeStore()
    driver = DriverExchange(store, TOPIC, NoAuth(), "rank")
    process = Process(store, 2, NoAuth())
    with pytest.raises(WorkerStartFailed, match="ranks 1, 3 never arrived at memory: the driver expected 3 ranks"):
        driver.wait_hellos([1, 2, 3], soon(0.5))
    driver.give_up("over")
    assert isinstance(process.end(), RendezvousFailed)


def test_a_driver_that_never_arrives_is_named() -> None:
    assert "the driver never arrived at memory; start it" in str(
        Process(FakeStore(), 1, NoAuth(), deadline_s=0.1).end()
    )


def test_an_answer_that_never_comes_is_a_timeout() -> None:
    store = FakeStore()
    driver = DriverExchange(store, TOPIC, NoAuth(), "rank")
    exchange = WorkerExchange(store, TOPIC, 1, NoAuth())
    with pytest.raises(RendezvousFailed, match="did not make this process a worker in time"):
        exchange.serve(bytes, lambda: False, soon(0.1))
    driver.wait_hellos([1], soon())
    with pytest.raises(TimeoutError, match=r"rank 1 \(pid \d+ on .*\) is not responding"):
        driver.exchange(1, b"?", soon(0.1))


def test_a_process_with_another_secret_is_refused() -> None:
    store = FakeStore()
    driver = DriverExchange(store, TOPIC, SharedSecret(b"s" * 32), "rank")
    process = Process(store, 1, SharedSecret(b"t" * 32))
    with pytest.raises(
        AuthenticationFailed, match="a message from rank 1 cannot be trusted: it was signed with another"
    ):
        driver.wait_hellos([1], soon())
    driver.give_up("refused")
    assert "a message from the driver cannot be trusted" in str(process.end())


def test_certificates_of_another_authority_or_for_one_worker_are_refused(keys: Path) -> None:
    ours, theirs = CertificateAuth(keys_for(keys)), CertificateAuth(keys_for(keys.with_name("b")))
    with pytest.raises(AuthenticationFailed, match="signed by another authority"):
        ours.verify(b"statement", theirs.sign(b"statement"))
    with pytest.raises(AuthenticationFailed, match="signature is not valid"):
        ours.verify(b"statement", ours.sign(b"another"))
    with pytest.raises(AuthenticationFailed, match="not valid"):
        ours.verify(b"statement", b"garbage")
    with pytest.raises(ValueError, match=r"one\.pem is for one worker"):
        CertificateAuth(keys_for(keys, "one"))


@pytest.mark.parametrize("kind", ["hello", "request", "reply"])
def test_a_message_cannot_be_used_in_another_place(kind: str) -> None:
    """Of another rank, an earlier round or another number, though each of them was signed with the right secret."""
    store, secret = FakeStore(), SharedSecret(b"s" * 32)
    driver = DriverExchange(store, TOPIC, secret, "rank")
    processes = [Process(store, number, secret) for number in (1, 2)]
    driver.wait_hellos([1, 2], soon())
    for number in (1, 2):
        driver.exchange(number, b"stop", soon())
        processes[number - 1].end()
    taken = {key.split(".", 2)[2]: value for key, value in store.values.items() if ".1." in key}
    (message,) = [value for key, value in taken.items() if key.startswith(kind)]

    class Replaying(FakeStore):
        """Answers with what was taken whenever a message of that kind is asked for."""

        def get(self, key: str) -> bytes | None:
            return message if f".{kind}" in key else super().get(key)

    again = Replaying()
    driver = DriverExchange(again, TOPIC, secret, "rank")
    process = Process(again, 1, secret, deadline_s=3.0)
    if kind == "request":
        assert "a message from the driver cannot be trusted" in str(process.end())
        assert process.asked == []
        return

    def meet_and_ask() -> None:
        driver.wait_hellos([1], soon())
        driver.exchange(1, b"?", soon())

    with pytest.raises(AuthenticationFailed, match=r"a message from rank 1 .*cannot be trusted"):
        meet_and_ask()
    driver.give_up("over")
    process.end()


def test_garbage_is_refused() -> None:
    store = FakeStore()
    driver = DriverExchange(store, TOPIC, NoAuth(), "rank")
    for garbage in (b"\xff\x00garbage", msgspec.msgpack.encode((b"garbage", b""))):
        store.set(f"{store.values['round'].decode()}.1.hello", garbage)
        with pytest.raises(AuthenticationFailed, match="not a gradwire message"):
            driver.wait_hellos([1], soon())


def test_a_process_on_this_machine_is_watched_and_can_be_ended() -> None:
    store = FakeStore()
    driver = DriverExchange(store, TOPIC, NoAuth(), "task")
    with subprocess.Popen(["sleep", "60"]) as child:
        hello = msgspec.structs.replace(Hello.make(NoAuth()), pid=child.pid)
        process = ExchangeProcess(driver, 1, hello, "a place")
        assert process.end_reason() is None
        process.kill()
        wait_until(lambda: process.end_reason() == f"its process {child.pid} exited")
        child.wait(10)
        process.kill()
    process.close()
    process.close()


def test_a_process_that_ends_without_an_answer_is_not_waited_for() -> None:
    store = FakeStore()
    driver = DriverExchange(store, TOPIC, NoAuth(), "task")
    with subprocess.Popen(["true"]) as child:
        child.wait(10)
    exchange = WorkerExchange(store, TOPIC, 1, NoAuth())
    with pytest.raises(RendezvousFailed):
        exchange.serve(bytes, lambda: False, time.monotonic())
    hello = msgspec.structs.replace(driver.wait_hellos([1], soon())[1], pid=child.pid)
    process = ExchangeProcess(driver, 1, hello, "a place")
    with pytest.raises(WorkerStartFailed, match=f"its process {child.pid} exited"):
        process.exchange(b"?", soon())


def test_a_process_that_counts_in_another_container_is_not_looked_for() -> None:
    """Its number means another process here."""
    driver = DriverExchange(FakeStore(), TOPIC, NoAuth(), "task")
    hello = msgspec.structs.replace(Hello.make(NoAuth()), pid=os.getppid(), pid_space=1)
    process = ExchangeProcess(driver, 1, hello, "a place")
    process.kill()
    assert process.end_reason() is None


def test_two_processes_with_one_number_are_told() -> None:
    store = FakeStore()
    driver = DriverExchange(store, TOPIC, NoAuth(), "rank")
    first = Process(store, 1, NoAuth())
    driver.wait_hellos([1], soon())
    assert "rank or task number (1) has arrived at memory" in str(Process(store, 1, NoAuth(), deadline_s=0.1).end())
    driver.exchange(1, b"stop", soon())
    assert first.end() is None
