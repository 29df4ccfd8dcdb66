"""Groups and names of parameters as people hand them over, and states of sharded ones. All on workers of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gradwire import autograd, optim, rpc
from gradwire.errors import ConfigurationError, OptimizerNotMade
from gradwire.optim.parameters import GroupReader, PartOf, by_owner, divide_states, fold_groups, join_states
from gradwire.rpc import Agent, RRef, set_current_agent
from gradwire.shard.layout import Box

SIZE = (3, 2)
PARTS = {part.name: part for part in (PartOf("w", Box((0, 0), (1, 2)), SIZE), PartOf("w", Box((1, 0), (2, 2)), SIZE))}
WHOLE = torch.arange(6.0).view(SIZE)


@pytest.fixture
def pair(make_agents: Callable[..., list[Agent]]) -> Iterator[list[Agent]]:
    """Two workers that do not trust each other with code; what the test does, it does as the first."""
    agents = make_agents(2, trust="data")
    set_current_agent(agents[0])
    yield agents
    set_current_agent(None)


@rpc.expose
def make_parameter(num: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(float(num)))


@rpc.expose
def make_reference(num: int) -> RRef[torch.nn.Parameter]:
    return RRef(make_parameter(num))


@rpc.expose
def times(weight: RRef[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return weight.local_value() * x


def names(params: Any) -> list[list[str]]:
    return [group.names for group in GroupReader().read_all(params)]


def test_names(pair: list[Agent]) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    linear = torch.nn.Linear(1, 1)
    assert names([weight, torch.nn.Parameter(torch.ones(1))]) == [["0", "1"]]
    assert names(linear) == [["weight", "bias"]]
    assert names([linear, torch.nn.Linear(1, 1)]) == [["weight", "bias", "1.weight", "1.bias"]]
    assert names([{"params": linear}, {"params": [("own", weight)]}]) == [["weight", "bias"], ["own"]]
    assert names(linear.named_parameters()) == [["weight", "bias"]]
    assert names(weight for weight in linear.parameters()) == [["0", "1"]]
    with pytest.raises(ConfigurationError, match="two parameters would have the name '1'"):
        names([("1", weight), weight])


def test_a_reader_may_be_copied(pair: list[Agent]) -> None:
    reader = GroupReader()
    reader.read({"params": torch.nn.Linear(1, 1)})
    assert reader.copy().read({"params": torch.nn.Linear(1, 1)}).names == ["1.weight", "1.bias"]
    assert reader.read({"params": torch.nn.Linear(1, 1), "lr": 1.0}).options == {"lr": 1.0}


def test_by_owner(pair: list[Agent]) -> None:
    there = rpc.remote(pair[1].info.name, make_parameter, (2,))
    here = RRef(torch.nn.Parameter(torch.ones(1)))
    found = by_owner(GroupReader().read_all([{"params": [here, there]}, {"params": [("more", there)]}]))
    first, second = (agent.info.name for agent in pair)
    assert {name: list(parts) for name, parts in found.items()} == {first: [0], second: [0, 1]}
    there.to_here()


def test_torchs_classes_need_no_trust_in_code(pair: list[Agent]) -> None:
    name = pair[1].info.name
    weight = rpc.rpc_sync(name, make_reference, (3,))
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, [weight], lr=0.5)
    with autograd.context() as ctx:
        ctx.backward(rpc.rpc_sync(name, times, (weight, torch.ones(3))).sum())
        optimizer.clip_grad_norm_(ctx, 100.0)
        optimizer.step(ctx)
    assert weight.to_here().tolist() == [-0.5, 0.5, 1.5]
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
    with pytest.raises(OptimizerNotMade, match='cannot be sent with trust="data"'):
        optim.DistributedOptimizer(type("Mine", (torch.optim.SGD,), {}), [weight], lr=0.5)


def test_groups_have_one_name_for_each_parameter() -> None:
    groups = [{"param_names": ["w[0, 0]", "w[1, 0]", "b"], "params": [1, 2, 3], "lr": 0.1}]
    assert fold_groups(groups, PARTS) == [{"param_names": ["w", "b"], "params": ["w", "b"], "lr": 0.1}]


def test_states_are_divided_and_joined_again() -> None:
    whole = {"w": {"step": torch.tensor(3.0), "sum": WHOLE, "kind": "text"}, "b": {"sum": torch.ones(2)}}
    divided = divide_states(whole, PARTS)
    assert set(divided) == {"w[0, 0]", "w[1, 0]", "b"}
    assert divided["w[1, 0]"]["sum"].tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert divided["w[0, 0]"]["step"] is not divided["w[1, 0]"]["step"]  # steps are counted in place
    joined = join_states(divided, PARTS)
    assert torch.equal(joined["w"]["sum"], WHOLE)
    assert joined["w"]["step"] == 3.0
    assert joined["w"]["kind"] == "text"
    assert joined["b"] is whole["b"]


def test_parts_without_state_count_as_zero_and_sparse_state_as_dense() -> None:
    (_, second) = PARTS
    sparse = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (2, 2), check_invariants=True)
    joined = join_states({second: {"momentum_buffer": sparse}}, PARTS)
    assert joined["w"]["momentum_buffer"].tolist() == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    assert divide_states({}, PARTS) == {}


def test_values_of_any_kind_are_joined_and_cut_by_functions_of_the_caller() -> None:
    """Checkpoints have nodes of a tree instead of tensors."""

    def cut(value: str, part: PartOf) -> str:
        return f"{value}@{part.box.offsets[0]}"

    divided = divide_states({"w": {"sum": "x"}, "b": {"sum": "y"}}, PARTS, cut)
    assert divided == {"b": {"sum": "y"}, "w[0, 0]": {"sum": "x@0"}, "w[1, 0]": {"sum": "x@1"}}
    joined = join_states(divided, PARTS, lambda items: "+".join(value for _, value in items))
    assert joined == {"b": {"sum": "y"}, "w": {"sum": "x@0+x@1"}}
