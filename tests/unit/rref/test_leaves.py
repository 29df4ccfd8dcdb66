"""What is kept of a value, so that threads can share its leaf tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gradwire.rref.leaves import keep_accumulators


@dataclass
class Server:
    model: torch.nn.Module
    name: str = "server"


def accumulator_of(leaf: torch.Tensor) -> Any:
    return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def is_kept(leaf: torch.Tensor, kept: Any) -> bool:
    """Whether the leaf's accumulator outlives the graphs that use it, as long as there is what keeps it."""
    accumulator_of(leaf).metadata["seen"] = True
    return kept is not None and "seen" in accumulator_of(leaf).metadata


LEAF = torch.ones(3, 2, requires_grad=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda leaf: leaf,
        lambda leaf: [1, leaf],
        lambda leaf: ("a", leaf),
        lambda leaf: {"weight": leaf},
        lambda leaf: Server(_module(leaf)),
        lambda leaf: [_module(leaf)],
        lambda leaf: torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sequential(_module(leaf))),
    ],
    ids=["tensor", "list", "tuple", "dict", "object", "modules", "nested module"],
)
@pytest.mark.parametrize("size", [(3, 2), ()])
def test_accumulators_are_kept(make: Callable[[torch.Tensor], Any], size: tuple[int, ...]) -> None:
    leaf = torch.nn.Parameter(torch.ones(size))
    assert not is_kept(leaf, None)
    value = make(leaf)
    with torch.no_grad():  # as calls may be made
        kept = keep_accumulators(value)
    assert is_kept(leaf, kept)
    del kept
    accumulator_of(leaf).metadata.clear()
    assert "seen" not in accumulator_of(leaf).metadata


def _module(leaf: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_parameter("weight", leaf if isinstance(leaf, torch.nn.Parameter) else torch.nn.Parameter(leaf))
    return module


def test_no_memory_is_kept() -> None:
    leaf = torch.ones(1000, requires_grad=True)
    kept = keep_accumulators(leaf)
    assert kept.untyped_storage().nbytes() == 0
    gone = weakref.ref(leaf)
    del leaf, kept
    assert gone() is None


def test_a_module_that_changes_its_type_takes_new_accumulators() -> None:
    module = torch.nn.Linear(2, 2)
    kept = keep_accumulators(module)
    module.double()
    module(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    assert kept is not None
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float64


class Touchy:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class Slots:
    __slots__ = ("x",)


def _dead_proxy() -> Any:
    return weakref.proxy(Server(torch.nn.ReLU()))


@pytest.mark.parametrize(
    "make",
    [
        lambda: 3,
        lambda: "text",
        lambda: None,
        lambda: torch.ones(3),
        lambda: LEAF * 2,
        lambda: torch.eye(2).to_sparse().requires_grad_(),
        torch.nn.parameter.UninitializedParameter,
        lambda: torch.nn.Linear.__new__(torch.nn.Linear),
        lambda: torch.nn.Linear,
        lambda: torch,
        Touchy,
        Slots,
        _dead_proxy,
    ],
    ids=lambda make: getattr(make, "__name__", ""),
)
def test_nothing_to_keep(make: Callable[[], Any]) -> None:
    kept = keep_accumulators(make())
    assert kept is None or all(item is None for item in kept)
