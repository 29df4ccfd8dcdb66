"""Parameters and whole modules are sharded by plans, in both worlds; what cannot be is found out before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.shard import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardedTensor,
    ShardedTensorMetadata,
    Sharder,
    ShardingPlan,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
    api,
    load_with_process_group,
    shard_module,
    shard_parameter,
)
from gradwire.shard import creation as scattering
from shard.worlds import World, Worlds

BACKENDS = pytest.mark.parametrize("backend", ["group", "workers"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Its values depend on the seed only."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.emb, self.emb2 = nn.Embedding(7, 6), nn.Embedding(9, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 9)
        self.head.weight = self.emb2.weight
        self.register_buffer("scale", torch.arange(1.0, 7.0))


class Doubling(nn.Module):
    """What a `Sharder` puts in the place of another module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(x)  # type: ignore[no-any-return]


class DoublingSharder(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return Doubling(module)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, ShardedTensor) else tensor.detach()


# -- parameters --------------------------------------------------------------------------------------------------------


def check_parameters(world: World) -> int:
    num_checked = 0
    for size in ((7, 5), (2, 3), (1, 9)):  # also shorter than there are places
        for spec in world.specs(*size):
            module = nn.Linear(size[1], size[0])
            original = module.weight.detach().clone()
            shard_parameter(module, "weight", spec)
            assert isinstance(module.weight, ShardedTensor)
            assert isinstance(module.weight, nn.Parameter)
            assert module.weight.requires_grad
            assert module.weight.is_leaf
            assert module.weight.sharding_spec() is spec
            assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
            assert torch.equal(full(module.weight), original)
            num_checked += 1
    return num_checked


def check_frozen_ones_and_buffers(world: World) -> None:
    model = Model()
    model.emb.weight.requires_grad_(False)
    shard_parameter(model.emb, "weight", world.chunks(0))
    shard_parameter(model, "scale", world.chunks(0))
    assert not model.emb.weight.requires_grad
    assert isinstance(model.emb.weight, nn.Parameter)
    assert not isinstance(model.scale, nn.Parameter)
    assert "scale" in dict(model.named_buffers())
    assert torch.equal(full(model.scale), torch.arange(1.0, 7.0))


def check_pieces(world: World) -> None:
    """Many rounds, also along the last dimension."""
    before = scattering.ROUND_BYTES, scattering._MIN_PIECE_BYTES
    scattering.ROUND_BYTES, scattering._MIN_PIECE_BYTES = 64, 16
    try:
        for size in ((23, 5), (1, 70)):
            for spec in world.specs(*size):
                value = torch.arange(float(size[0] * size[1])).view(size)
                assert torch.equal(full(spec.shard(value)), value)
    finally:
        scattering.ROUND_BYTES, scattering._MIN_PIECE_BYTES = before


@BACKENDS
def test_parameters_by_any_spec(worlds: Worlds, backend: str) -> None:
    assert set(worlds.check(backend, 4, check_parameters)) == {15}
    worlds.check(backend, 3, check_frozen_ones_and_buffers)
    worlds.check(backend, 3, check_pieces)


class Halves(ShardingSpec):
    """A spec of somebody else: no two of them are equal, and nobody knows its placements without a tensor."""

    def __init__(self, first: str, second: str) -> None:
        self.names = first, second

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        half, rest = tensor_sizes[0] // 2, list(tensor_sizes[1:])
        origin = [0] * len(rest)
        shards = [
            ShardMetadata([0, *origin], [half, *rest], self.names[0]),
            ShardMetadata([half, *origin], [tensor_sizes[0] - half, *rest], self.names[1]),
        ]
        return ShardedTensorMetadata(shards, tensor_sizes, tensor_properties)


def check_specs_of_others(world: World) -> None:
    model, want = Model(), Model()
    spec, same = (Halves(world.placement(1), world.placement(0)) for _ in range(2))
    shard_module(model, ShardingPlan({"emb2.weight": spec, "head.weight": same, "scale": spec}))
    assert model.head.weight is model.emb2.weight
    assert torch.equal(full(model.head.weight), want.head.weight)
    assert torch.equal(full(model.scale), want.scale)


@BACKENDS
def test_specs_that_others_wrote(worlds: Worlds, backend: str) -> None:
    assert worlds.check(backend, 2, check_specs_of_others)


NUM_MIB = 48


def peak_of_source(rank: int, dim: int) -> float:
    """How much more memory than the module a rank needs at most, in modules."""
    module = nn.Sequential(nn.Embedding(NUM_MIB * 2**12, 64, _weight=torch.zeros(NUM_MIB * 2**12, 64)))
    dist.barrier()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    shard_module(
        module, ShardingPlan({"0.weight": ChunkShardingSpec(dim, [f"rank:{number}/cpu" for number in range(4)])})
    )
    peak = resident("VmHWM")
    assert resident("VmRSS") - before < 0, "the original is gone"
    return (peak - before) / (NUM_MIB * 2**20)


def resident(kind: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(kind)).split()[1]) * 1024


@pytest.mark.parametrize("dim", [0, 1])
def test_the_source_makes_no_copy_of_what_leaves(worlds: Worlds, dim: int) -> None:
    """It keeps a quarter, and has a few megabytes on their way; benchmarks/shard_memory.py has the figures."""
    assert max(worlds.ranks.run(peak_of_source, dim)) < 0.6


# -- modules -----------------------------------------------------------------------------------------------------------


def check_module(world: World) -> None:
    model, plain = Model(), Model()
    plan = ShardingPlan(
        {
            "emb2.weight": world.uneven(0, 9, 6),
            "blocks.0.up.weight": world.chunks(0),
            "blocks.0.down.weight": world.chunks(1),
            "blocks.1.down": DoublingSharder(),
        }
    )
    shard_module(model, plan)
    assert {name for name, item in model.named_parameters() if isinstance(item, ShardedTensor)} == {
        "emb2.weight",
        "blocks.0.up.weight",
        "blocks.0.down.weight",
    }
    assert model.head.weight is model.emb2.weight, "tied weights stay tied"
    assert torch.equal(full(model.head.weight), plain.head.weight)
    for name in ("blocks.0.up.weight", "blocks.0.down.weight"):
        assert torch.equal(full(model.get_parameter(name)), plain.get_parameter(name))
    assert isinstance(model.blocks[1].down, Doubling), "the Sharder's module is where the original was"
    x = torch.ones(2, 6)
    hidden = torch.relu(plain.blocks[1].up(x))
    assert torch.equal(model.blocks[1](x), 2 * plain.blocks[1].down(hidden))


@BACKENDS
def test_modules_by_a_plan(worlds: Worlds, backend: str) -> None:
    assert worlds.check(backend, 3, check_module)


class SharedParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(3, 3)
        self.a, self.b = nn.Sequential(shared, nn.ReLU()), nn.ModuleDict({"inner": nn.Sequential(shared)})


def check_shared_submodule(world: World) -> None:
    model = SharedParts()
    original = model.a[0]
    shard_module(model, ShardingPlan({"b.inner.0": DoublingSharder()}, {"b.inner.0.inner": world.chunks(0)}, ["a.0"]))
    assert isinstance(model.a[0], Doubling)
    assert model.a[0] is model.b["inner"][0]
    assert model.a[0].inner is original
    assert len(original._forward_hooks) == len(model.a[0]._forward_hooks) == 1


# -- what cannot be done -----------------------------------------------------------------------------------------------


class FailingSharder(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        raise LookupError("no idea how")


class ForgetfulSharder(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return None  # type: ignore[return-value]


def refused(model: Model, run: Callable[[], Any], error: type[Exception], words: str) -> None:
    """Raises what it should, and the module is as it was."""

    def state() -> list[tuple[str, int, int]]:
        modules = [(name, id(item), len(item._forward_hooks)) for name, item in model.named_modules()]
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        return modules + [(name, id(item), item.numel()) for name, item in tensors]

    before = state()
    with pytest.raises(error, match=words):
        run()
    assert state() == before


def check_refusals(world: World) -> int:
    model, rows = Model(), world.chunks(0)
    unknown = ChunkShardingSpec(0, [world.placement(0), world.placement(77)])
    mixed = ChunkShardingSpec(0, ["rank:0/cpu", "worker0/cpu"])
    gap = EnumerableShardingSpec([ShardMetadata([0, 0], [3, 6], world.placement(0))])
    good: dict[str, Any] = {"emb.weight": rows, "blocks.0.up.weight": rows}
    cases: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
        ({"head.wait": rows}, {}, AttributeError, "has no attribute"),
        ({"blocks.7.up.weight": rows}, {}, AttributeError, "no attribute"),
        ({"head.bias": world.chunks(1)}, {}, ValueError, "Invalid sharding dim"),
        ({"head.weight": gap}, {}, ValueError, "do not cover"),
        ({"head.weight": unknown}, {}, ValueError, "77"),
        ({"head.weight": mixed}, {}, ValueError, "not both"),
        ({"head.weight": "rows"}, {}, TypeError, "Only `ShardingSpec` and `Sharder` are supported"),
        ({"": DoublingSharder()}, {}, KeyError, "must not be empty for custom sharder"),
        ({"emb": DoublingSharder()}, {}, RuntimeError, "should not conflict with the submodule tree"),
        ({"head.weight": rows, "emb2.weight": world.chunks(1)}, {}, ValueError, "the same parameter"),
        ({"emb2": FailingSharder()}, {}, LookupError, "no idea how"),
        ({"emb2": ForgetfulSharder()}, {}, TypeError, "must return an nn.Module"),
        ({"blocks.1": DoublingSharder()}, {"output_plan": {"blocks.1.up": rows}}, AttributeError, "no attribute"),
        ({}, {"output_plan": {"nowhere": rows}}, AttributeError, "no attribute"),
        ({}, {"output_plan": {"emb": unknown}}, ValueError, "77"),
        ({}, {"output_plan": {"emb": 3}}, TypeError, "Only `ShardingSpec` is supported as output_plan"),
        ({}, {"return_local_tensor": ["emb", "emb"]}, ValueError, "twice"),
    ]
    for entries, more, error, words in cases:
        plan = ShardingPlan({**good, **entries}, **more)
        refused(model, lambda plan=plan: shard_module(model, plan), error, words)  # type: ignore[misc]
    refused(model, lambda: shard_parameter(model, "emb.weight", rows), AttributeError, "has no attribute")
    refused(model, lambda: shard_parameter(model.emb, "weight", 3), TypeError, "Only `ShardingSpec`")  # type: ignore[arg-type]
    shard_parameter(model.emb, "weight", rows)
    refused(model, lambda: shard_parameter(model.emb, "weight", rows), ValueError, "already sharded")
    return len(cases)


@BACKENDS
def test_a_module_that_is_refused_is_as_it_was(worlds: Worlds, backend: str) -> None:
    assert set(worlds.check(backend, 3, check_refusals)) == {17}
    assert worlds.check(backend, 2, check_shared_submodule)


class FailsOnOneRank(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        if dist.get_rank() == 2:
            raise ValueError("not here")
        return module


def check_ranks_that_differ(world: World) -> None:
    rank, model, rows = dist.get_rank(), Model(), world.chunks(0)
    odd = rank == 2
    others = ChunkShardingSpec(0, [world.placement(rank), world.placement(1)])
    refused(
        model, lambda: shard_parameter(model.emb, "weight", rows, src_rank=rank), ValueError, "does not match src_rank"
    )
    refused(model, lambda: shard_parameter(model.emb, "weight", others), ValueError, "does not match sharding_spec")
    refused(model, lambda: api._shard_tensor(torch.ones(4), rows, src_rank=rank), ValueError, "does not match src_rank")
    refused(model, lambda: api._shard_tensor(torch.ones(4), others), ValueError, "does not match sharding_spec")
    refused(model, lambda: api._shard_tensor(torch.ones(4 + odd), rows), ValueError, "does not match s")
    refused(
        model, lambda: shard_parameter(model.emb, "weight", rows, src_rank=9), ValueError, "is not a rank of the group"
    )
    for missing in ("emb.weight", "head.wait"):  # the same error for all, if only one rank cannot
        plan = ShardingPlan({"emb.weight": rows, ("head.wait" if odd else missing): rows})
        refused(model, lambda plan=plan: shard_module(model, plan), AttributeError, "has no attribute")  # type: ignore[misc]
    plan = ShardingPlan({"emb.weight": rows, "head": FailsOnOneRank()})
    refused(model, lambda: shard_module(model, plan), ValueError, "not here")


def check_groups_of_some_ranks(world: World) -> None:
    """A group of ranks 1 to 3: placements name ranks among all, src_rank is one in the group."""
    inner = dist.new_group([1, 2, 3])
    smaller = dist.new_group([2, 3])
    spec = ChunkShardingSpec(0, ["rank:3/cpu", "rank:1/cpu"])
    rank = dist.get_rank()
    if rank > 0:
        model, want = Model(seed=rank), Model(seed=2)
        shard_module(model, ShardingPlan({"emb.weight": spec, "head.weight": spec}), src_rank=1, process_group=inner)
        assert torch.equal(full(model.emb.weight), want.emb.weight)
        assert torch.equal(full(model.emb2.weight), want.emb2.weight)
        outside = ChunkShardingSpec(0, ["rank:0/cpu"])
        refused(model, lambda: shard_parameter(model, "scale", outside, 0, inner), ValueError, "rank 0 does not exist")
    with load_with_process_group(inner) as found:
        assert found is inner
        with load_with_process_group(smaller):
            assert api._get_current_process_group() is smaller
            if rank > 1:
                pair = ChunkShardingSpec(0, ["rank:3/cpu", "rank:2/cpu"])
                assert torch.equal(full(pair.shard(torch.arange(5))), torch.arange(5))
        assert api._get_current_process_group() is inner
    assert api._get_current_process_group() is dist.group.WORLD
    if rank == 0:
        model = Model()
        refused(
            model, lambda: shard_parameter(model, "scale", spec, 0, inner), RuntimeError, "not in the process group"
        )


def test_ranks_that_want_different_things_are_all_refused(worlds: Worlds) -> None:
    assert worlds.check("group", 4, check_ranks_that_differ)
    assert worlds.check("group", 4, check_groups_of_some_ranks)


def test_without_a_group_or_with_one_too_many(worlds: Worlds) -> None:
    model = Model()
    rank = ChunkShardingSpec(0, ["rank:0/cpu"])
    refused(model, lambda: shard_parameter(model, "scale", rank), RuntimeError, "no process group")
    worker = ChunkShardingSpec(0, ["worker0/cpu"])
    refused(
        model, lambda: shard_parameter(model, "scale", worker, 0, object()), ValueError, "placements name RPC workers"
    )


# -- parameters without data -------------------------------------------------------------------------------------------


def without_data() -> Model:
    model = Model().to("meta")
    model.head.weight = model.emb2.weight
    return model


def check_meta(world: World) -> None:
    """Only the source needs data; if it has none either, shards are there to be filled."""
    rank, want = dist.get_rank(), Model()
    plan = ShardingPlan({"emb.weight": world.chunks(0), "head.weight": world.blocks(9, 6)})
    model = Model() if rank == 1 else without_data()
    shard_module(model, plan, src_rank=1)
    assert torch.equal(full(model.emb.weight), want.emb.weight)
    assert torch.equal(full(model.emb2.weight), want.emb2.weight)
    assert model.head.weight is model.emb2.weight
    assert not any(item.is_meta for item in [*model.parameters(), *model.buffers()]), "what stays whole is there, too"
    assert torch.equal(model.blocks[1].down.bias, want.blocks[1].down.bias)
    assert torch.equal(model.scale, want.scale)


def check_meta_everywhere(world: World) -> None:
    model = without_data()
    shard_module(model, ShardingPlan({"emb.weight": world.chunks(0)}))
    assert [part.is_meta for part in model.emb.weight._parts if isinstance(part, torch.Tensor)].count(True) == 0
    assert full(model.emb.weight).size() == (7, 6)
    assert model.head.weight.is_meta


def test_only_the_source_needs_data(worlds: Worlds) -> None:
    assert worlds.check("group", 3, check_meta)
    assert worlds.check("group", 2, check_meta_everywhere)
    assert worlds.check("workers", 2, check_meta_everywhere)
