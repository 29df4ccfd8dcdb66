"""Sharded parameters in a `DistributedOptimizer`: alone, in modules, among others; compared with one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from closeness import assert_close
from gradwire import rpc
from gradwire.cluster.api import Cluster
from gradwire.errors import ConfigurationError, OptimizerError, OptimizerNotMade
from gradwire.rpc import RRef
from gradwire.shard import ChunkShardingSpec, EnumerableShardingSpec, ShardedTensor, ShardMetadata
from gradwire.shard.sharding_spec import ShardingSpec
from optim.programs import make_values, make_weight, read

ROWS, COLUMNS = 7, 4
CLASSES: list[tuple[type[Any], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
]


def specs() -> list[ShardingSpec]:
    """Even; blocks of which the driver has one and a worker two; more workers than columns."""
    here = f"{rpc.get_worker_info().name}/cpu"
    blocks = [
        ShardMetadata([0, 0], [3, 1], "worker0/cpu"),
        ShardMetadata([0, 1], [3, 3], here),
        ShardMetadata([3, 0], [4, 4], "worker0/cpu"),
    ]
    return [
        ChunkShardingSpec(0, ["worker0/cpu", "worker1/cpu"]),
        EnumerableShardingSpec(blocks),
        ChunkShardingSpec(1, [f"worker{number % 2}/cpu" for number in range(6)]),
    ]


def multiply(weight: RRef[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return x @ weight.local_value()


class Program:
    """A table, which may be sharded, a weight that is elsewhere, and a bias that is here."""

    def __init__(self, spec: ShardingSpec | None) -> None:
        table = make_values(1, ROWS, COLUMNS)
        self.table: Any = table.requires_grad_()
        self.weight: Any = make_weight(2)
        if spec is not None:
            self.table = spec.shard(table.detach()).requires_grad_()
            self.weight = rpc.remote("worker1", make_weight, (2,))
        self.bias = make_values(3, COLUMNS).requires_grad_()

    @property
    def named(self) -> list[tuple[str, Any]]:
        return [("table", self.table), ("weight", self.weight), ("bias", self.bias)]

    def whole_table(self) -> torch.Tensor:
        found: torch.Tensor = self.table.full_tensor() if isinstance(self.table, ShardedTensor) else self.table
        return found

    def loss(self, number: int) -> torch.Tensor:
        x = torch.tanh(make_values(100 + number, 3, ROWS) @ self.whole_table())
        if isinstance(self.weight, RRef):
            x = rpc.rpc_sync(self.weight.owner(), multiply, (self.weight, x))
        else:
            x = x @ self.weight
        return (x + self.bias).square().sum()

    def train(self, optimizer: Any, numbers: range, clip: float = 0.0) -> list[float]:
        """Returns the norms before clipping."""
        norms = []
        for number in numbers:
            if isinstance(optimizer, gw.optim.DistributedOptimizer):
                with gw.autograd.context() as ctx:
                    ctx.backward(self.loss(number))
                    if clip:
                        norms.append(float(optimizer.clip_grad_norm_(ctx, clip)))
                        optimizer.clip_grad_value_(ctx, clip / 4)
                    optimizer.step(ctx)
            else:
                optimizer.zero_grad()
                self.loss(number).backward()  # type: ignore[no-untyped-call]
                if clip:
                    parameters = [parameter for _, parameter in self.named]
                    norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, clip)))
                    torch.nn.utils.clip_grad_value_(parameters, clip / 4)
                optimizer.step()
        return norms

    def values(self) -> list[torch.Tensor]:
        weight = self.weight
        if isinstance(weight, RRef):
            weight = rpc.rpc_sync(weight.owner(), read, (weight,))
        with torch.no_grad():
            return [self.whole_table().clone(), weight.detach().clone(), self.bias.detach().clone()]


def assert_same(found: Program, expected: Program) -> None:
    for got, want in zip(found.values(), expected.values(), strict=True):
        assert torch.equal(got, want), f"{(got - want).abs().max()} apart"


@pytest.mark.parametrize(("optimizer_class", "options"), CLASSES)
def test_parts_are_stepped_as_in_one_process_and_state_is_that_of_the_whole(
    cluster: Cluster, optimizer_class: type[Any], options: dict[str, Any]
) -> None:
    """Trains with each layout; loads the state into the next one, into one process, and back."""
    expected = Program(None)
    plain = optimizer_class(expected.named, **options)
    expected.train(plain, range(2))
    layouts = specs()
    for number, spec in enumerate(layouts):
        found, other = Program(spec), Program(layouts[(number + 1) % len(layouts)])
        optimizer = gw.optim.DistributedOptimizer(optimizer_class, found.named, **options)
        found.train(optimizer, range(2))
        assert_same(found, expected)

        state = optimizer.state_dict()
        assert_same_states(state, plain.state_dict())
        again = gw.optim.DistributedOptimizer(optimizer_class, other.named, **{**options, "lr": 7.0})
        again.load_state_dict(state)
        assert_same_states(again.state_dict(), plain.state_dict())
        single = optimizer_class(Program(None).named, **options)
        single.load_state_dict(state)
        optimizer.load_state_dict(single.state_dict())

        longer = Program(None)
        longer.train(optimizer_class(longer.named, **options), range(4))
        found.train(optimizer, range(2, 4))
        assert_same(found, longer)


def assert_same_states(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["state"].keys() == expected["state"].keys()
    for group, other in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert (group["params"], group["param_names"]) == (other["params"], other["param_names"])
    for number, values in expected["state"].items():
        assert found["state"][number].keys() == values.keys()
        for key, value in values.items():
            got = found["state"][number][key]
            assert torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value


@pytest.mark.parametrize("number", [0, 1])
def test_clipping_covers_all_parts(cluster: Cluster, number: int) -> None:
    found, expected = Program(specs()[number]), Program(None)
    norms = found.train(gw.optim.DistributedOptimizer(torch.optim.SGD, found.named, lr=0.1), range(3), clip=0.5)
    want = expected.train(torch.optim.SGD(expected.named, lr=0.1), range(3), clip=0.5)
    assert norms == pytest.approx(want, rel=1e-6)
    for got, value in zip(found.values(), expected.values(), strict=True):
        assert_close(got, value)


class Holder(nn.Module):
    """Sharded parameters as attributes, and as parameters; tied, too."""

    def __init__(self) -> None:
        super().__init__()
        spec = ChunkShardingSpec(0, ["worker0/cpu", "worker1/cpu"])
        self.inner = nn.Linear(4, 2)
        gw.shard.api.shard_parameter(self.inner, "weight", spec)
        self.table = spec.shard(torch.ones(4, 3)).requires_grad_()
        self.tied = self.table


def test_modules_with_sharded_parameters_and_names(cluster: Cluster) -> None:
    holder = Holder()
    remote = gw.nn.RemoteModule("worker0", nn.Linear, (2, 2))
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [holder, remote, holder.inner.bias.new_ones(2)], lr=0.5)
    names = [name for name, _ in optimizer.named_parameters()]
    assert sorted(names) == sorted(
        ["table[0, 0]", "table[2, 0]", "inner.weight[0, 0]", "inner.weight[1, 0]", "inner.bias", "weight", "bias", "5"]
    )
    (group,) = optimizer.state_dict()["param_groups"]
    assert sorted(group["param_names"]) == ["5", "bias", "inner.bias", "inner.weight", "table", "weight"]
    with gw.autograd.context() as ctx:
        ctx.backward(holder.table.full_tensor().sum())
        optimizer.step(ctx)
    assert torch.equal(holder.table.full_tensor().detach(), torch.full((4, 3), 0.5))
    added = ChunkShardingSpec(0, ["worker1/cpu"]).shard(torch.ones(2, 2)).requires_grad_()
    optimizer.add_param_group({"params": added, "lr": 2.0})
    assert optimizer.param_groups[1]["param_names"] == ["6[0, 0]"]
    with gw.autograd.context() as ctx:
        ctx.backward((added.full_tensor() * 2).sum())
        optimizer.step(ctx)
    assert torch.equal(added.full_tensor().detach(), torch.full((2, 2), -3.0))


def test_misuse_is_named(cluster: Cluster) -> None:
    table = specs()[0].shard(torch.ones(ROWS, COLUMNS)).requires_grad_()
    make = gw.optim.DistributedOptimizer
    if hasattr(torch.optim, "Muon"):  # not in torch 2.8
        with pytest.raises(ConfigurationError, match="Muon needs whole parameters"):
            make(torch.optim.Muon, [table], lr=0.1)
    with pytest.raises(OptimizerNotMade, match="pass the sharded tensor itself"):
        make(torch.optim.SGD, [RRef(table)], lr=0.1)
    with pytest.raises(OptimizerNotMade, match="more than once"):
        make(torch.optim.SGD, [("one", table), ("other", table)], lr=0.1)
    with pytest.raises(ConfigurationError, match=r"name 'a\[0, 0\]'"):
        make(torch.optim.SGD, [("a[0, 0]", torch.ones(2)), ("a", table)], lr=0.1)
    optimizer = make(torch.optim.SGD, [("table", table)], lr=0.1)
    with pytest.raises(ConfigurationError, match="Adafactor needs whole parameters"):
        make(torch.optim.Adafactor, [torch.ones(2, requires_grad=True)]).add_param_group({"params": [table]})
    table.reshard(specs()[1])
    with gw.autograd.context() as ctx:
        ctx.backward(table.full_tensor().sum())
        with pytest.raises(OptimizerError, match="'table' was resharded"):
            optimizer.step(ctx)
        again = make(torch.optim.SGD, [("table", table)], lr=0.5)
        again.load_state_dict({**optimizer.state_dict(), "param_groups": again.state_dict()["param_groups"]})
        assert math.isclose(float(again.clip_grad_norm_(ctx, 1e9)), math.sqrt(ROWS * COLUMNS), rel_tol=1e-6)
        again.step(ctx)
    assert torch.equal(table.full_tensor().detach(), torch.full((ROWS, COLUMNS), 0.5))
