"""Sharded tensors over RPC workers in calls: by themselves, inside things, there and back, and what cannot be sent."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.errors import CannotSend
from gradwire.rref import context as references
from gradwire.shard import ShardedTensor
from gradwire.testing.agents import wait_until
from shard.worlds import GroupWorld, WorkerWorld, World, Worlds

WHOLE = torch.arange(35.0, dtype=torch.float64).view(7, 5)


class Holder(nn.Module):
    """Has a sharded parameter, and one that is not."""

    def __init__(self, table: ShardedTensor) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.ones(2))
        table._is_param = True  # type: ignore[attr-defined]
        self.register_parameter("table", table)  # type: ignore[arg-type]


def gather_there(tensor: ShardedTensor) -> tuple[torch.Tensor, list[int], bool, bool]:
    return tensor.full_tensor().detach(), list(tensor.size()), tensor.requires_grad, tensor.is_leaf


def gather_of_module(holder: Holder, rest: dict[str, list[ShardedTensor]]) -> tuple[torch.Tensor, list[str], bool]:
    assert rest["same"][0] is holder.table  # one object of the sender is one here
    return holder.table.full_tensor().detach(), [name for name, _ in holder.named_parameters()], holder.table.is_leaf


def make_there(placements: list[str]) -> ShardedTensor:
    return gw.shard.ChunkShardingSpec(0, placements).shard(WHOLE)


def weigh_there(tensor: ShardedTensor, weights: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() * weights).sum()


def echo(tensor: ShardedTensor) -> ShardedTensor:
    return tensor


def worker_places(world: World) -> list[str]:
    """Those of the workers, and of this process."""
    return [world.placement(0), f"{gw.rpc.get_worker_info().name}/cpu", world.placement(1)]


def check_any_spec(world: WorkerWorld) -> None:
    for spec in [*world.specs(7, 5), gw.shard.ChunkShardingSpec(1, worker_places(world))]:
        sharded = world.shard(WHOLE, spec, requires_grad=True)
        for number in (0, 3):
            found = gw.rpc.rpc_sync(f"worker{number}", gather_there, args=(sharded,))
            assert torch.equal(found[0], WHOLE)
            assert found[1:] == ([7, 5], True, True)


def check_gradients(world: WorkerWorld) -> None:
    """A trainer elsewhere uses the tensor; the gradients reach the shards, those here, too."""
    weights = torch.randn(7, 5, dtype=torch.float64)
    for spec in (world.uneven(0, 7, 5), gw.shard.ChunkShardingSpec(1, worker_places(world))):
        sharded = world.shard(WHOLE, spec, requires_grad=True)
        loss = gw.rpc.rpc_sync("worker3", weigh_there, args=(sharded, weights))
        world.backward(loss)
        assert torch.equal(world.full_gradient(sharded), weights)


def check_inside(world: WorkerWorld) -> None:
    sharded = world.shard(WHOLE, gw.shard.ChunkShardingSpec(0, worker_places(world)), requires_grad=True)
    holder = Holder(sharded)
    found = gw.rpc.rpc_sync("worker2", gather_of_module, args=(holder, {"same": [sharded]}))
    assert torch.equal(found[0], WHOLE)
    assert found[1:] == (["plain", "table"], True)


def check_results(world: WorkerWorld) -> None:
    made = gw.rpc.rpc_sync("worker1", make_there, args=(worker_places(world),))
    assert torch.equal(made.full_tensor(), WHOLE)
    assert [shard.metadata.shard_offsets for shard in made.local_shards()] == [[3, 0]]
    back = gw.rpc.rpc_sync("worker1", echo, args=(made,))
    assert back.metadata() == made.metadata()
    assert back.sharding_spec() == made.sharding_spec()
    assert torch.equal(back.redistribute(world.chunks(1)).full_tensor(), WHOLE)
    assert back.local_tensor().data_ptr() == made.local_tensor().data_ptr()  # what is here was not copied


def check_results_of_operations(world: WorkerWorld) -> None:
    """What was computed is no leaf there either, and gradients go through it."""
    leaf = world.shard(WHOLE, gw.shard.ChunkShardingSpec(0, worker_places(world)), requires_grad=True)
    found = gw.rpc.rpc_sync("worker0", gather_there, args=(leaf.clone(),))
    assert found[2:] == (True, False)
    weights = torch.randn(7, 5, dtype=torch.float64)
    world.backward(gw.rpc.rpc_sync("worker0", weigh_there, args=(leaf.clone(), weights)))
    assert torch.equal(world.full_gradient(leaf), weights)


def check_pickle_outside_of_messages(world: WorkerWorld) -> None:
    with pytest.raises(pickle.PicklingError, match=r"gradwire\.checkpoint"):
        pickle.dumps(world.shard(WHOLE, world.chunks()))


@pytest.mark.parametrize(
    "check",
    [
        check_any_spec,
        check_gradients,
        check_inside,
        check_results,
        check_results_of_operations,
        check_pickle_outside_of_messages,
    ],
)
def test_over_workers(worlds: Worlds, check: Any) -> None:
    assert worlds.check("workers", 3, check) == [None]


def test_nothing_stays_behind(worlds: Worlds) -> None:
    """Parts that were sent are freed with the last that holds them."""
    gc.collect()
    wait_until(lambda: _num_owned() == 0, 30.0, "what tests before this one had is freed")

    def check(world: World) -> None:
        sharded = world.shard(WHOLE, gw.shard.ChunkShardingSpec(0, worker_places(world)))
        for _ in range(3):
            gw.rpc.rpc_sync("worker1", gather_of_module, args=(Holder(sharded), {"same": [sharded]}))
        assert _num_owned() == 1  # one reference, however often it is sent

    worlds.check("workers", 2, check)
    wait_until(lambda: _num_owned() == 0, 30.0, "references to parts are freed")


def _num_owned() -> int:
    return references.here().statistics().num_values


# -- of process groups ----------------------------------------------------------------------------------------------------


def send_elsewhere(tensor: ShardedTensor) -> None:
    with pytest.raises(CannotSend, match="belongs to a process group"):
        gw.rpc.rpc_sync("worker0", gather_there, args=(tensor,))
    with pytest.raises(CannotSend, match="belongs to a process group"):
        gw.rpc.rpc_sync("worker0", gather_there, args=(nn.ParameterList([]), tensor))


def check_of_a_group(world: GroupWorld) -> int:
    send_elsewhere(world.shard(WHOLE, world.chunks()))
    return world.rank


def test_one_of_a_process_group_cannot_be_sent(worlds: Worlds) -> None:
    assert worlds.check("group", 2, check_of_a_group) == [0, 1]
