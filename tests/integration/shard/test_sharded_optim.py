"""`ShardedOptimizer` and clipping on the ranks of a process group, compared with one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import gradwire as gw
from closeness import assert_close
from gradwire.errors import ConfigurationError, OptimizerError
from gradwire.params.grads import clamped, norm_of
from gradwire.shard import (
    ShardedOptimizer,
    ShardedTensor,
    clip_grad_norm_,
    clip_grad_value_,
    named_params_with_sharded_tensor,
)
from gradwire.shard.layout import whole
from gradwire.shard.sharding_spec import ShardingSpec
from shard.worlds import World, Worlds

WORKERS_IMPORT = ["torch._dynamo"]  # the first optimizer imports it, which takes a second
ROWS, COLUMNS = 7, 5
CLASSES: list[tuple[type[Any], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {"lr": 0.1}),
    (torch.optim.ASGD, {"lr": 0.1}),
    (torch.optim.NAdam, {"lr": 0.1}),
    (torch.optim.RAdam, {"lr": 0.1}),
    (torch.optim.Rprop, {"lr": 0.1, "foreach": True}),
]

SPARSE: list[tuple[type[Any], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SparseAdam, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
]


def make_values(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


class Program:
    """A weight and a bias; the weight may be sharded, the bias is the same everywhere."""

    def __init__(self, world: World, spec: ShardingSpec | None) -> None:
        weight = make_values(1, ROWS, COLUMNS)
        self.weight: Any = weight.requires_grad_() if spec is None else world.shard(weight, spec, requires_grad=True)
        self.bias = make_values(2, COLUMNS).requires_grad_()

    @property
    def named(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight, "bias": self.bias}

    def whole_weight(self) -> torch.Tensor:
        return self.weight.full_tensor() if isinstance(self.weight, ShardedTensor) else self.weight

    def backward(self, number: int) -> None:
        x = make_values(100 + number, 3, ROWS)
        torch.tanh(x @ self.whole_weight() + self.bias).square().sum().backward()  # type: ignore[no-untyped-call]

    def train(self, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            optimizer.zero_grad()
            self.backward(number)
            optimizer.step()

    def values(self) -> list[torch.Tensor]:
        return [self.whole_weight().detach().clone(), self.bias.detach().clone()]


def assert_same(found: Program, expected: Program) -> None:
    for got, want in zip(found.values(), expected.values(), strict=True):
        assert torch.equal(got, want), f"{(got - want).abs().max()} apart"


def one_process(
    world: World, optimizer_class: type[Any], options: dict[str, Any]
) -> tuple[Program, torch.optim.Optimizer]:
    program = Program(world, None)
    return program, optimizer_class(list(program.named.values()), **options)


def check_classes(world: World) -> int:
    for number, (optimizer_class, options) in enumerate(CLASSES):
        expected, plain = one_process(world, optimizer_class, options)
        expected.train(plain, range(4))
        specs = world.specs(ROWS, COLUMNS)
        found = Program(world, specs[number % len(specs)])
        found.train(ShardedOptimizer(found.named, optimizer_class, **options), range(4))
        assert_same(found, expected)
    return len(CLASSES)


def check_state(world: World) -> int:
    """Saved from each layout, loaded into the next one; into one process; and from there."""
    num_checked = 0
    specs = world.specs(ROWS, COLUMNS)
    for optimizer_class, options in CLASSES[:4]:
        expected, plain = one_process(world, optimizer_class, options)
        for number, spec in enumerate(specs):
            old, new = Program(world, spec), Program(world, specs[(number + 1) % len(specs)])
            first = ShardedOptimizer(old.named, optimizer_class, **options)
            expected, plain = one_process(world, optimizer_class, options)
            for program, optimizer in ((old, first), (expected, plain)):
                program.train(optimizer, range(2))
            state = first.state_dict()
            second = ShardedOptimizer(new.named, optimizer_class, **{**options, "lr": 7.0})
            copy_values(old, new)
            second.load_state_dict(state)
            assert second.param_groups[0]["lr"] == options["lr"]
            for program, optimizer in ((old, first), (new, second), (expected, plain)):
                program.train(optimizer, range(2, 4))  # the two share nothing
            assert_same(old, expected)
            assert_same(new, expected)
            num_checked += 1
    return num_checked


def copy_values(old: Program, new: Program) -> None:
    values = old.whole_weight().detach()
    assert isinstance(new.weight, ShardedTensor)
    with torch.no_grad():
        new.bias.copy_(old.bias)
        for shard in new.weight.local_shards():
            shard.tensor.copy_(values[shard.metadata.box.slices_in(whole([ROWS, COLUMNS]))])


def check_state_of_one_process(world: World) -> dict[str, Any]:
    """Both ways, by order and by name."""
    options = {"lr": 0.1}
    found, (expected, plain) = Program(world, world.chunks()), one_process(world, torch.optim.Adam, options)
    optimizer = ShardedOptimizer(found.named, torch.optim.Adam, **options)
    assert optimizer.state_dict()["state"] == {}
    for program, item in ((found, optimizer), (expected, plain)):
        program.train(item, range(2))
    packed = optimizer.state_dict()
    sharded = packed["state"]["weight"]
    assert isinstance(sharded["exp_avg"], ShardedTensor)
    assert sharded["exp_avg"].sharding_spec() == found.weight.sharding_spec()
    assert not sharded["exp_avg"].requires_grad
    assert sharded["step"] == 2
    assert packed["param_groups"][0]["params"] == ["weight", "bias"]

    gathered = {
        name: {key: value.full_tensor() if isinstance(value, ShardedTensor) else value for key, value in values.items()}
        for name, values in packed["state"].items()
    }
    again, plain_again = one_process(world, torch.optim.Adam, options)
    with torch.no_grad():
        again.weight.copy_(found.whole_weight())
        again.bias.copy_(found.bias)
    plain_again.load_state_dict({**packed, "state": gathered})
    again.train(plain_again, range(2, 3))
    optimizer.load_state_dict(plain.state_dict())
    found.train(optimizer, range(2, 3))
    expected.train(plain, range(2, 3))
    assert_same(again, expected)
    assert_same(found, expected)
    named = torch.optim.Adam([("bias", expected.bias), ("weight", expected.weight)], lr=0.1)
    named.load_state_dict(
        {**named.state_dict(), "state": {0: plain.state[expected.bias], 1: plain.state[expected.weight]}}
    )
    optimizer.load_state_dict(named.state_dict())  # in another order, by name
    found.train(optimizer, range(3, 4))
    expected.train(plain, range(3, 4))
    assert_same(found, expected)
    return {"lr": optimizer.param_groups[0]["lr"], "step": float(optimizer.state_dict()["state"]["weight"]["step"])}


class Layers(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.table: Any = weight  # an attribute, as PyTorch had it
        self.out = nn.Linear(3, 2)
        self.again = self.out  # tied


def check_ranks_without_shards(world: World) -> int:
    """Two rows among four ranks; a second group comes later, and a scheduler changes the rates of both."""

    def train(program: Program, make: Any, add: Any) -> None:
        optimizer = make(program)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for number in range(4):
            if number == 2:
                add(optimizer, program)
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            program.backward(number)
            assert optimizer.step(lambda: 3.0) == 3.0
            schedule.step()
        assert [group["lr"] for group in optimizer.param_groups] == [0.1 / 16, 0.3 / 4]

    spec = world.uneven(0, ROWS, COLUMNS)
    spec.shards = [spec.shards[0], spec.shards[-1]]
    spec.shards[1].shard_offsets, spec.shards[1].shard_sizes = [1, 0], [ROWS - 1, COLUMNS]
    found, expected = Program(world, spec), Program(world, None)
    train(
        found,
        lambda program: ShardedOptimizer({"weight": program.weight}, torch.optim.AdamW, lr=0.1),
        lambda optimizer, program: optimizer.add_param_group({"params": [("bias", program.bias)], "lr": 0.3}),
    )
    train(
        expected,
        lambda program: torch.optim.AdamW([program.weight], lr=0.1),
        lambda optimizer, program: optimizer.add_param_group({"params": [program.bias], "lr": 0.3}),
    )
    assert_same(found, expected)
    assert isinstance(found.weight, ShardedTensor)
    return len(found.weight.local_shards())


def check_clipping(world: World) -> list[float]:
    totals = []
    for spec in world.specs(ROWS, COLUMNS):
        for norm_type in (2.0, 1.0, 3.0, math.inf):
            found, expected = Program(world, spec), Program(world, None)
            found.backward(0)
            expected.backward(0)
            want = torch.nn.utils.clip_grad_norm_(list(expected.named.values()), 0.5, norm_type)
            got = clip_grad_norm_(found.named.values(), 0.5, norm_type)
            assert_close(got, want)
            assert isinstance(found.weight, ShardedTensor)
            assert_close(world.full_gradient(found.weight), expected.weight.grad)
            assert_close(found.bias.grad, expected.bias.grad)
            totals.append(float(got))
    clip_grad_value_(found.named.values(), 0.01)
    torch.nn.utils.clip_grad_value_(list(expected.named.values()), 0.01)
    assert_close(world.full_gradient(found.weight), expected.weight.grad)
    assert clip_grad_norm_([], 1.0) == 0.0
    for part in found.weight._parts:
        part.grad.fill_(math.inf)
    with pytest.raises(OptimizerError, match="non-finite"):
        clip_grad_norm_(found.weight, 1.0, error_if_nonfinite=True)
    return totals


def check_sparse(world: World) -> int:
    """Each rank looks up rows of its own; one may have no shard, and of some shards no row is looked up in some steps."""
    batches = [torch.arange(6), torch.tensor([30, 31, 39, 5, 4]), torch.arange(10, 30)]
    for spec in (world.chunks(), world.chunks(1), world.blocks(40, 8)):
        for optimizer_class, options in SPARSE:
            found = world.shard(make_values(1, 40, 8), spec, requires_grad=True)
            expected = make_values(1, 40, 8).requires_grad_()
            optimizer = ShardedOptimizer({"table": found}, optimizer_class, **options)
            plain = optimizer_class([expected], **options)
            for ids in batches:
                optimizer.zero_grad()
                plain.zero_grad()
                F.embedding(world.own(ids), found, sparse=True).square().sum().backward()
                F.embedding(ids, expected, sparse=True).square().sum().backward()
                clip_grad_value_([found], 1.5)
                expected.grad = clamped(expected.grad, 1.5)
                assert_close(clip_grad_norm_([found], 1e9), norm_of(expected.grad, 2.0))
                optimizer.step()
                plain.step()
            assert torch.equal(found.full_tensor(), expected)
            steps = {key: value for key, value in plain.state[expected].items() if key == "step"}
            state = optimizer.state_dict()["state"].get("table", {})
            assert {key: value for key, value in state.items() if key == "step"} == steps
    clip_grad_norm_([found], 0.5)
    assert float(clip_grad_norm_([found], 1.0)) == pytest.approx(0.5, rel=1e-5)  # it was scaled in place
    return len(SPARSE)


def check_misuse_over_workers(world: World) -> str:
    table = world.shard(torch.zeros(4, 4), world.chunks(), requires_grad=True)
    with pytest.raises(ConfigurationError, match=r"use gradwire\.optim\.DistributedOptimizer"):
        ShardedOptimizer({"table": table}, torch.optim.SGD, lr=0.1)
    for clip in (clip_grad_norm_, clip_grad_value_):
        with pytest.raises(ConfigurationError, match="are kept in contexts"):
            clip([table], 1.0)
    return "refused"


def check_misuse(world: World) -> int:
    program = Program(world, world.chunks())
    with pytest.raises(ConfigurationError, match=r"use gradwire\.shard\.ShardedOptimizer"):
        gw.optim.DistributedOptimizer(torch.optim.SGD, program.named.items(), lr=0.1)
    bad_params: list[Any] = [
        [program.weight],
        {"weight": 3},
        [],
        [("weight", program.weight), ("weight", program.bias)],
        [{}],
    ]
    for params in bad_params:
        with pytest.raises(ConfigurationError):
            ShardedOptimizer(params, torch.optim.SGD, lr=0.1)
    with pytest.raises(ConfigurationError, match="LBFGS needs whole parameters"):
        ShardedOptimizer(program.named, torch.optim.LBFGS)
    optimizer = ShardedOptimizer(program.named, torch.optim.SGD, lr=0.1)
    with pytest.raises(ConfigurationError, match="same name: bias"):
        optimizer.add_param_group({"params": {"bias": torch.zeros(1)}})
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": {"other": program.bias}})
    optimizer.add_param_group({"params": {"other": torch.zeros(1)}})  # the name is free again
    assert list(optimizer.named_params) == ["weight", "bias", "other"]
    good = optimizer.state_dict()
    assert [group["params"] for group in good["param_groups"]] == [["weight", "bias"], ["other"]]
    bad_states: list[Any] = [{}, {"state": {}, "param_groups": []}, _renamed(good), _with_wrong_size(world, good)]
    for bad in bad_states:
        with pytest.raises(ConfigurationError):
            optimizer.load_state_dict(bad)
    optimizer.load_state_dict(good)
    assert isinstance(program.weight, ShardedTensor)
    program.weight.reshard(world.chunks(1))
    with pytest.raises(OptimizerError, match="'weight' was resharded"):
        optimizer.step()
    return dist.get_rank()


def _renamed(state: dict[str, Any]) -> dict[str, Any]:
    return {
        **state,
        "param_groups": [{**group, "params": ["?", *group["params"][1:]]} for group in state["param_groups"]],
    }


def _with_wrong_size(world: World, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "state": {"weight": {"momentum_buffer": world.shard(torch.zeros(8, 8), world.chunks())}}}


def check_names(world: World) -> list[str]:
    module = Layers(world.shard(torch.zeros(4, 3), world.chunks(), requires_grad=True))
    module.register_parameter("nothing", None)
    own = [name for name, _ in named_params_with_sharded_tensor(module, "net", recurse=False)]
    assert own == ["net.table"]
    optimizer = ShardedOptimizer(dict(named_params_with_sharded_tensor(module)), torch.optim.SGD, lr=1.0)
    return list(optimizer.named_params)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_class_steps_shards_as_one_process_does(worlds: Worlds, num_ranks: int) -> None:
    assert worlds.check("group", num_ranks, check_classes) == [len(CLASSES)] * num_ranks


def test_state_loads_into_every_other_layout(worlds: Worlds) -> None:
    assert worlds.check("group", 3, check_state) == [20] * 3


def test_state_of_one_process_loads_and_the_other_way_round(worlds: Worlds) -> None:
    assert worlds.check("group", 3, check_state_of_one_process) == [{"lr": 0.1, "step": 4.0}] * 3


def test_ranks_without_a_shard_groups_schedulers_closures(worlds: Worlds) -> None:
    assert sorted(worlds.check("group", 4, check_ranks_without_shards)) == [0, 0, 1, 1]


def test_clipping_covers_all_shards_and_copies_once(worlds: Worlds) -> None:
    totals = worlds.check("group", 3, check_clipping)
    assert totals[0] == totals[1] == totals[2]
    assert len(totals[0]) == 20


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's Adagrad warns in one process, too
def test_sparse_gradients_step_and_are_clipped_as_in_one_process(worlds: Worlds) -> None:
    assert worlds.check("group", 3, check_sparse) == [len(SPARSE)] * 3


def test_misuse_is_named(worlds: Worlds) -> None:
    assert worlds.check("workers", 2, check_misuse_over_workers) == ["refused"]
    assert worlds.check("group", 2, check_misuse) == [0, 1]


def test_parameters_of_modules(worlds: Worlds) -> None:
    assert worlds.check("group", 2, check_names) == [["table", "out.weight", "out.bias"]] * 2
