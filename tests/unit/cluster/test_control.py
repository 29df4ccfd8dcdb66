"""Messages between driver, fork server and workers arrive as they were sent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gradwire.cluster._control import (
    ForkWorker,
    Leave,
    Surroundings,
    WorkerExited,
    WorkerStart,
    make_pair,
    read_start,
    receive_message,
    send_message,
    text_path,
    write_start,
)
from gradwire.cluster.launcher import WorkerSpec
from gradwire.config import TlsKeys, WorkerConfig
from gradwire.types import WorkerAddress, WorkerInfo


def test_messages_and_descriptors_arrive_one_by_one() -> None:
    ours, theirs = make_pair()
    reader, writer = os.pipe()
    with ours, theirs:
        send_message(ours, ForkWorker(3), (writer,))
        send_message(ours, WorkerExited(3, -1, error="fork failed"))
        send_message(ours, Leave())
        message, (copy,) = receive_message(theirs)
        assert message == ForkWorker(3)
        assert not os.get_inheritable(copy)
        assert [receive_message(theirs)[0] for _ in range(2)] == [WorkerExited(3, -1, error="fork failed"), Leave()]
        ours.close()
        assert receive_message(theirs) == (None, [])
    for fd in (reader, writer, copy):
        os.close(fd)


def test_a_start_of_more_than_a_packet_arrives_whole() -> None:
    info = WorkerInfo("w", 0)
    spec = WorkerSpec(
        info=info,
        config=WorkerConfig(token=b"secret", tls=TlsKeys.in_folder("/keys")),
        addresses=(WorkerAddress(info, 0, "local", ("unix:///w.sock",)),),
        num_threads=2,
        environment={},
    )
    surroundings = Surroundings.capture({"LARGE": "x" * (1 << 20)})
    start = WorkerStart(spec, "/folder", surroundings)
    assert read_start(write_start(start)) == start
    assert surroundings.environment[b"LARGE"] == b"x" * (1 << 20)


def test_paths_that_are_not_text_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", ["/a", Path("/b")])
    assert text_path() == ["/a"]
