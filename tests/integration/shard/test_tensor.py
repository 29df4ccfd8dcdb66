"""Methods of `ShardedTensor`: the whole is a copy, gradients of it, devices, text; changes wait for readers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.shard import ChunkShardingSpec, ShardedTensor, sharded_tensor
from shard.worlds import GroupWorld, World, Worlds

HERE = "driver/cpu"


def both(test: Any) -> Any:
    return pytest.mark.parametrize("backend", ["group", "workers"])(test)


# -- the whole -----------------------------------------------------------------------------------------------------------


def check_whole_weight(world: World) -> None:
    """A whole weight for one's own rows: gradients add up; and it needs no more memory than its part."""
    weight, batch = torch.randn(6, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    expected = weight.clone().requires_grad_()
    torch.cosine_similarity(batch.unsqueeze(1), expected, -1).pow(3).sum().backward()  # type: ignore[no-untyped-call]
    assert expected.grad is not None
    for spec in (*world.specs(6, 4), ChunkShardingSpec(0, [world.placement(0)])):
        sharded = world.shard(weight, spec, requires_grad=True)
        whole = sharded.full_tensor(adds_gradients=True)
        world.backward(torch.cosine_similarity(world.own(batch).unsqueeze(1), whole, -1).pow(3).sum())
        world.assert_gradient(sharded, expected.grad)


@both
def test_gradients_of_the_whole_add_up_if_everybody_has_rows_of_their_own(worlds: Worlds, backend: str) -> None:
    assert set(worlds.check(backend, 3, check_whole_weight)) == {None}


def check_memory_of_gradients(world: GroupWorld) -> int:
    sharded = world.shard(torch.ones(6, 4), world.chunks(0), requires_grad=True)
    (sharded.full_tensor() * torch.rand(6, 4)).sum().backward()  # type: ignore[no-untyped-call]
    gradient = sharded.local_tensor().grad
    assert gradient is not None
    return gradient.untyped_storage().nbytes()


def test_the_gradient_of_a_part_does_not_keep_that_of_the_whole(worlds: Worlds) -> None:
    assert worlds.check("group", 2, check_memory_of_gradients) == [3 * 4 * 4] * 2


# -- copies --------------------------------------------------------------------------------------------------------------


def check_copies(world: World) -> None:
    """Also if one place has everything."""
    for places in ([world.placement(0)], [world.placement(0), world.placement(1)]):
        tensor = world.shard(torch.ones(4, 2), ChunkShardingSpec(0, places), requires_grad=True)
        whole = tensor.full_tensor()
        with torch.no_grad():
            whole.zero_()
        gathered = tensor.gather()
        if gathered is not None:
            assert not gathered.requires_grad
            gathered.zero_()
        assert tensor.sum() == 8


@both
def test_what_is_gathered_is_a_copy(worlds: Worlds, backend: str) -> None:
    assert set(worlds.check(backend, 2, check_copies)) == {None}


def test_what_is_gathered_of_parts_that_are_here_is_a_copy(worlds: Worlds) -> None:
    for places in ([HERE], [HERE, "worker0/cpu"]):
        tensor = ChunkShardingSpec(0, places).shard(torch.ones(1, 2)).requires_grad_()
        assert isinstance(tensor, ShardedTensor)
        gathered = tensor.gather()
        assert gathered is not None
        assert not gathered.requires_grad
        gathered.zero_()
        whole = tensor.full_tensor()
        whole.detach().zero_()
        assert whole.requires_grad
        assert tensor.sum() == 2


def check_devices(world: GroupWorld) -> None:
    """Ranks may have different devices, as with one GPU for each; a device without data stands for another one here."""
    own = "meta" if world.rank == 1 else "cpu"
    tensor = sharded_tensor.zeros(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/meta"]), 4, 3)
    assert tensor.device.type == tensor.local_tensor().device.type == own
    assert (tensor * 2).local_tensor().device.type == own
    assert tensor.new_zeros(2).device.type == own


def test_devices_are_those_of_the_rank(worlds: Worlds) -> None:
    assert worlds.check("group", 2, check_devices) == [None, None]


def check_text(world: World) -> None:
    tensor = world.shard(torch.full((1,), 2.5), world.chunks(0))
    assert f"{tensor}" == repr(tensor)
    assert f"{tensor:.2f}" == "2.50"
    assert torch.equal(input=tensor, other=tensor.clone())


@both
def test_text_and_names_of_arguments(worlds: Worlds, backend: str) -> None:
    assert set(worlds.check(backend, 2, check_text)) == {None}


# -- what is read while it is changed ------------------------------------------------------------------------------------


def test_steps_wait_for_what_still_reads_the_parameter(worlds: Worlds) -> None:
    table = ChunkShardingSpec(0, ["worker0/cpu", "worker1/cpu"]).shard(torch.zeros(1500, 1000)).requires_grad_()
    assert isinstance(table, ShardedTensor)
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [table], lr=1.0)
    with gw.autograd.context() as context:
        context.backward(table.sum())
        with torch.no_grad():
            before = [table + number for number in range(6)]
        optimizer.step(context)
    for number, found in enumerate(before):
        assert found.amin() == found.amax() == number
    assert table.amin() == table.amax() == -1


def test_loading_waits_for_what_still_reads_the_tensor(worlds: Worlds, tmp_path: Path) -> None:
    table = ChunkShardingSpec(0, ["worker0/cpu", "worker1/cpu"]).shard(torch.full((1500, 1000), 3.0))
    gw.checkpoint.save(tmp_path / "saved", {"table": table})
    table.fill_(1.0)
    before = [torch.lgamma(table) for _ in range(40)]  # slow enough to be still at it
    gw.checkpoint.load(tmp_path / "saved", {"table": table})
    assert all(found.amax() == 0 for found in before)
    assert table.amin() == table.amax() == 3


def test_every_thread_waits_for_what_still_reads_the_tensor(worlds: Worlds) -> None:
    table = ChunkShardingSpec(0, ["worker0/cpu", "worker1/cpu"]).shard(torch.ones(1500, 1000))
    other = ChunkShardingSpec(0, ["worker0/cpu", "worker1/cpu"]).shard(torch.ones(2, 2))
    before = [torch.lgamma(table) for _ in range(40)]
    threads = [threading.Thread(target=target.fill_, args=(3.0,)) for target in (other, table)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert all(found.amax() == 0 for found in before)
    assert table.amin() == other.amin() == 3
