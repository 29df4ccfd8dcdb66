"""Sharded tensors in messages, without a cluster: with trust="data", and forged ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.errors import ConfigurationError
from gradwire.shard import ShardedTensor
from gradwire.shard import serialization as travel

WHOLE = torch.arange(35.0, dtype=torch.float64).view(7, 5)


@gw.rpc.expose(name="test_travel.look")
def look(tensor: ShardedTensor) -> list[Any]:
    return [list(tensor.size()), str(tensor.metadata().shards_metadata[0].placement), tensor.dtype]


def test_with_trust_in_data_it_can_be_passed_on_only(make_agents: Any) -> None:
    a, _ = make_agents(2, trust="data")
    gw.rpc.set_current_agent(a)
    try:
        sharded = gw.shard.ChunkShardingSpec(0, ["a/cpu"]).shard(WHOLE)
        assert a.call("b", "test_travel.look", (sharded,)) == [[7, 5], "a/cpu", torch.float64]
        with pytest.raises(ConfigurationError, match=r"need trust=\"code\""):
            gw.shard.ChunkShardingSpec(0, ["a/cpu", "b/cpu"]).shard(WHOLE).full_tensor()
    finally:
        gw.rpc.set_current_agent(None)


GOOD = ([7, 5], [([0, 0], [7, 5], "a/cpu")], torch.float32, False, False, None)


@pytest.mark.parametrize(
    "described",
    [
        (*GOOD[:2], "float32", *GOOD[3:]),
        ([7, 6], *GOOD[1:]),
        ([7, 5], [([0, 0], [7, 5], "rank:0/cpu")], *GOOD[2:]),
        ([7, 5], [([0, 0], [7, 5], "cpu")], *GOOD[2:]),
        ([7, 5], [([-1, 0], [7, 5], "a/cpu")], *GOOD[2:]),
        ([7, 5], [], *GOOD[2:]),
        (*GOOD[:5], "spec"),
        GOOD,  # but there is no reference
    ],
)
def test_forged_tensors_are_refused(described: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        travel._rebuild([described, [], False, None, False])


FIELDS = [GOOD, "the part", False, None, False]


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (1, None, "a list of references"),
        (1, ["x"], "a list of references"),
        (1, [], "expected 1 references"),
        (0, ([7, 5], [([0, 0], [7, 5], "b/cpu")], *GOOD[2:]), "owned by the worker of the shard"),
        (0, ([5, 7], [([0, 0], [5, 7], "a/cpu")], *GOOD[2:]), "refers to another value"),
        (0, (*GOOD[:2], torch.float64, *GOOD[3:]), "refers to another value"),
        (0, (*GOOD[:5], [2, ["a/cpu"]]), "dimension 2 is out of range for a tensor of 2 dimensions"),
        (0, ([1] * 65, [([0] * 65, [1] * 65, "a/cpu")], *GOOD[2:]), "at most 64 dimensions"),
        (0, ([7, 5], [([0, 0], [0, 0], "a/cpu")] * 5000, *GOOD[2:]), "at most 4096 shards"),
        (3, [-1, 5], "is not a valid tensor size"),
        (3, [1] * 65, "is not a valid tensor size"),
    ],
)
def test_parts_that_are_not_those_of_the_tensor_are_refused(
    make_agents: Any, place: int, value: Any, problem: str
) -> None:
    (agent,) = make_agents(1, trust="data")
    gw.rpc.set_current_agent(agent)
    try:
        fields = [*FIELDS]
        fields[1] = [gw.rref.RRef(torch.ones(7, 5))]
        assert list(travel._rebuild(fields).size()) == [7, 5]
        fields[place] = value
        with pytest.raises((ValueError, TypeError), match=problem):
            travel._rebuild(fields)
    finally:
        gw.rpc.set_current_agent(None)
