"""Which ranks count as lost, by the reports in a store."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from gradwire.shard import rank_loss
from gradwire.shard.rank_loss import Report, collective, find_lost
from gradwire.testing import wait_until


@pytest.fixture(scope="module")
def stores() -> dict[str, Any]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=20))
    return {"in memory": dist.HashStore(), "server": server, "over the network": client}


@pytest.fixture(params=["in memory", "over the network"])
def store(request: pytest.FixtureRequest, stores: dict[str, Any]) -> Any:
    return dist.PrefixStore(request.node.name, stores[request.param])


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """How long ranks are waited for that have not reported."""

    def wait(seconds: float) -> None:
        monkeypatch.setattr(rank_loss, "_REPORT_S", seconds)

    wait(0.1)
    return wait


@pytest.fixture
def told(store: Any) -> Callable[..., None]:
    def tell(rank: int, *broken: int, is_late: bool = False) -> None:
        store.set(f"gradwire/left/{rank}", json.dumps({"broken": broken, "is_late": is_late}))

    return tell


def report(*broken: int, is_late: bool = False) -> Report:
    return {"broken": list(broken), "is_late": is_late}


def test_rank_that_has_not_reported_is_lost(store: Any) -> None:
    assert find_lost(store, 0, report(1)) == ([1], False)


def test_reports_lead_to_the_lost_rank(store: Any, told: Callable[..., None]) -> None:
    told(3, 2)
    told(2, 1)
    assert find_lost(store, 0, report(3)) == ([1], False)


def test_report_is_read_beside_a_lost_rank(store: Any, told: Callable[..., None]) -> None:
    """The time that the lost rank is waited for is not taken from the others."""
    told(2, 1)
    assert find_lost(store, 0, report(1, 2)) == ([1], False)


def test_report_that_comes_a_moment_later(
    store: Any, told: Callable[..., None], patience: Callable[[float], None]
) -> None:
    patience(20.0)
    asked = threading.Event()

    class Watched:
        def check(self, keys: list[str]) -> bool:
            asked.set()
            found: bool = store.check(keys)
            return found

        get = store.get

    def tell_then() -> None:
        wait_until(asked.is_set, 10.0)
        told(2, is_late=True)

    thread = threading.Thread(target=tell_then)
    thread.start()
    assert find_lost(Watched(), 0, report(2)) == ([], True)
    thread.join(10.0)


def test_ranks_that_found_each_other(store: Any, told: Callable[..., None]) -> None:
    told(1, 0)
    assert find_lost(store, 0, report(1)) == ([], False)


def test_own_timeout(store: Any) -> None:
    assert find_lost(store, 0, report(is_late=True)) == ([], True)


def test_names_of_ranks() -> None:
    assert rank_loss._name([1]) == "rank 1"
    assert rank_loss._name([0, 2]) == "ranks 0 and 2"
    assert rank_loss._name([0, 2, 5]) == "ranks 0, 2 and 5"


def test_error_without_a_group_stays_what_it_is() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="no such group"), collective(None, "a gathering"):
        raise RuntimeError("no such group")
