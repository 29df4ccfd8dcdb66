"""Sharded modules compute and learn what they do in one process, in both worlds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw
from gradwire.shard import (
    BalancedPlanner,
    ShardedOptimizer,
    ShardedTensor,
    ShardingPlan,
    named_params_with_sharded_tensor,
    shard_module,
)
from gradwire.shard.api import _collect_local_shard, _reshard_output
from shard.worlds import GroupWorld, World, Worlds

WORKERS_IMPORT = ["torch._dynamo"]  # the first optimizer imports it, which takes a second
BACKENDS = pytest.mark.parametrize("backend", ["group", "workers"])
NUM_STEPS = 6


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-10, atol=1e-12)


# -- outputs -----------------------------------------------------------------------------------------------------------


def check_outputs(world: World) -> None:
    batch = torch.randn(9, 6, dtype=torch.float64)
    plain = nn.Linear(6, 8, dtype=torch.float64)
    rows, columns = world.chunks(0), world.chunks(0)
    divided = copy.deepcopy(plain)
    shard_module(divided, ShardingPlan({"weight": columns}, output_plan={"": rows}))
    found = divided(world.own(batch))
    assert isinstance(found, ShardedTensor)
    assert found.sharding_spec() is rows
    assert close(found.full_tensor(), plain(batch))


def check_local_outputs(world: World) -> None:
    """The last rank has no rows of the output, and must take part in backward all the same."""
    batch = torch.randn(9, 6, dtype=torch.float64)
    plain = nn.Linear(6, 8, dtype=torch.float64)
    divided = nn.Sequential(copy.deepcopy(plain))
    plan = ShardingPlan({"0.weight": world.uneven(0, 8, 6)}, {"0": world.chunks(0)}, ["0"])
    shard_module(divided, plan)
    found = divided(world.own(batch))
    assert not isinstance(found, ShardedTensor)
    assert close(world.join(found), plain(batch))
    world.backward(found.square().sum())
    plain(batch).square().sum().backward()
    assert close(world.full_gradient(divided[0].weight), plain.weight.grad)  # type: ignore[arg-type]
    assert close(world.gradient(divided[0].bias), plain.bias.grad)  # type: ignore[arg-type]


def check_slices(world: World) -> None:
    """Of an output that is cut into slices of length 1, each rank has one without that dimension."""
    batch, plain = torch.randn(world.num_places, 6), nn.Linear(6, 8)
    divided = copy.deepcopy(plain)
    shard_module(divided, ShardingPlan({"weight": world.chunks(0)}, {"": world.chunks(0)}, [""]))
    found = divided(world.own(batch))
    if isinstance(world, GroupWorld):
        assert torch.allclose(found, plain(batch)[world.rank])
    else:
        assert torch.allclose(found, plain(batch))


def check_plain_outputs_pass(world: World) -> None:
    module, x = nn.Linear(3, 3), torch.randn(2, 3)
    expected = module(x)
    assert _reshard_output(module, world.chunks(0)) is module
    assert _collect_local_shard(module) is module
    assert torch.equal(module(x), expected)


@BACKENDS
def test_outputs_become_what_the_plan_says(worlds: Worlds, backend: str) -> None:
    for num_places, check in (
        (3, check_outputs),
        (4, check_local_outputs),
        (3, check_slices),
        (2, check_plain_outputs_pass),
    ):
        assert worlds.check(backend, num_places, check)  # type: ignore[arg-type]


# -- training ----------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """Words in, classes out: a table, and an MLP of two pairs of layers with a part between them that stays whole."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.table = nn.Embedding(23, 6)
        self.mlp = nn.Sequential(
            nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6), nn.LayerNorm(6), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5)
        )

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.table(words).mean(dim=1))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """The two-layer MLP of transformers, as people write it."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]


def batches(kind: type[nn.Module]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    found = []
    for _ in range(NUM_STEPS):
        words = torch.randint(23, (11, 4), generator=numbers)
        x = words if kind is Classifier else torch.randn(11, 6, generator=numbers, dtype=torch.float64)
        found.append((x, torch.randint(5, (11,), generator=numbers)))
    return found


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The sum over rows: so the losses of all ranks add up to that of the whole batch."""
    return nn.functional.cross_entropy(model(x), y, reduction="sum") / 11


def train_in_one_process(model: nn.Module) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for x, y in batches(type(model)):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(world: World, model: nn.Module) -> list[float]:
    return train_on_ranks(world, model) if isinstance(world, GroupWorld) else train_on_workers(model)


def train_on_ranks(world: World, model: nn.Module) -> list[float]:
    optimizer = ShardedOptimizer(dict(named_params_with_sharded_tensor(model)), torch.optim.AdamW, lr=0.05)
    losses = []
    for x, y in batches(type(model)):
        optimizer.zero_grad()
        loss = loss_of(model, world.own(x), world.own(y))
        loss.backward()  # type: ignore[no-untyped-call]
        for item in model.modules():
            if isinstance(
                item, nn.LayerNorm
            ):  # not part of any sharded operation: each rank has the gradient of its rows
                dist.all_reduce(item.weight.grad)
                dist.all_reduce(item.bias.grad)
        optimizer.step()
        losses.append(world.join(loss.detach().view(1)).sum().item())
    return losses


def train_on_workers(model: nn.Module) -> list[float]:
    optimizer, losses = gw.optim.DistributedOptimizer(torch.optim.AdamW, list(model.parameters()), lr=0.05), []
    for x, y in batches(type(model)):
        with gw.autograd.context() as context:
            loss = loss_of(model, x, y)
            context.backward(loss)
            optimizer.step(context)
        losses.append(loss.item())
    return losses


def check_training(world: World, kind: type[nn.Module], make_plan: Any) -> int:
    plain, model = kind().double(), kind().double()
    plan = make_plan(world, model)
    shard_module(model, plan)
    found, expected = train(world, model), train_in_one_process(plain)
    assert close(torch.tensor(found), torch.tensor(expected)), (found, expected)
    for (name, tensor), (_, want) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        got = tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor
        assert torch.allclose(got, want, rtol=1e-7, atol=1e-9), name
    return len(plan.plan)


def by_hand(world: World, model: nn.Module) -> ShardingPlan:
    return ShardingPlan({"up.weight": world.chunks(0), "up.bias": world.chunks(0), "down.weight": world.chunks(1)})


def unevenly(world: World, model: nn.Module) -> ShardingPlan:
    return ShardingPlan({"up.weight": world.uneven(0, 10, 6), "down.weight": world.uneven(1, 5, 10)})


def in_other_ways(world: World, model: nn.Module) -> ShardingPlan:
    """Specs that do not fit each other: what is between the layers has to move."""
    return ShardingPlan({"up.weight": world.uneven(0, 10, 6), "down.weight": world.blocks(5, 10)})


def by_the_planner(world: World, model: nn.Module) -> ShardingPlan:
    placements = [world.placement(number) for number in range(world.num_places)]
    pairs = [("up", "down")] if isinstance(model, Mlp) else []
    return BalancedPlanner(placements, min_bytes=0, pairs=pairs).build_plan(model)


@BACKENDS
@pytest.mark.parametrize("num_places", [2, 4])
def test_an_mlp_learns_what_it_does_in_one_process(worlds: Worlds, backend: str, num_places: int) -> None:
    assert set(worlds.check(backend, num_places, check_training, Mlp, by_hand)) == {3}
    assert set(worlds.check(backend, num_places, check_training, Mlp, unevenly)) == {2}
    assert set(worlds.check(backend, num_places, check_training, Mlp, by_the_planner)) == {2}
    assert set(worlds.check(backend, num_places, check_training, Mlp, in_other_ways)) == {2}


@BACKENDS
def test_a_planned_model_learns_what_it_does_in_one_process(worlds: Worlds, backend: str) -> None:
    assert set(worlds.check(backend, 3, check_training, Classifier, by_the_planner)) == {5}
