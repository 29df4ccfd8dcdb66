"""What rank 0 believes of those who join, and of those who say that they have met before."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradwire.config import WorkerConfig
from gradwire.errors import RendezvousFailed
from gradwire.rpc import Agent, rendezvous
from gradwire.rpc.meeting_point import open_meeting_point
from gradwire.rpc.rendezvous import Host, StoreDirectory
from gradwire.runtime import start_worker
from gradwire.testing import wait_until
from gradwire.transports.stream import StreamConnection
from gradwire.transports.tls import keys_for, make_keys
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.wire.messages import Failure, encode_address
from rpc.by_hand import connect, receive, send_control


def address_of(name: str, rank: int, incarnation: int = 1, uris: tuple[str, ...] = ()) -> WorkerAddress:
    return WorkerAddress(WorkerInfo(name, rank), incarnation, "elsewhere", uris)


@pytest.fixture
def directory(meeting: str) -> StoreDirectory:
    return StoreDirectory(open_meeting_point(meeting, 0, 3, 5.0))


@pytest.fixture
def leader(directory: StoreDirectory) -> Iterator[Agent]:
    agent = start_worker(WorkerInfo("w0", 0), WorkerConfig(token=b"secret", trust="data"), directory)
    directory.publish(agent)
    yield agent
    agent.close()


@pytest.fixture
def host(leader: Agent, directory: StoreDirectory) -> Host:
    host = Host(leader, 3, directory)
    host.join()
    return host


@pytest.fixture
def control(leader: Agent) -> Iterator[StreamConnection]:
    with contextlib.closing(connect(leader, "control", name="w1", rank=1)) as made:
        yield made


NO_DEVICES: list[Any] = []
BAD = [
    (encode_address(address_of("w2", 1)), 3, NO_DEVICES),
    (encode_address(address_of("w1", 2)), 3, NO_DEVICES),
    (encode_address(address_of("w2", 2)), 3, NO_DEVICES),
    (encode_address(address_of("w1", 70_000)), 3, NO_DEVICES),
    (encode_address(address_of("w1", -1)), 3, NO_DEVICES),
    (encode_address(address_of("w1", 1, -5)), 3, NO_DEVICES),
    (encode_address(address_of("w1", 1, uris=("unix:///x",) * 100)), 3, NO_DEVICES),
    (encode_address(address_of("w1", 1, uris=("x" * 5000,))), 3, NO_DEVICES),
    (encode_address(address_of("../w1", 1)), 3, NO_DEVICES),
    (b"", 3, NO_DEVICES),
    (b"\x93\x01\x02", 3, NO_DEVICES),
    (b"x" * 100_000, 3, NO_DEVICES),
    ("text", 3, NO_DEVICES),
    (None, 3, NO_DEVICES),
    (encode_address(address_of("w1", 1)), 4, NO_DEVICES),
    (encode_address(address_of("w1", 1)), 1, NO_DEVICES),
    (encode_address(address_of("w1", 1)), 0, NO_DEVICES),
    (encode_address(address_of("w1", 1)), -3, NO_DEVICES),
    (encode_address(address_of("w1", 1)), "3", NO_DEVICES),
    (encode_address(address_of("w1", 1)), 3.0, NO_DEVICES),
    (encode_address(address_of("w1", 1)),),
    (encode_address(address_of("w1", 1)), 3),
    (encode_address(address_of("w1", 1)), 3, [{"cuda": -1}]),
    (encode_address(address_of("w1", 1)), 3, [{}, {"w0": {"cuda:0": 1}}]),
    (encode_address(address_of("w1", 1)), 3, [{}, {"w0": {"c" * 100: "cpu"}}]),
    (encode_address(address_of("w1", 1)), 3, [{}, {}, ["cuda:0"], 1]),
    (encode_address(address_of("w1", 1)), 3, [{}, {}, ["cuda:0\n"]]),
    (encode_address(address_of("w1", 1)), 3, [{"\x1b[2J": 1}]),
    (encode_address(address_of("w1", 1)), 3, "none"),
    (),
]


@pytest.mark.parametrize("args", BAD, ids=range(len(BAD)))
def test_a_worker_joins_as_itself_or_not_at_all(host: Host, control: StreamConnection, args: tuple[Any, ...]) -> None:
    send_control(control, 1, "~join", *args)
    assert isinstance(receive(control), Failure)
    assert set(host._joined) == set(host._answers) == {0}


def test_one_answer_is_owed_to_each_rank(host: Host, control: StreamConnection) -> None:
    for number in range(1, 6):
        send_control(control, number, "~join", encode_address(address_of("w1", 1)), 3, NO_DEVICES)
        if number > 1:
            assert isinstance(receive(control), Failure)  # what the join before it gets
    wait_until(lambda: set(host._answers) == {0, 1}, 20)


def test_a_worker_cannot_speak_for_others_when_rank_0_restarts(host: Host, directory: StoreDirectory) -> None:
    directory._store.publish(address_of("w1", 1))
    directory._store.publish(address_of("w2", 2))
    host.adopt([address_of("w1", 1), address_of("z", 2), address_of("z", 0)])
    assert {rank: address.info.name for rank, address in host._joined.items()} == {0: "w0", 1: "w1"}
    host.adopt([address_of("w2", 2)])
    assert set(host._joined) == {0, 1, 2}
    assert host._answers == {}  # rank 0 was told


@pytest.fixture
def worlds(tcp_meeting: str, tmp_path: Path) -> Iterator[list[StoreDirectory]]:
    """The directories of two ranks that meet at a store of rank 0."""
    make_keys(tmp_path, ["w0", "w1"])
    with contextlib.ExitStack() as stack:
        made = []
        for rank in range(2):
            point = open_meeting_point(tcp_meeting, rank, 2, 5.0, keys_for(tmp_path, f"w{rank}"))
            stack.callback(point.store.leave)
            made.append(StoreDirectory(point))
        yield made


def test_rank_0_stays_until_the_others_know_why_there_is_no_meeting(
    worlds: list[StoreDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_LONGEST_STAY_S", 60.0)
    first, second = worlds
    second.withdraw()  # it has nothing to withdraw from
    first.announce("refused", "rank 0 cannot start")
    stays = threading.Thread(target=first.withdraw)
    stays.start()
    wait_until(lambda: first._store.has_withdrawn(0), 20.0, "that rank 0 has withdrawn")
    assert stays.is_alive()
    with pytest.raises(RendezvousFailed, match="rank 0 cannot start"):
        second.check_obstacle(time.monotonic())
    second.withdraw()
    stays.join(20.0)
    assert not stays.is_alive()


def test_rank_0_does_not_wait_for_ever_for_ranks_that_never_come(
    worlds: list[StoreDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_LONGEST_STAY_S", 0.1)
    worlds[0].announce("refused", "rank 0 cannot start")
    worlds[0].withdraw()
    assert [worlds[0]._store.has_withdrawn(rank) for rank in range(2)] == [True, False]
