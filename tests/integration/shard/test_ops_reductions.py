"""Reductions, softmax, layer norm and losses, in both worlds, against the same functions of plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from closeness import assert_close
from gradwire.shard import ShardedTensor, dispatch
from shard.worlds import World, Worlds

BACKENDS = pytest.mark.parametrize("backend", ["group", "workers"])
INF = float("inf")
Reduction = Callable[[Any], Any]

# By the name of the function; each has several ways to be called.
REDUCTIONS: dict[str, list[Reduction]] = {
    "sum": [
        torch.sum,
        lambda x: x.sum(0),
        lambda x: x.sum(-1, keepdim=True),
        lambda x: torch.sum(x, dim=(0, 1)),
        lambda x: x.sum(dtype=torch.float32),
        lambda x: (x > 0).sum(),
        lambda x: (x > 0).sum(1),
    ],
    "nansum": [torch.nansum, lambda x: x.nansum(1)],
    "mean": [lambda x: x.mean(), lambda x: torch.mean(x, 0, True), lambda x: x.mean(dim=[1])],
    "prod": [lambda x: x.prod(), lambda x: torch.prod(x, 0), lambda x: x.prod(1, keepdim=True)],
    "amax": [lambda x: x.amax(), lambda x: torch.amax(input=x, dim=0), lambda x: x.amax((1,), keepdim=True)],
    "amin": [lambda x: x.amin(), lambda x: torch.amin(x, 0, keepdim=True), lambda x: x.amin(1)],
    "max": [
        lambda x: x.max(),
        lambda x: torch.max(x, 0).values,
        lambda x: x.max(1, keepdim=True).values,
        lambda x: x.max(dim=0)[1],
        lambda x: torch.max(x, x * x),
        lambda x: (x * 10).long().max(),
    ],
    "min": [
        torch.min,
        lambda x: x.min(0).values,
        lambda x: x.min(dim=-1).indices,
        lambda x: x.min(other=x * x),
        lambda x: (x * 10).long().min(1).values,
    ],
    "argmax": [lambda x: x.argmax(), lambda x: torch.argmax(x, 0), lambda x: x.argmax(1, keepdim=True)],
    "argmin": [torch.argmin, lambda x: x.argmin(dim=0), lambda x: x.argmin(1)],
    "any": [lambda x: (x > 0.5).any(), lambda x: torch.any(x > 0.9, 0), lambda x: (x > 2).any(1)],
    "all": [lambda x: (x > 0.01).all(), lambda x: torch.all(x > 0.1, 0), lambda x: (x > 0.1).all(dim=1, keepdim=True)],
    "count_nonzero": [lambda x: torch.count_nonzero(x > 0.5), lambda x: x.round().count_nonzero(dim=1)],
    "logsumexp": [lambda x: torch.logsumexp(x, (0, 1)), lambda x: x.logsumexp(0), lambda x: x.logsumexp(1, True)],
    "norm": [
        lambda x: x.norm(),
        lambda x: torch.norm(x, 1),
        lambda x: x.norm(3, 0),
        lambda x: x.norm(2, 1, True),
        lambda x: x.norm(p=INF),
        lambda x: (x - x).norm(),
        lambda x: torch.norm(x, "fro", dim=(0, 1)),
    ],
    "linalg_vector_norm": [
        torch.linalg.vector_norm,
        lambda x: torch.linalg.vector_norm(x, -INF, 0),
        lambda x: torch.linalg.vector_norm(x, INF, 1),
        lambda x: torch.linalg.vector_norm(x.round(), 0),
        lambda x: torch.linalg.vector_norm(x, 2, dtype=torch.float64),
        lambda x: torch.linalg.vector_norm(x, -1.5, 0, keepdim=True),
    ],
    "linalg_norm": [torch.linalg.norm, lambda x: torch.linalg.norm(x, 1, dim=0)],
    "std": [
        lambda x: x.std(),
        lambda x: torch.std(x, 0),
        lambda x: x.std(1, keepdim=True),
        lambda x: x.std(False),
        lambda x: x.std(0, False, True),
        lambda x: (x - x).std(),
    ],
    "var": [lambda x: x.var(), lambda x: torch.var(x, 0, correction=2), lambda x: x.var(1, unbiased=False)],
    "softmax": [
        lambda x: torch.softmax(x, 0),
        lambda x: x.softmax(1),
        lambda x: functional.softmax(input=x * 900, dim=-1),
        lambda x: functional.softmax(x.float(), 0, dtype=torch.float64),
    ],
    "log_softmax": [
        lambda x: torch.log_softmax(x, 0),
        lambda x: x.log_softmax(-1),
        lambda x: functional.log_softmax(x * 900, dim=0),
    ],
    "normalize": [functional.normalize, lambda x: functional.normalize(x, 1.0, 0)],
    "mse_loss": [lambda x: functional.mse_loss(x, x * x), lambda x: functional.mse_loss(x, x.exp(), reduction="sum")],
    "l1_loss": [lambda x: functional.l1_loss(x, x * x), lambda x: functional.l1_loss(x, x * x, reduction="none")],
    "smooth_l1_loss": [lambda x: functional.smooth_l1_loss(x, x * x, beta=0.2)],
    "huber_loss": [lambda x: functional.huber_loss(x, x * x, delta=0.2)],
    "kl_div": [lambda x: functional.kl_div(x.log(), x * x, reduction="batchmean")],
    "soft_margin_loss": [lambda x: functional.soft_margin_loss(x, x.detach().round() * 2 - 1)],
    "binary_cross_entropy": [lambda x: functional.binary_cross_entropy(x, x * x)],
    "binary_cross_entropy_with_logits": [
        lambda x: functional.binary_cross_entropy_with_logits(x, x.detach() * x.detach()),
        lambda x: functional.binary_cross_entropy_with_logits(x, x.detach(), pos_weight=torch.arange(1.0, 6).double()),
    ],
}
MODULES = tuple(f"gradwire.shard.ops.{name}" for name in ("reductions", "normalization"))


def full(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, ShardedTensor) else value


def compare(world: World, whole: torch.Tensor, sharded: ShardedTensor, function: Reduction) -> None:
    """Value, dtype and gradient of a function of one tensor."""
    plain = whole.clone().requires_grad_()
    expected, found = function(plain), function(sharded)
    value = full(found)
    assert (value.dtype, value.size()) == (expected.dtype, expected.size())
    tolerance = 1e-10 if expected.dtype == torch.float64 else 1e-5
    assert_close(value, expected, rtol=tolerance, atol=tolerance)
    assert found.requires_grad == expected.requires_grad
    if expected.requires_grad:
        weights = torch.arange(1.0, 1.0 + expected.numel()).view(expected.size()).to(expected.dtype)
        (expected * weights).sum().backward()
        world.backward((value * weights).sum())
        if expected.dtype == torch.float64 and plain.grad is not None:
            world.assert_gradient(sharded, plain.grad)


def check_reductions(world: World, names: list[str], with_ties: bool) -> int:
    whole = torch.rand(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 0.8 + 0.1
    if with_ties:
        whole = (whole * 4).round() / 4 + 0.05
    specs, turn = world.specs(7, 5), 0
    for name in names:
        for number, function in enumerate(REDUCTIONS[name]):
            for spec in (specs[turn % len(specs)], specs[(turn + 2) % len(specs)]):
                turn += 1
                try:
                    with world.fresh_gradients():
                        compare(world, whole, world.place(whole, spec, requires_grad=True), function)
                except Exception as error:
                    raise AssertionError(f"{name}, way {number}, {spec}: {error!r}") from error
    return turn


@BACKENDS
@pytest.mark.parametrize("num_places", [2, 3, 4])
def test_reductions(worlds: Worlds, backend: str, num_places: int) -> None:
    names = list(REDUCTIONS)[num_places - 2 :: 3]
    (number,) = set(worlds.check(backend, num_places, check_reductions, names, False))
    assert number >= 2 * len(names)


@BACKENDS
def test_equal_elements_share_the_gradient(worlds: Worlds, backend: str) -> None:
    assert worlds.check(backend, 3, check_reductions, ["amax", "amin", "norm"], True)


def test_every_function_has_a_test() -> None:
    registered = {
        function.__name__ for function, own in dispatch._own.items() if getattr(own, "__module__", "") in MODULES
    }
    assert registered == {*REDUCTIONS, "layer_norm", "rms_norm"}
