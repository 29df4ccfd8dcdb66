"""Sharded tensors in checkpoints: saved by some ranks or workers, loaded by others, in any layout, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire import checkpoint
from gradwire.errors import CannotSave, CheckpointDamaged, CheckpointError, CheckpointMismatch
from gradwire.shard import ShardedTensor
from shard.worlds import GroupWorld, World, Worlds

BACKENDS = ["group", "workers"]
DTYPES = [torch.float64, torch.bfloat16, torch.complex128, torch.int16]


class Table(nn.Module):
    """A module with a sharded parameter and one that is not."""

    def __init__(self, weight: ShardedTensor, bias: float = 0.0) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((2,), bias))
        weight._is_param = True
        self.register_parameter("weight", weight)  # type: ignore[arg-type]


class Plain(nn.Module):
    """The same in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))
        self.weight = nn.Parameter(torch.zeros(7, 5, dtype=torch.float64))


def whole(number: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A tensor with other values for each number."""
    generator = torch.Generator().manual_seed(number)
    return (torch.randn(7, 5, dtype=torch.float64, generator=generator) * 100).to(dtype)


def all_specs(world: World) -> list[Any]:
    return [*world.specs(7, 5), world.chunks(0)]


def save_all(world: World, folder: str) -> int:
    """Every layout, some dtypes, in dicts, lists and modules."""
    tensors = [world.shard(whole(number), spec) for number, spec in enumerate(all_specs(world))]
    kinds = {str(dtype): world.shard(whole(90, dtype), world.blocks(7, 5)) for dtype in DTYPES}
    modules = [Table(world.shard(whole(50), world.uneven(0, 7, 5), requires_grad=True), 3.0)]
    state = {
        "tensors": tensors,
        "kinds": kinds,
        "modules": modules,
        "same": modules[0].weight,
        "plain": whole(60),
        "step": 7,
    }
    summary = checkpoint.save(folder, state, progress=False)
    assert len(summary.files) > 1 or world.num_places == 1
    return len(tensors)


def load_all(world: World, folder: str, num_tensors: int) -> None:
    """Each into a layout that it did not have."""
    specs = all_specs(world)
    spec_of = [specs[(number + 2) % len(specs)] for number in range(num_tensors)]
    zeros = torch.zeros(7, 5, dtype=torch.float64)
    tensors = [world.shard(zeros, spec) for spec in spec_of]
    kinds = {str(dtype): world.shard(zeros.to(dtype), world.chunks(1)) for dtype in DTYPES}
    module = Table(world.shard(zeros, world.blocks(7, 5), requires_grad=True))
    weight = module.weight
    values = checkpoint.load(folder, {"tensors": tensors, "kinds": kinds, "modules": [module]}, progress=False)
    assert values.keys() == {"plain", "same", "step"}
    assert torch.equal(values["same"], whole(50))  # what is not given to be filled comes as a whole
    for number, tensor in enumerate(tensors):
        assert torch.equal(tensor.full_tensor(), whole(number))
    for dtype in DTYPES:
        assert torch.equal(kinds[str(dtype)].full_tensor(), whole(90, dtype))
    assert module.weight is weight
    assert (weight.is_leaf, weight.requires_grad) == (True, True)
    assert torch.equal(weight.full_tensor(), whole(50))
    assert module.bias.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("saver", "num_savers", "loader", "num_loaders"),
    [
        ("group", 4, "group", 2),
        ("group", 2, "workers", 4),
        ("workers", 4, "workers", 2),
        ("workers", 2, "group", 4),
        ("group", 1, "group", 3),
        ("workers", 3, "group", 1),
    ],
)
def test_from_any_number_to_any_other(
    worlds: Worlds, tmp_path: Path, saver: str, num_savers: int, loader: str, num_loaders: int
) -> None:
    (number, *_) = worlds.check(saver, num_savers, save_all, str(tmp_path))
    assert set(worlds.check(loader, num_loaders, load_all, str(tmp_path), number)) == {None}
    assert checkpoint.verify(tmp_path).num_tensors > number


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_one_process(worlds: Worlds, backend: str, tmp_path: Path) -> None:
    """Plain tensors and modules take what was sharded, and sharded ones what was not."""
    worlds.check(backend, 4, save_all, str(tmp_path / "sharded"))
    found = checkpoint.read(tmp_path / "sharded")
    assert torch.equal(found["tensors"][3], whole(3))
    assert torch.equal(found["kinds"]["torch.bfloat16"], whole(90, torch.bfloat16))
    plain, tensor = Plain(), torch.zeros(7, 5, dtype=torch.float64)
    checkpoint.load(tmp_path / "sharded", {"modules": [plain], "same": tensor})
    assert torch.equal(plain.weight, whole(50))
    assert torch.equal(tensor, whole(50))
    checkpoint.save(tmp_path / "plain", {"modules": [plain], "tensors": [whole(0)], "kinds": {}, "plain": 1})
    worlds.check(backend, 3, load_plain, str(tmp_path / "plain"))


def load_plain(world: World, folder: str) -> None:
    module = Table(world.shard(torch.zeros(7, 5, dtype=torch.float64), world.blocks(7, 5), requires_grad=True))
    checkpoint.load(folder, {"modules": [module]})
    assert torch.equal(module.weight.full_tensor(), whole(50))


def check_of_this_worker(world: World, folder: str) -> None:
    """Shards of the worker that saves, a tensor under two names, and one that came from another worker."""
    here = gw.rpc.get_worker_info().name
    spec = gw.shard.ChunkShardingSpec(0, [world.placement(0), f"{here}/cpu", world.placement(1)])
    tensor = world.shard(whole(1), spec)
    module = Table(world.shard(whole(2), spec, requires_grad=True))
    module.register_parameter("tied", module.weight)
    summary = checkpoint.save(folder, {"a": tensor, "b": tensor, "m": module}, progress=False)
    assert {file.worker for file in summary.files} == {here, "worker0", "worker1"}
    assert summary.num_tensors == 3 + 3 + 1
    target = world.shard(torch.zeros_like(whole(1)), world.uneven(1, 7, 5))
    checkpoint.load(folder, {"b": target}, progress=False)
    assert torch.equal(target.full_tensor(), whole(1))
    gw.rpc.rpc_sync("worker3", fill_there, args=(folder, target))
    assert torch.equal(target.full_tensor(), whole(2))


def fill_there(folder: str, target: ShardedTensor) -> None:
    module = Table(target)
    checkpoint.load(folder, {"m": module}, strict=False, progress=False)


def test_shards_of_the_worker_that_saves(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.check("workers", 3, check_of_this_worker, str(tmp_path)) == [None]


# -- what does not work --------------------------------------------------------------------------------------------------


def check_refusals(world: World, folder: str) -> None:
    zeros = torch.zeros(7, 5, dtype=torch.float64)
    checkpoint.save(folder, {"a": world.shard(whole(0), world.chunks()), "m": {"x": 1}}, progress=False)
    target = world.shard(zeros, world.chunks(1))
    for wanted, problem in {
        "b": "'b' is not in the checkpoint",
        "m": "was not saved as a tensor",
    }.items():
        with pytest.raises(CheckpointMismatch, match=problem):
            checkpoint.load(folder, {"a": target, wanted: world.shard(zeros, world.chunks())})
    with pytest.raises(CheckpointMismatch, match=r"shape \[7, 5\] in the checkpoint and \[5, 7\] here"):
        checkpoint.load(folder, {"a": world.shard(zeros.t(), world.chunks())})
    with pytest.raises(CheckpointMismatch, match="is float64 in the checkpoint and float32 here"):
        checkpoint.load(folder, {"a": world.shard(zeros.float(), world.chunks())})
    with pytest.raises(CannotSave, match="cannot be saved"):
        checkpoint.save(folder, {"a": world.shard(zeros, world.chunks()), "x": object()}, progress=False)
    assert torch.equal(target.full_tensor(), zeros)
    converted = world.shard(zeros.float(), world.chunks())
    checkpoint.load(folder, {"a": converted}, strict=False)
    assert torch.equal(converted.full_tensor(), whole(0).float())


@pytest.mark.parametrize("backend", BACKENDS)
def test_refusals_change_nothing(worlds: Worlds, backend: str, tmp_path: Path) -> None:
    assert set(worlds.check(backend, 3, check_refusals, str(tmp_path))) == {None}


def load_damaged(world: World, folder: str) -> str:
    target = world.shard(torch.zeros(7, 5, dtype=torch.float64), world.chunks(1))
    with pytest.raises(CheckpointDamaged, match="damaged") as caught:
        checkpoint.load(folder, {"a": target})
    assert not target.full_tensor().any()
    return str(caught.value)


def save_one(world: World, folder: str) -> None:
    checkpoint.save(folder, {"a": world.shard(whole(0), world.chunks())}, progress=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_damage_is_found_by_everybody(worlds: Worlds, backend: str, tmp_path: Path) -> None:
    """One rank reads the bad bytes, and all raise."""
    worlds.check(backend, 2, save_one, str(tmp_path))
    file = sorted(tmp_path.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    for text in worlds.check(backend, 2, load_damaged, str(tmp_path)):
        assert file.name in text


def save_different(world: GroupWorld, folder: str) -> None:
    tensors = [world.shard(whole(number), world.chunks()) for number in range(2)]
    names = ["a", "b"] if world.rank == 0 else ["a", "c"]
    with pytest.raises(CheckpointError, match="all ranks must save the same"):
        checkpoint.save(folder, dict(zip(names, tensors, strict=True)), progress=False)


def save_where_one_cannot(world: GroupWorld, folder: str) -> None:
    """Rank 1 sees another directory under that name."""
    own, state = folder if world.rank == 0 else f"{folder}-other", {"a": world.shard(whole(5), world.chunks())}
    with pytest.raises(CheckpointError, match="cannot see the directory"):
        checkpoint.save(own, state, progress=False)


def test_ranks_that_disagree_leave_the_old_checkpoint(worlds: Worlds, tmp_path: Path) -> None:
    worlds.check("group", 2, save_one, str(tmp_path))
    before = sorted(tmp_path.iterdir())
    worlds.check("group", 2, save_different, str(tmp_path))
    worlds.check("group", 2, save_where_one_cannot, str(tmp_path))
    assert sorted(tmp_path.iterdir()) == before
    assert torch.equal(checkpoint.read(tmp_path)["a"], whole(0))
