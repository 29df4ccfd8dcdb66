"""The errors of a meeting that does not come about; the rest needs several workers."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from gradwire.errors import RendezvousFailed
from gradwire.rpc.rendezvous import Meeting
from gradwire.types import WorkerInfo


def make_meeting(present: set[int]) -> Meeting:
    """The meeting of rank 1 of 3, of which some have published their addresses."""
    agent: Any = SimpleNamespace(
        info=WorkerInfo("w1", 1), server=SimpleNamespace(register_control=lambda name, handle: None)
    )
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
        ({0, 1, 2}, r"^rank 1 \(w1\) did not complete the rendezvous .* although all 3 ranks arrived there\. Check"),
    ],
)
def test_who_is_missing_is_named(present: set[int], words: str) -> None:
    with pytest.raises(RendezvousFailed, match=words) as caught:
        make_meeting(present).join(time.monotonic())
    assert "raise init_timeout" in str(caught.value)
