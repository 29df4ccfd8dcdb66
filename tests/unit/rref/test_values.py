"""What C++ is made to refer to of a value, so that threads can share its leaf tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gradwire.rref import values
from gradwire.rref.values import Owned, keep_leaves


@dataclass
class Server:
    model: torch.nn.Module
    other: Any = None


class Elsewhere(torch.nn.Module):
    """As `RemoteModule`, it has no parameters to show."""

    def parameters(self, recurse: bool = True) -> Any:
        raise ValueError("not here")


def module_of(leaf: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_parameter("weight", torch.nn.Parameter(leaf) if type(leaf) is torch.Tensor else leaf)
    return module


def leaves_in(kept: Any) -> list[torch.Tensor]:
    return [] if kept is None else list(kept)


@pytest.mark.parametrize(
    "make",
    [
        lambda leaf: leaf,
        lambda leaf: [1, leaf],
        lambda leaf: ("a", leaf),
        lambda leaf: {"weight": leaf},
        lambda leaf: Server(module_of(leaf)),
        lambda leaf: Server(Elsewhere(), module_of(leaf)),
        lambda leaf: [module_of(leaf)],
        lambda leaf: torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sequential(module_of(leaf))),
    ],
    ids=["tensor", "list", "tuple", "dict", "object", "beside one elsewhere", "modules", "nested module"],
)
@pytest.mark.parametrize("size", [(3, 2), (), (0,)])
def test_leaves_are_found(make: Callable[[torch.Tensor], Any], size: tuple[int, ...]) -> None:
    leaf = torch.nn.Parameter(torch.ones(size))
    (found,) = leaves_in(keep_leaves(make(leaf)))
    assert found is leaf


def test_sparse_leaf() -> None:
    leaf = torch.eye(2).to_sparse().requires_grad_()
    assert leaves_in(keep_leaves(leaf))[0] is leaf


def test_cpp_refers_to_them() -> None:
    """As a tensor that only Python has, a leaf would be alone."""
    leaf = torch.nn.Parameter(torch.ones(3))
    before = leaf._use_count()  # type: ignore[attr-defined]
    kept = keep_leaves(leaf)
    assert leaf._use_count() == before + 1  # type: ignore[attr-defined]
    del kept
    assert leaf._use_count() == before  # type: ignore[attr-defined]


def test_leaf_is_freed_with_what_keeps_it() -> None:
    leaf = torch.ones(1000, requires_grad=True)
    kept, gone = keep_leaves(leaf), weakref.ref(leaf)
    del leaf
    gc.collect()
    assert gone() is not None
    del kept
    assert gone() is None


def test_parameter_may_change_its_type_and_size() -> None:
    embedding = torch.nn.Embedding(4, 2)
    kept = keep_leaves(embedding)
    embedding.double()
    embedding.weight.data = torch.zeros(9, 3, dtype=torch.float64)
    embedding(torch.tensor([8])).sum().backward()
    assert kept is not None
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.shape == (9, 3)


def test_value_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_LOOK_EVERY_S", 0.0)
    module = torch.nn.Linear(2, 2, bias=False)
    owned, old = Owned(1), weakref.ref(module.weight)
    owned.set(module)
    module.weight = torch.nn.Parameter(torch.ones(2, 2))
    assert old() is not None
    assert owned.get() is module
    assert old() is None
    assert leaves_in(owned.leaves)[0] is module.weight
    owned.free()
    assert owned.leaves is None


def test_value_is_not_looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    monkeypatch.setattr(values, "keep_leaves", looked.append)
    for value, number in ((torch.ones(2), 1), ({}, 1), (5, 0), ("text", 0)):
        owned = Owned(1)
        owned.set(value)
        assert all(owned.get() is value for _ in range(3))
        assert len(looked) == number
        looked.clear()


def test_long_lists_are_not_gone_through() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert leaves_in(keep_leaves([leaf, *range(5000)]))[0] is leaf
    assert keep_leaves([*range(5000), leaf]) is None


class Touchy:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class TouchyList(list[Any]):
    def __iter__(self) -> Any:
        raise RuntimeError


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
        lambda: torch.ones(3, requires_grad=True) * 2,
        torch.nn.parameter.UninitializedParameter,
        lambda: torch.nn.Linear.__new__(torch.nn.Linear),
        lambda: torch.nn.Linear,
        lambda: torch,
        Touchy,
        TouchyList,
        Slots,
        _dead_proxy,
    ],
    ids=lambda make: getattr(make, "__name__", ""),
)
def test_nothing_to_keep(make: Callable[[], Any]) -> None:
    assert keep_leaves(make()) is None
