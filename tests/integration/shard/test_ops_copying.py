"""Attributes, copies, conversions, comparisons, initialisation and layer norm, in both worlds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional, init

from closeness import assert_close
from gradwire.shard import ShardedTensor, dispatch
from gradwire.shard.ops import pointwise
from shard.worlds import GroupWorld, World, Worlds

BACKENDS = pytest.mark.parametrize("backend", ["group", "workers"])


def numbers(*size: int) -> torch.Tensor:
    return torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) - 0.3


def check_kinds_of_operands(world: World) -> int:
    """Plain operands of every size that broadcasts, smaller sharded ones, and results larger than any sharded operand."""
    whole, num_checked = numbers(7, 5), 0
    others = {size: numbers(*size) + 1 for size in ((7, 5), (5,), (1, 5), (7, 1), (1, 1), (), (1,))}
    for spec in (world.chunks(0), world.uneven(1, 7, 5), world.blocks(7, 5)):
        for size, other in others.items():
            compare_products(world, world.place(whole, spec, True), other.clone().requires_grad_(), whole, other)
            num_checked += 1
            if len(size) == 2:
                sharded = world.place(other, world.chunks(num_checked % 2), True)
                compare_products(world, world.place(whole, spec, True), sharded, whole, other)
    row, large = numbers(5), numbers(3, 7, 5)
    compare_products(world, world.place(row, world.chunks(), True), large.clone().requires_grad_(), row, large)
    column, line = numbers(7, 1), numbers(1, 5)
    for spec in (world.chunks(0), world.uneven(0, 7, 1)):
        compare_products(world, world.place(column, spec, True), world.place(line, world.chunks(1), True), column, line)
    return num_checked


def compare_products(world: World, a: Any, b: Any, plain_a: torch.Tensor, plain_b: torch.Tensor) -> None:
    """``a * b`` and ``b / a - a``."""
    plain_a, plain_b = plain_a.clone().requires_grad_(), plain_b.clone().requires_grad_()
    expected = plain_a * plain_b + (plain_b / plain_a - plain_a)
    found = a * b + (b / a - a)
    assert isinstance(found, ShardedTensor)
    full = found.full_tensor()
    assert_close(full, expected)
    weights = torch.linspace(0.0, 1.0, expected.numel(), dtype=torch.float64).view(expected.size())
    (expected * weights).sum().backward()
    world.backward((full * weights).sum())
    for ours, theirs in ((a, plain_a), (b, plain_b)):
        assert theirs.grad is not None
        world.assert_gradient(ours, theirs.grad)


@BACKENDS
def test_kinds_of_operands(worlds: Worlds, backend: str) -> None:
    assert set(worlds.check(backend, 3, check_kinds_of_operands)) == {21}


def check_attributes(world: World) -> None:
    whole = numbers(7, 5)
    tensor = world.shard(whole, world.uneven(0, 7, 5), True)
    assert (tensor.shape, tensor.dtype, tensor.dim(), tensor.numel(), len(tensor)) == ((7, 5), torch.float64, 2, 35, 7)
    assert tensor.requires_grad
    assert tensor.is_leaf
    assert tensor.grad is None
    assert not tensor.is_pinned()
    assert not tensor.is_inference()
    assert (tensor * 2).requires_grad
    assert not (tensor * 2).is_leaf
    with torch.no_grad():
        unrecorded = tensor * 2
    assert not unrecorded.requires_grad
    assert unrecorded.is_leaf
    assert torch.equal(tensor.new_zeros(2), torch.zeros(2, dtype=torch.float64))
    for part in (tensor.detach(), tensor.data):
        assert not part.requires_grad
        assert torch.equal(part, whole)
    assert world.shard(torch.tensor([[2.5]]), world.chunks()).item() == 2.5
    assert bool(world.shard(torch.ones(1), world.chunks()))
    assert float(world.shard(torch.ones(1), world.chunks())) == 1.0
    with pytest.raises(RuntimeError, match="35 elements"):
        tensor.item()
    with pytest.raises(RuntimeError, match="35 elements"):
        bool(tensor)
    with pytest.raises(RuntimeError, match="leaf variables"):
        (tensor * 2).requires_grad_(False)
    with pytest.raises(RuntimeError, match="floating point"):
        world.shard(torch.arange(4), world.chunks()).requires_grad_()


def check_no_gradient_flows_where_none_is_recorded(world: World) -> None:
    whole = numbers(7, 5)
    tensor = world.shard(whole, world.chunks(), True)
    with torch.no_grad():
        factor = tensor * 2
    world.backward((tensor * factor).sum())
    world.assert_gradient(tensor, whole * 2)


def check_group_gradients(world: World) -> None:
    """``.grad`` of a tensor of a process group is a sharded tensor; it may be set."""
    assert isinstance(world, GroupWorld)
    whole = numbers(7, 5)
    for spec in world.specs(7, 5):
        tensor = world.place(whole, spec, True)
        middle = tensor * 3
        middle.retain_grad()
        (middle * middle).sum().backward()
        assert isinstance(tensor.grad, ShardedTensor)
        assert_close(tensor.grad.full_tensor(), whole * 18)
        assert middle.grad is not None
        assert_close(middle.grad.full_tensor(), whole * 6)
        tensor.grad.mul_(2)
        assert_close(tensor.grad.full_tensor(), whole * 36)
        tensor.grad = tensor.detach().clone()
        assert torch.equal(tensor.grad, whole)
        tensor.grad = None
        assert tensor.grad is None
        with pytest.raises(RuntimeError, match="same layout"):
            tensor.grad = whole


def check_copies(world: World) -> None:
    whole = numbers(7, 5)
    for spec, other_spec in zip(world.specs(7, 5), reversed(world.specs(7, 5)), strict=True):
        tensor = world.place(whole, spec)
        assert torch.equal(torch.add(tensor, other=tensor, alpha=2), torch.add(whole, whole, alpha=2))
        assert torch.equal(
            torch.div(input=tensor, other=0.25, rounding_mode="floor"), whole.div(0.25, rounding_mode="floor")
        )
        copy = tensor.clone()
        copy.add_(1)
        assert torch.equal(tensor, whole)
        assert torch.equal(copy, whole + 1)
        assert not torch.equal(copy, tensor)
        assert not torch.equal(copy, whole[:3])
        assert torch.allclose(copy, whole + 1 + 1e-12)
        assert not tensor.allclose(copy)
        assert tensor.allclose(copy, atol=1.5)
        alias = tensor.detach()
        alias.copy_(world.place(whole * 3, other_spec))
        assert torch.equal(tensor, whole * 3)
        tensor.copy_(whole.float())
        assert torch.equal(alias, whole.float().double())
        with pytest.raises(RuntimeError, match="plain tensor"):
            whole.clone().copy_(tensor)
        with pytest.raises(RuntimeError, match="out="):
            torch.add(tensor, 1, out=torch.empty(7, 5, dtype=torch.float64))
        with pytest.raises(RuntimeError, match=r"result has size|broadcast"):
            tensor.add_(torch.ones(2, 7, 5))


def check_changes_in_place(world: World) -> None:
    """Many at once: each sees what was done before, and nothing that was done after."""
    whole = numbers(7, 5)
    tensor = world.shard(whole, world.blocks(7, 5))
    expected, before, befores = whole.clone(), [], []
    for step in range(10):
        before.append(tensor * step)
        befores.append(expected * step)
        tensor.mul_(1.5).sub_(0.1)
        expected.mul_(1.5).sub_(0.1)
    assert torch.equal(tensor, expected)
    for found, wanted in zip(before, befores, strict=True):
        assert torch.equal(found, wanted)
    leaf = world.shard(whole, world.chunks(), True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        leaf.add_(1)
    with pytest.raises(RuntimeError, match=r"can't be cast|not possible"):
        world.shard(torch.arange(6), world.chunks()).add_(0.5)
    with torch.no_grad():
        leaf.add_(1)
    assert leaf.requires_grad
    assert leaf.is_leaf
    assert torch.equal(leaf, whole + 1)
    result = torch.zeros_like(leaf)
    result.add_(leaf * 2)
    assert result.requires_grad
    assert not result.is_leaf
    functional.relu(result, inplace=True)
    functional.dropout(result, 0.0, True, True)
    world.backward(result.sum())
    world.assert_gradient(leaf, torch.where(whole + 1 > 0, 2.0, 0.0).double())


def check_likes(world: World) -> None:
    tensor = world.shard(numbers(7, 5), world.blocks(7, 5), True)
    for name, args, value in (("zeros", (), 0), ("ones", (), 1), ("full", (2.5,), 2.5)):
        made = getattr(torch, f"{name}_like")(tensor, *args)
        assert (made.dtype, made.requires_grad, made.is_leaf) == (torch.float64, False, True)
        assert torch.equal(made, torch.full((7, 5), value, dtype=torch.float64))
    made = torch.zeros_like(tensor, dtype=torch.float32, requires_grad=True)
    assert (made.dtype, made.requires_grad, made.is_leaf) == (torch.float32, True, True)
    assert torch.empty_like(tensor, dtype=torch.int64).dtype == torch.int64
    uniform, normal = torch.rand_like(tensor).full_tensor(), torch.randn_like(tensor).full_tensor()
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert len(normal.unique()) > 5
    integers = torch.randint_like(tensor, 3).full_tensor()
    assert set(integers.flatten().tolist()) <= {0.0, 1.0, 2.0}
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros_like(tensor, device="meta")


def check_conversions(world: World) -> None:
    whole = numbers(7, 5)
    tensor = world.shard(whole, world.uneven(1, 7, 5), True)
    assert tensor.to(torch.float64) is tensor
    assert tensor.double() is tensor
    assert tensor.cpu() is tensor
    assert tensor.to("cpu", torch.float64) is tensor
    copy = tensor.to("cpu", torch.float64, False, True)
    assert copy is not tensor
    assert copy.requires_grad
    for converted in (
        tensor.float(),
        tensor.to(torch.float32),
        tensor.to("cpu", torch.float32),
        tensor.to(torch.zeros(1)),
        tensor.to(dtype=torch.float32, copy=True),
        tensor.type_as(torch.zeros(1)),
    ):
        assert converted.dtype == torch.float32
        assert converted.requires_grad
        assert torch.equal(converted, whole.float())
    assert not tensor.to(torch.int64).requires_grad
    world.backward((tensor.float() * 2).sum())
    world.assert_gradient(tensor, torch.full((7, 5), 2.0, dtype=torch.float64))
    assert torch.equal(tensor.contiguous(), whole)
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):  # builds with CUDA miss the driver
            tensor.cuda().sum()


def check_module(world: World) -> None:
    """``module.float()`` and others convert sharded parameters in place, and their gradients."""
    whole = numbers(7, 5)
    module = torch.nn.Module()
    module.register_parameter("weight", torch.nn.Parameter(world.shard(whole, world.chunks())))
    weight = module.weight
    assert isinstance(weight, ShardedTensor)
    shards = [shard.tensor for shard in weight.local_shards()]
    world.backward((weight * 2).sum())
    module.float()
    assert module.weight is weight
    assert (weight.dtype, weight.requires_grad, weight.is_leaf) == (torch.float32, True, True)
    assert torch.equal(weight, whole.float())
    assert [shard.tensor is before for shard, before in zip(weight.local_shards(), shards, strict=True)].count(
        False
    ) == 0
    if isinstance(world, GroupWorld):
        assert weight.grad is not None
        assert torch.equal(weight.grad, torch.full((7, 5), 2.0))
        module.zero_grad()
    module.to(dtype=torch.float64, device="cpu")
    assert module.weight.dtype == torch.float64
    assert module.weight.sum().dtype == torch.float64
    with pytest.raises(RuntimeError, match="same way"):
        weight.data = world.shard(whole, world.blocks(7, 5))


def check_initialisation(world: World) -> None:
    tensor = world.shard(torch.zeros(40, 30), world.uneven(0, 40, 30), True)
    tensors = {
        "uniform_": (init.uniform_(tensor.clone(), -2, 3), -2, 3, 5 / math.sqrt(12)),
        "normal_": (init.normal_(tensor.clone(), 1.0, 0.5), -4, 6, 0.5),
        "trunc_normal_": (init.trunc_normal_(tensor.clone(), a=-1.0, b=1.0), -1, 1, 0.54),
        "kaiming_uniform_": (init.kaiming_uniform_(tensor.clone(), a=1.0), -0.32, 0.32, 1 / math.sqrt(30)),
        "kaiming_normal_": (init.kaiming_normal_(tensor.clone(), mode="fan_out"), -9, 9, math.sqrt(2 / 40)),
        "xavier_uniform_": (init.xavier_uniform_(tensor.clone()), -0.3, 0.3, math.sqrt(2 / 70)),
        "xavier_normal_": (init.xavier_normal_(tensor.clone()), -9, 9, math.sqrt(2 / 70)),
    }
    for name, (made, low, high, deviation) in tensors.items():
        full = made.detach().full_tensor()
        assert low <= full.min(), name
        assert full.max() <= high, name
        assert full.std() == pytest.approx(deviation, rel=0.15), name
    assert init.uniform_(tensor) is tensor
    assert tensor.requires_grad
    assert torch.equal(init.constant_(tensor, 2.5), torch.full((40, 30), 2.5))
    assert torch.equal(init.ones_(tensor), torch.ones(40, 30))
    assert torch.equal(init.zeros_(tensor), torch.zeros(40, 30))
    with torch.no_grad():
        for name in pointwise.RANDOM.split():
            args = {"random_": (5,), "bernoulli_": (0.5,), "geometric_": (0.5,)}.get(name, ())
            drawn = getattr(tensor, name)(*args).full_tensor()
            assert len(drawn.unique()) > 1, name
    dropped = functional.dropout(torch.ones_like(tensor), 0.5).full_tensor()
    assert set(dropped.flatten().tolist()) == {0.0, 2.0}
    assert 0.35 < (dropped == 0).double().mean() < 0.65
    assert init.kaiming_uniform_(world.shard(torch.zeros(0, 3), world.chunks())).numel() == 0


def check_layer_norm(world: World) -> None:
    whole = numbers(7, 5)
    for spec in (world.chunks(0), world.uneven(0, 7, 5)):
        for name in ("layer_norm", "rms_norm"):
            weights = [numbers(5) + number for number in range(2 if name == "layer_norm" else 1)]
            plain = [item.clone().requires_grad_() for item in (whole, *weights)]
            expected = getattr(functional, name)(plain[0], (5,), *plain[1:], eps=1e-3)
            (expected * whole).sum().backward()
            ours: list[torch.Tensor] = [world.place(whole, spec, True)]
            ours += [item.clone().requires_grad_() for item in weights[:1]]
            ours += [world.place(item, world.chunks(), True) for item in weights[1:]]  # a sharded bias
            found = getattr(functional, name)(ours[0], (5,), *ours[1:], eps=1e-3)
            assert found.requires_grad
            full = found.full_tensor()
            assert_close(full, expected)
            world.backward((full * whole).sum())
            for mine, theirs in zip(ours, plain, strict=True):
                assert theirs.grad is not None
                world.assert_gradient(mine, theirs.grad)
    with pytest.raises(RuntimeError, match=r"layer_norm.*sharded"):
        functional.layer_norm(world.shard(whole, world.chunks(1)), (5,))
    with pytest.raises(RuntimeError, match=r"layer_norm.*all dimensions"):
        functional.layer_norm(world.shard(whole, world.chunks(0)), (7, 5))


def check_errors(world: World) -> None:
    tensor = world.shard(numbers(7, 5), world.chunks())
    for call, match in (
        (lambda: torch.where(tensor), "where.*not return a tensor"),
        (lambda: torch.norm(tensor, "nuc"), "nuclear"),
        (lambda: torch.linalg.norm(tensor, 1), "vector_norm"),
        (lambda: functional.softmax(tensor), "softmax.*dim="),
        (lambda: torch.cumsum(tensor, 0), "cumsum.*custom_sharded_op_impl"),
        (lambda: torch.zeros_like(tensor, layout=torch.sparse_coo), "strided"),
        (lambda: functional.mse_loss(tensor, tensor, size_average=True), "reduction="),
    ):
        with pytest.raises(RuntimeError, match=match):
            call()
    with pytest.raises(IndexError, match="out of range"):
        tensor.sum(2)
    with pytest.raises(ValueError, match="reduction"):
        functional.mse_loss(tensor, tensor, reduction="median")
    assert tensor is not None
    assert (tensor == None) is False  # noqa: E711


CHECKS = [
    check_attributes,
    check_no_gradient_flows_where_none_is_recorded,
    check_copies,
    check_changes_in_place,
    check_likes,
    check_conversions,
    check_module,
    check_initialisation,
    check_layer_norm,
    check_errors,
]


def check_all(world: World) -> int:
    for check in CHECKS:
        try:
            check(world)
        except BaseException as error:
            raise AssertionError(f"{check.__name__}: {error!r}") from error
    return len(CHECKS)


@BACKENDS
@pytest.mark.parametrize("num_places", [2, 4])
def test_copies_conversions_and_initialisation(worlds: Worlds, backend: str, num_places: int) -> None:
    assert set(worlds.check(backend, num_places, check_all)) == {len(CHECKS)}


def test_gradients_of_process_groups(worlds: Worlds) -> None:
    assert worlds.check("group", 3, check_group_gradients) == [None] * 3


TESTED = """
    allclose clone constant_ contiguous cpu cuda data detach empty_like equal full_like kaiming_uniform_ normal_ ones_like
    rand_like randint_like randn_like to type_as uniform_ zeros_like
"""


def test_every_function_has_a_test() -> None:
    registered = {
        getattr(getattr(function, "__self__", None), "__name__", "")
        if function.__name__ in ("__get__", "__set__")
        else function.__name__
        for function, own in dispatch._own.items()
        if getattr(own, "__module__", "") == "gradwire.shard.ops.conversion"
    }
    elsewhere = {"clone", "contiguous"}  # in the table of elementwise functions
    assert registered | elsewhere == {*TESTED.split(), "__deepcopy__"}  # that one is tested with state dicts
