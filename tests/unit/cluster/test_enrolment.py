"""Messages of enrolment: what is accepted, which versions fit, and who becomes which worker."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.cluster import enrolment
from gradwire.cluster.enrolment import Assign, Failed, Introduce, Introduction, Ready, WorkerSettings
from gradwire.config import Limits, WorkerConfig
from gradwire.errors import DecodeError, LimitExceeded
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.versions import Versions

CONFIG = WorkerConfig()
VERSIONS = Versions("3.11.7", "2.13.0+cpu", "1.0.0")
ADDRESS = WorkerAddress(WorkerInfo("driver", 2), 7, "here", ("tcp://10.0.0.1:4711?tls",))
ASSIGN = Assign("worker0", 0, b"certificate", b"authority", ADDRESS, b"sealed")
READY = Ready(WorkerAddress(WorkerInfo("worker0", 0), 8, "there", ("tcp://10.0.0.2:4711?tls",)))


def introduction(
    host: str = "node1", index: int = 0, pid: int = 1, address: str = "10.0.0.1", **more: Any
) -> Introduction:
    return Introduction(b"request", host, address, index, pid, more.get("versions", VERSIONS))


@pytest.mark.parametrize("message", [Introduce("10.0.0.1"), Introduce("10.0.0.1", "ib0"), ASSIGN])
def test_questions_travel(message: Any) -> None:
    assert enrolment.decode_question(enrolment.encode(message)) == message


@pytest.mark.parametrize("message", [introduction(), READY, Failed("Traceback")])
def test_answers_travel(message: Any) -> None:
    assert enrolment.decode_answer(enrolment.encode(message), type(message), CONFIG) == message


def test_settings_travel() -> None:
    config = WorkerConfig(trust="data", token=b"\0\xff", bind_port=(2000, 3000), limits=Limits(frame_bytes=1 << 20))
    settings = WorkerSettings(config, 2, {"A": "ü"}, ("json",), ("/x",), 3.0)
    assert enrolment.decode_settings(enrolment.encode(settings)) == settings


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        enrolment.encode(READY),  # the answer of a process, not a question
        enrolment.encode({"type": "Introduce"}),
        enrolment.encode({"type": "Introduce", "driver_host": 4}),
        enrolment.encode({"type": "Introduce", "driver_host": "x" * 5000}),
        enrolment.encode(msgspec.structs.replace(ASSIGN, rank=70_000)),
        enrolment.encode(msgspec.structs.replace(ASSIGN, certificate=b"x" * 100_000)),
        enrolment.encode(msgspec.structs.replace(ASSIGN, name="\x1b[31m")),
    ],
)
def test_bad_questions_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        enrolment.decode_question(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        enrolment.encode(ASSIGN),
        enrolment.encode(READY),  # where an introduction is due
        enrolment.encode(introduction(host="\x1b[31m")),
        enrolment.encode(introduction(address="x" * 5000)),
        enrolment.encode(introduction(index=-1)),
        enrolment.encode(introduction(versions=Versions("3.11", "2.13", "1.0\n\x07"))),
        enrolment.encode(msgspec.structs.replace(introduction(), certificate_request=b"x" * 100_000)),
    ],
)
def test_bad_answers_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        enrolment.decode_answer(data, Introduction, CONFIG)


def test_ready_with_an_address_that_is_not_valid_is_refused() -> None:
    wrong = Ready(WorkerAddress(WorkerInfo("w\x1b", 0), 8, "there", ()))
    with pytest.raises(DecodeError):
        enrolment.decode_answer(enrolment.encode(wrong), Ready, CONFIG)


def test_messages_have_a_size() -> None:
    with pytest.raises(LimitExceeded, match="at most"):
        enrolment.decode_question(bytes(enrolment.MAX_MESSAGE_BYTES + 1))
    with pytest.raises(LimitExceeded, match="at most"):
        enrolment.decode_answer(bytes(enrolment.MAX_MESSAGE_BYTES + 1), Ready, CONFIG)


def test_text_of_a_failure_is_safe_to_print_and_cut() -> None:
    failed = enrolment.decode_answer(enrolment.encode(Failed("\x1b[2J" + "x" * 10**6)), Ready, CONFIG)
    assert isinstance(failed, Failed)
    assert "\x1b" not in failed.text
    assert len(failed.text) < 100_000


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_an_error(data: bytes) -> None:
    for decode in (enrolment.decode_question, lambda raw: enrolment.decode_answer(raw, Introduction, CONFIG)):
        with contextlib.suppress(DecodeError):
            decode(data)


# Order


def test_ranks_follow_host_and_local_index_whatever_the_order_of_arrival() -> None:
    wanted = [("node2", 0), ("node2", 1), ("node2", 10), ("node10", 0), ("node10", 1)]
    for arrival in itertools.permutations(wanted):
        items = [introduction(host, index, pid) for pid, (host, index) in enumerate(arrival)]
        order = enrolment.order_of(items)
        assert [(items[i].host, items[i].local_index) for i in order] == wanted


def test_machines_of_one_name_are_told_apart_by_address() -> None:
    items = [
        introduction("c", 0, 4, "10.0.0.10"),
        introduction("c", 1, 5, "10.0.0.9"),
        introduction("c", 0, 6, "10.0.0.9"),
    ]
    assert enrolment.order_of(items) == [2, 1, 0]


@given(st.lists(st.tuples(st.text(max_size=6), st.integers(0, 3)), max_size=8))
def test_order_names_each_process_once(hosts: list[tuple[str, int]]) -> None:
    items = [introduction(host, index) for host, index in hosts]
    assert sorted(enrolment.order_of(items)) == list(range(len(items)))


def test_settings_show_no_token() -> None:
    settings = WorkerSettings(dataclasses.replace(CONFIG, token=b"hidden"), 1, {}, (), (), 1.0)
    assert "hidden" not in repr(settings)
