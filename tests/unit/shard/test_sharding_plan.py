"""Plans of the planner: what is divided how, and that bytes are in balance."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradwire.shard import BalancedPlanner, ChunkShardingSpec, EnumerableShardingSpec, ShardingPlan
from gradwire.shard.metadata import TensorProperties
from gradwire.shard.sharding_plan import divide_length

RANKS = [f"rank:{number}/cpu" for number in range(4)]


def dims(plan: ShardingPlan) -> dict[str, int]:
    """Along which dimension each parameter is cut."""
    found = {}
    for name, spec in plan.plan.items():
        if isinstance(spec, ChunkShardingSpec):
            found[name] = spec.dim
        else:
            assert isinstance(spec, EnumerableShardingSpec)
            found[name] = next(dim for dim in (0, 1) if len({shard.shard_offsets[dim] for shard in spec.shards}) > 1)
    return found


def bytes_by_place(module: nn.Module, plan: ShardingPlan) -> dict[str, int]:
    loads: dict[str, int] = {}
    for name, spec in plan.plan.items():
        size = module.get_parameter(name).size()
        for shard in spec.build_metadata(size, TensorProperties()).shards_metadata:  # type: ignore[union-attr]
            loads[str(shard.placement)] = loads.get(str(shard.placement), 0) + shard.box.num_elements * 4
    return loads


def test_linear_pairs_embeddings_and_the_rest() -> None:
    model = nn.ModuleDict(
        {
            "table": nn.Embedding(100, 16),
            "bag": nn.EmbeddingBag(50, 16),
            "mlp": nn.Sequential(
                nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1),
                nn.Sequential(nn.Linear(64, 16), nn.LayerNorm(16)), nn.Linear(16, 32),
            ),
            "attention": nn.MultiheadAttention(16, 2),
            "small": nn.Linear(2, 2),
        }
    )  # fmt: skip
    plan = BalancedPlanner(RANKS, min_bytes=1000).build_plan(model)
    assert dims(plan) == {
        "table.weight": 0,
        "bag.weight": 0,
        "mlp.0.weight": 0,
        "mlp.3.0.weight": 1,
        "mlp.4.weight": 1,
    }
    assert plan.output_plan is None
    assert plan.return_local_tensor is None


def test_pairs_that_only_people_know() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    blocks = nn.ModuleList([Block(), Block()])
    assert dims(BalancedPlanner(RANKS, 0).build_plan(blocks))["0.up.weight"] == 1
    planned = dims(BalancedPlanner(RANKS, 0, pairs=[("0.up", "0.down")]).build_plan(blocks))
    assert planned == {"0.up.weight": 0, "0.down.weight": 1, "1.up.weight": 1, "1.down.weight": 1}
    with pytest.raises(ValueError, match="does not match the input size"):
        BalancedPlanner(RANKS, 0, pairs=[("0.up", "0.up")]).build_plan(blocks)
    with pytest.raises(TypeError, match="two Linear modules"):
        BalancedPlanner(RANKS, 0, pairs=[("0", "0.up")]).build_plan(blocks)
    with pytest.raises(AttributeError):
        BalancedPlanner(RANKS, 0, pairs=[("0.up", "0.side")]).build_plan(blocks)


def test_tied_weights_are_planned_once_and_not_as_half_of_a_pair() -> None:
    model = nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 40))
    model[3].weight = model[0].weight
    assert dims(BalancedPlanner(RANKS, 0).build_plan(model)) == {"1.weight": 1, "3.weight": 1}
    shared = nn.Linear(8, 8)
    twice = nn.Sequential(shared, nn.ReLU(), shared)
    assert dims(BalancedPlanner(RANKS, 0).build_plan(twice)) == {"0.weight": 1}


def test_both_of_a_pair_are_cut_at_the_same_places() -> None:
    model = nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 8))
    plan = BalancedPlanner(["worker0/cpu", "worker1/cpu", "worker2/cpu"], 0).build_plan(model)
    first, second = plan.plan["0.weight"], plan.plan["2.weight"]
    assert isinstance(first, EnumerableShardingSpec)
    assert isinstance(second, EnumerableShardingSpec)
    assert [shard.shard_sizes[0] for shard in first.shards] == [4, 3, 3]
    assert [shard.shard_sizes[1] for shard in second.shards] == [4, 3, 3]
    assert [shard.placement for shard in first.shards] == [shard.placement for shard in second.shards]


def test_meta_modules_and_the_module_itself() -> None:
    with torch.device("meta"):
        table = nn.Embedding(2**20, 128)
    plan = BalancedPlanner(RANKS).build_plan(table)
    assert dims(plan) == {"weight": 0}
    assert set(bytes_by_place(table, plan).values()) == {2**27}
    assert BalancedPlanner(RANKS).build_plan(nn.Linear(4, 4)).plan == {}


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=8), st.integers(1, 5))
def test_no_place_has_more_than_one_row_too_many(tables: list[tuple[int, int]], num_places: int) -> None:
    model = nn.ModuleList([nn.Embedding(*size, device="meta") for size in tables])
    placements = [f"worker{number}/cpu" for number in range(num_places)]
    loads = bytes_by_place(model, BalancedPlanner(placements, 0).build_plan(model))
    assert sum(loads.values()) == sum(4 * rows * columns for rows, columns in tables)
    assert max(loads.values()) - min(loads.values()) <= 4 * max(columns for _, columns in tables)


@given(st.integers(0, 1000), st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any))
def test_shares_are_kept_and_nothing_is_lost(length: int, capacities: list[int]) -> None:
    shares = [item / sum(capacities) for item in capacities]
    found = divide_length(length, shares, [0.0] * len(shares))
    assert sum(found) == length
    assert all(abs(item - share * length) <= 1 + 1e-6 for item, share in zip(found, shares, strict=True))
    assert all(item == 0 for item, share in zip(found, shares, strict=True) if share == 0)


def test_capacities() -> None:
    model = nn.Embedding(100, 4)
    plan = BalancedPlanner(RANKS, 0, capacities=[2, 1, 1, 0]).build_plan(model)
    assert list(bytes_by_place(model, plan).values()) == [800, 400, 400, 0]


@pytest.mark.parametrize(
    ("placements", "capacities"),
    [([], None), (["worker0/cpu"] * 2, None), (["rank:0/cpu"], [1, 2]), (["rank:0/cpu"], [0]), (["rank:0/cpu"], [-1])],
)
def test_placements_and_capacities_must_fit(placements: list[str], capacities: list[float] | None) -> None:
    with pytest.raises(ValueError):
        BalancedPlanner(placements, capacities=capacities)
