"""Products with sharded matrices, in both worlds: values and gradients are those of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradwire as gw
from closeness import assert_close
from gradwire.rref import RRef
from gradwire.shard import ShardedTensor
from shard.worlds import WorkerWorld, World, Worlds

BACKENDS = pytest.mark.parametrize("backend", ["group", "workers"])
PLACES = pytest.mark.parametrize("num_places", [1, 2, 3, 4])


def randn(*size: int) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float64)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_()


def close_to_all(world: World, result: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that a sharded result is this as a whole, and a plain one this rank's rows of it."""
    if isinstance(result, ShardedTensor):
        close(result.full_tensor().detach(), expected)
    else:
        close(result.detach(), world.own(expected))


def everybody(world: World, result: torch.Tensor) -> torch.Tensor:
    """All rows of a result, whether it is divided or everybody's own."""
    return result.full_tensor().detach() if isinstance(result, ShardedTensor) else world.join(result)


def loss_of(world: World, result: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Everybody's own loss of own rows; of a divided result, the same for all."""
    if isinstance(result, ShardedTensor):
        return (result.full_tensor() * weights).sum()
    return (result * world.own(weights)).sum()


def close(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    assert_close(found, expected)


def sum_of(world: World, gradient: torch.Tensor | None) -> torch.Tensor:
    """The gradient of what is everybody's own copy; those who have none have none."""
    assert gradient is not None
    return world.join(gradient.unsqueeze(0)).sum(0)


# -- linear ------------------------------------------------------------------------------------------------------------


def check_linear(world: World, lead: tuple[int, ...], with_bias: bool) -> int:
    whole, weight, bias = randn(*lead, 7), randn(6, 7), randn(6)
    expected = [leaf(item) for item in (whole, weight, bias)]
    y = F.linear(expected[0], expected[1], expected[2] if with_bias else None)
    factors = randn(*y.size())
    (y * factors).sum().backward()
    num_plain = 0
    for spec in world.specs(6, 7):
        x, b = leaf(world.own(whole)), leaf(bias)
        w = world.place(weight, spec, requires_grad=True)
        found = F.linear(x, w, b if with_bias else None)
        close_to_all(world, found, y.detach())
        world.backward(loss_of(world, found, factors))
        world.assert_full_gradient(w, expected[1].grad)
        close(world.gradient(x), world.own(expected[0].grad))
        if with_bias:
            close(world.gradient(b), expected[2].grad)
        num_plain += not isinstance(found, ShardedTensor)
    return num_plain


@BACKENDS
@PLACES
def test_linear_of_own_rows(worlds: Worlds, backend: str, num_places: int) -> None:
    """With rows of the weight at each place the result is divided; with columns or blocks it is everybody's own.

    One place is no exception: chunks of rows are, however many there are. One enumerated shard is not cut at all.
    """
    num_plain = 4 if num_places == 1 else 3
    assert set(worlds.check(backend, num_places, check_linear, (9,), True)) == {num_plain}


@BACKENDS
def test_linear_with_more_dimensions(worlds: Worlds, backend: str) -> None:
    assert set(worlds.check(backend, 3, check_linear, (8, 2, 3), False)) == {3}


def check_linear_of_sharded(world: World) -> int:
    whole, weight, bias = randn(5, 7), randn(6, 7), randn(6)
    expected = [leaf(item) for item in (whole, weight, bias)]
    y = F.linear(*expected)
    factors = randn(*y.size())
    (y * factors).sum().backward()
    bias_specs = [None, world.chunks(), world.uneven(0, 6)]
    num_checked = 0
    for number, x_spec in enumerate(world.specs(5, 7)):
        for w_spec in [*world.specs(6, 7), None]:
            with world.fresh_gradients():
                x = world.place(whole, x_spec, requires_grad=True)
                w = leaf(weight) if w_spec is None else world.place(weight, w_spec, requires_grad=True)
                b_spec = bias_specs[(number + num_checked) % 3]
                b = leaf(bias) if b_spec is None else world.place(bias, b_spec, requires_grad=True)
                found = F.linear(x, w, b)
                assert isinstance(found, ShardedTensor)
                close(found.full_tensor().detach(), y.detach())
                world.backward((found.full_tensor() * factors).sum())
                for item, truth in zip((x, w, b), expected, strict=True):
                    if isinstance(item, ShardedTensor):
                        world.assert_full_gradient(item, truth.grad)
                    else:
                        close(world.gradient(item), truth.grad)
                num_checked += 1
    return num_checked


@BACKENDS
@pytest.mark.parametrize("num_places", [1, 2, 4])
def test_linear_of_a_sharded_tensor(worlds: Worlds, backend: str, num_places: int) -> None:
    assert set(worlds.check(backend, num_places, check_linear_of_sharded)) == {30}


def check_few_rows(world: World) -> None:
    """Somebody has no rows, some places have nothing of the weight."""
    whole, weight = randn(1, 3), randn(2, 3)
    for dim in (0, 1):
        x, w = leaf(world.own(whole)), world.shard(weight, world.chunks(dim), requires_grad=True)
        y = F.linear(x, w)
        close_to_all(world, y, whole @ weight.t())
        world.backward(loss_of(world, y, torch.ones(1, 2, dtype=torch.float64)))
        world.assert_full_gradient(w, whole.expand(2, 3))
        close(world.gradient(x), world.own(weight.sum(0, keepdim=True)))


@BACKENDS
def test_fewer_rows_than_places(worlds: Worlds, backend: str) -> None:
    assert None in worlds.check(backend, 4, check_few_rows)


def check_dtypes(world: World) -> list[str]:
    """Halves, complex numbers, operands that are not contiguous, and autocast, in which results have another dtype."""
    seen = []
    for dtype in (torch.bfloat16, torch.complex128):
        whole, weight, bias = (torch.randn(*size, dtype=dtype) for size in ((7, 6), (6, 4), (4,)))
        expected = whole.t().conj().t() @ weight + bias
        for spec in world.specs(4, 6):
            found = F.linear(world.own(whole.t().conj().t()), world.place(weight.t(), spec), bias)
            assert_close(everybody(world, found), expected, rtol=0.1, atol=0.1)
            seen.append(str(found.dtype))
    if not isinstance(world, WorkerWorld):  # workers have settings of their own
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for spec in world.specs(4, 6):
                found = F.linear(torch.randn(3, 6), world.shard(torch.randn(4, 6), spec), torch.randn(4))
                seen.append(str(found.dtype))
                assert everybody(world, found).dtype == torch.bfloat16
    return seen


@BACKENDS
def test_dtypes(worlds: Worlds, backend: str) -> None:
    seen = worlds.check(backend, 2, check_dtypes)[0]
    assert seen[:10] == ["torch.bfloat16"] * 5 + ["torch.complex128"] * 5
    assert set(seen[10:]) <= {"torch.bfloat16"}


# -- matmul ------------------------------------------------------------------------------------------------------------


def check_matmul(world: World) -> int:
    left, right = randn(6, 5), randn(5, 7)
    truth = left @ right
    num_checked = 0
    for spec in world.specs(5, 7):
        r = world.place(right, spec)
        x = world.own(left)
        for found in (x @ r, torch.matmul(x, r), x.matmul(r), torch.mm(x, r), x.mm(r)):
            close_to_all(world, found, truth)
            num_checked += 1
        turned = world.place(right.t(), spec=world.blocks(7, 5))
        close_to_all(world, x @ turned.t(), truth)
        close_to_all(world, x @ turned.T, truth)
        close_to_all(world, x @ turned.transpose(-1, 0), truth)
        close_to_all(world, torch.addmm(right[0], x, r, beta=0.5), truth + 0.5 * right[0])
    for spec in world.specs(6, 5):
        x = world.place(left, spec)
        close((x @ right).full_tensor(), truth)  # type: ignore[attr-defined]
        close((x @ world.place(right, world.chunks(1))).full_tensor(), truth)  # type: ignore[attr-defined]
        num_checked += 2
    return num_checked


@BACKENDS
def test_matmul(worlds: Worlds, backend: str) -> None:
    assert set(worlds.check(backend, 3, check_matmul)) == {35}


def check_transposed_gradient(world: World) -> None:
    weight, factors = randn(4, 6), randn(6, 4)
    for spec in world.specs(4, 6):
        w = world.place(weight, spec, requires_grad=True)
        turned = w.t()
        assert isinstance(turned, ShardedTensor)
        assert turned.size() == (6, 4)
        assert not turned.is_leaf
        assert turned.requires_grad
        assert torch.equal(turned.full_tensor(), weight.t())
        world.backward((turned.full_tensor() * factors).sum())
        world.assert_full_gradient(w, factors.t())


@BACKENDS
def test_transposing(worlds: Worlds, backend: str) -> None:
    assert None in worlds.check(backend, 3, check_transposed_gradient)


# -- misuse ------------------------------------------------------------------------------------------------------------


def check_misuse(world: World) -> list[str]:
    w = world.shard(randn(4, 6), world.chunks())
    mistakes: list[Any] = [
        lambda: F.linear(randn(3, 5), w),
        lambda: F.linear(torch.randn(3, 6), w),
        lambda: F.linear(randn(6), w),
        lambda: torch.bmm(w, w),
        lambda: torch.baddbmm(w, w, w),
        lambda: torch.matmul(randn(2, 4), w, out=randn(2, 6)),
        lambda: torch.mm(randn(4), w),
        lambda: F.linear(randn(3, 6), randn(4, 6), w),
        lambda: w.transpose(0, 2),
    ]
    said = []
    for mistake in mistakes:
        with pytest.raises((RuntimeError, IndexError)) as info:
            mistake()
        said.append(str(info.value))
    return said


@BACKENDS
def test_misuse(worlds: Worlds, backend: str) -> None:
    said = worlds.check(backend, 2, check_misuse)[0]
    parts = ["shapes cannot be multiplied (3x5 and 6x4)", "same dtype", "unsqueeze(0)", "3D tensor", "baddbmm", "out=",
             "mm needs", "only the bias", "out of range"]  # fmt: skip
    for message, part in zip(said, parts, strict=True):
        assert part in message


def check_different_rows(world: World) -> str:
    w = world.shard(randn(4, 6), world.chunks())
    rank = int(getattr(world, "rank", 0))
    with pytest.raises(ValueError, match="same size on every rank"):
        F.linear(randn(2, 6 + rank), w)
    with pytest.raises(ValueError, match="same size on every rank") as info:
        F.linear(randn(2, 3 + rank, 6), w)
    return str(info.value)


def test_rows_of_different_sizes(worlds: Worlds) -> None:
    assert "[3, 6] on 0, [4, 6] on 1" in worlds.check("group", 2, check_different_rows)[0]


# -- a model -----------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 10, dtype=torch.float64)
        self.fc2 = nn.Linear(10, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(torch.relu(self.fc1(x)))
        return out


def train_alone(model: Mlp, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    losses = []
    for _ in range(10):
        loss = (model(x) - y).square().sum()
        model.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            subtract(parameter, parameter.grad)
        losses.append(loss.item())
    return losses


def shard_like_megatron(world: World, model: Mlp) -> None:
    """Rows of the first weight and columns of the second at each place, and one bias of each kind."""
    for layer, dim in ((model.fc1, 0), (model.fc2, 1)):
        layer.weight = nn.Parameter(world.shard(layer.weight, world.chunks(dim)))
    model.fc1.bias = nn.Parameter(world.shard(model.fc1.bias, world.uneven(0, 10)))


@contextlib.contextmanager
def fresh_gradients(world: World, model: nn.Module) -> Iterator[None]:
    """One step: what was collected before does not count."""
    if not isinstance(world, WorkerWorld):
        for parameter in model.parameters():
            for part in parts_of(parameter):
                part.grad = None
        yield
        return
    outer = world.context
    with gw.autograd.context() as world.context:
        yield
    world.context = outer


def parts_of(parameter: torch.Tensor) -> list[Any]:
    return parameter._parts if isinstance(parameter, ShardedTensor) else [parameter]


def descend(world: World, model: nn.Module) -> None:
    """A step of gradient descent, where each part is."""
    for parameter in model.parameters():
        for part in parts_of(parameter):
            if isinstance(part, RRef):
                assert isinstance(world, WorkerWorld)
                gw.rpc.rpc_sync(part.owner(), descend_there, args=(int(world.context), part))
            else:
                subtract(part, world.gradient(part))


def descend_there(context_id: int, part: RRef[torch.Tensor]) -> None:
    value = part.local_value()
    subtract(value, gw.autograd.get_gradients(context_id)[value])


def subtract(part: torch.Tensor, gradient: torch.Tensor | None) -> None:
    assert gradient is not None
    with torch.no_grad():
        part -= 0.01 * gradient


def check_mlp(world: World) -> tuple[list[float], list[float]]:
    x, y = randn(12, 8), randn(12, 4)
    model, same = Mlp(), Mlp()
    same.load_state_dict(model.state_dict())
    expected = train_alone(same, x, y)
    shard_like_megatron(world, model)
    own_x, own_y = world.own(x), world.own(y)
    losses = []
    for _ in range(10):
        with fresh_gradients(world, model):
            out = model(own_x)
            assert not isinstance(out, ShardedTensor)
            loss = (out - own_y).square().sum()
            world.backward(loss)
            descend(world, model)
        losses.append(float(world.join(loss.detach().view(1)).sum()))
    return losses, expected


@BACKENDS
@pytest.mark.parametrize("num_places", [1, 2, 4])
def test_two_layers_train_as_in_one_process(worlds: Worlds, backend: str, num_places: int) -> None:
    for losses, expected in worlds.check(backend, num_places, check_mlp):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert losses[-1] < losses[0]
