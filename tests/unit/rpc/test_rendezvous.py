"""A meeting that does not come about, and one that is over; the rest needs several workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gradwire.config import WorkerConfig
from gradwire.errors import RendezvousFailed
from gradwire.rpc.rendezvous import Host, Meeting
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.wire.messages import encode_address


class FakeAgent:
    """Takes control operations, and is in their place as its own server."""

    def __init__(self, rank: int) -> None:
        self.info = WorkerInfo(f"w{rank}", rank)
        self.is_leaving = False
        self.config = WorkerConfig()
        self.server = self
        self.operations: dict[str, Callable[..., Any]] = {}

    def register_control(self, name: str, handle: Callable[..., Any], *types: object) -> None:
        self.operations[name] = handle


def make_meeting(agent: Any, present: set[int]) -> Meeting:
    """The meeting of rank 1 of 3, of which some have published their addresses."""
    directory: Any = SimpleNamespace(at_rank=lambda rank: rank if rank in present else None, refusals=lambda: "")
    point: Any = SimpleNamespace(where="tcp://node:1", rank=1, world_size=3)
    return Meeting(agent, directory, point)


@pytest.mark.parametrize(
    ("present", "words"),
    [
        (
            {0, 1},
            r"^rank 2 never arrived at tcp://node:1: rank 1 \(w1\) waited for world_size=3\. Start the missing ranks",
        ),
        ({1}, "^ranks 0, 2 never arrived at tcp://node:1"),
        ({0, 1, 2}, r"^rank 1 \(w1\) did not complete the rendezvous .* an address for each of the 3 ranks\. Check"),
    ],
)
def test_who_is_missing_is_named(present: set[int], words: str) -> None:
    with pytest.raises(RendezvousFailed, match=words) as caught:
        make_meeting(FakeAgent(1), present).join(time.monotonic())
    assert "raise init_timeout" in str(caught.value)


def test_rank_0_lets_nobody_join_a_world_that_is_shutting_down() -> None:
    agent: Any = FakeAgent(0)
    Host(agent, 2, cast(Any, None))
    joins = agent.operations["join"]
    address = WorkerAddress(WorkerInfo("w1", 1), 1, "host", ())
    assert not joins(address.info, encode_address(address), 2, []).done()
    agent.is_leaving = True
    with pytest.raises(RendezvousFailed, match=r"rank 0 \(w0\) is shutting down"):
        joins(address.info, encode_address(address), 2, [])


def test_no_rank_speaks_of_a_world_that_is_shutting_down() -> None:
    """A restarted rank 0 asks the others whom they have met."""
    agent: Any = FakeAgent(1)
    meeting = make_meeting(agent, set())
    meeting._met = [b"addresses"]
    assert agent.operations["met"](agent.info) == [b"addresses"]
    agent.is_leaving = True
    assert agent.operations["met"](agent.info) == []
