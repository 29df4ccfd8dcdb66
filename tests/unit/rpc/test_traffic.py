"""Bytes by worker: they never decrease, and the number of names is bounded."""

from __future__ import annotations

from typing import Any, cast

import pytest

from conftest import MakeAgents
from gradwire.errors import AuthenticationFailed, GradwireError
from gradwire.rpc.connection import Connection
from gradwire.rpc.traffic import OTHER, Traffic
from gradwire.types import WorkerAddress, WorkerInfo


class _Stream:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.is_closed = False

    def traffic(self) -> tuple[int, int]:
        return self.num_bytes, 2 * self.num_bytes


class _Connection:
    def __init__(self, name: str, num_bytes: int) -> None:
        self.info = WorkerInfo(name, 0)
        self.stream = _Stream(num_bytes)


def connection(name: str, num_bytes: int = 1) -> Connection:
    return cast(Connection, _Connection(name, num_bytes))


def test_the_first_names_are_kept_apart_and_all_others_counted_together() -> None:
    traffic = Traffic(most_peers=2)
    made = [connection(f"w{number}") for number in range(10)]
    for number, item in enumerate(made):
        traffic.on_opened(item)
        if number % 2:
            traffic.on_ended(item)
            traffic.on_ended(item)
    counted = {"w0": (1, 2), "w1": (1, 2), OTHER: (8, 16)}
    assert traffic.by_worker() == counted
    for item in made:
        traffic.on_ended(item)
    assert traffic.by_worker() == counted
    traffic.on_opened(connection("w1", 5))
    traffic.on_opened(connection("w9", 5))
    assert traffic.by_worker() == {"w0": (1, 2), "w1": (6, 12), OTHER: (13, 26)}


def test_a_connection_that_ended_before_it_was_counted_is_not_kept() -> None:
    traffic, ended = Traffic(), connection("w0")
    cast(Any, ended.stream).is_closed = True
    traffic.on_opened(ended)
    assert traffic.by_worker() == {"w0": (1, 2)}
    assert not traffic._open


def test_a_worker_that_is_refused_is_not_counted(make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = make_agents(2)
    admit = b.admit

    def admit_and_dismiss(address: WorkerAddress) -> None:
        admit(address)
        b.dismiss(address.info.name, address.incarnation, "a test")

    monkeypatch.setattr(b, "admit", admit_and_dismiss)
    with pytest.raises(GradwireError):
        a.call("b", max, (1, 2))
    assert b.traffic.by_worker() == {}


def test_a_connection_is_not_kept_when_the_next_one_is_refused(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_agents(2)
    admitted: list[str] = []
    admit = b.admit

    def admit_once(address: WorkerAddress) -> None:
        if admitted:
            raise AuthenticationFailed("a test")
        admitted.append(address.info.name)
        admit(address)

    monkeypatch.setattr(b, "admit", admit_once)
    with pytest.raises(GradwireError):
        a.call("b", max, (1, 2))
    assert admitted == ["a"]
    assert not a.traffic._open
