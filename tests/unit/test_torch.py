"""What gradwire relies on of torch's private names: one test for each, which fails by name when torch changes it."""

from __future__ import annotations

import threading
from typing import Any

import torch

from gradwire import _torch
from gradwire._torch import Carried


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


# -- used by autograd and params -------------------------------------------------------------------------------------------


def test_run_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    arguments: tuple[Any, ...] = ((x * 3).sum(),), (torch.ones(()),), False, False, (x,)
    (found,) = _torch.run_backward(*arguments, allow_unreachable=True, accumulate_grad=False)
    assert found.tolist() == [3.0, 3.0]
    assert x.grad is None


def test_is_any_autocast_enabled() -> None:
    assert not _torch.is_any_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert _torch.is_any_autocast_enabled()


def test_set_grad_mode() -> None:
    _torch.set_grad_mode(False)
    try:
        assert not torch.is_grad_enabled()
    finally:
        _torch.set_grad_mode(True)
    assert torch.is_grad_enabled()


def test_function_apply() -> None:
    x = torch.ones(2, requires_grad=True)
    _torch.function_apply(Doubled)(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]


def test_backward_class() -> None:
    before = _torch.backward_class(Doubled)
    other = type("Other", (before,), {"is_ours": True})
    _torch.set_backward_class(Doubled, other)
    try:
        node: Any = _torch.function_apply(Doubled)(torch.ones(2, requires_grad=True)).grad_fn
        assert node.is_ours
    finally:
        _torch.set_backward_class(Doubled, before)


def test_sequence_number() -> None:
    node = (torch.ones(2, requires_grad=True) * 2).grad_fn
    _torch.set_sequence_number(node, 7)
    assert _torch.sequence_number(node) == 7


def test_hook_mixin() -> None:
    noted: list[Any] = []
    before = _torch.hook_mixin._register_hook

    def note(hooks: Any, hook: Any) -> Any:
        noted.append(hook)
        return before(hooks, hook)

    _torch.hook_mixin._register_hook = staticmethod(note)
    try:
        node: Any = Doubled.apply(torch.ones(2, requires_grad=True)).grad_fn  # type: ignore[no-untyped-call]
        node.register_hook(print)
    finally:
        _torch.hook_mixin._register_hook = staticmethod(before)
    assert noted == [print]


def test_leaf_hooks() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert not _torch.leaf_hooks(leaf)
    handle = leaf.register_hook(lambda _: None)  # type: ignore[no-untyped-call]
    assert len(_torch.leaf_hooks(leaf)) == 1
    handle.remove()
    assert not _torch.leaf_hooks(leaf)


def test_post_accumulate_hooks() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert not _torch.post_accumulate_hooks(leaf)
    leaf.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
    assert len(_torch.post_accumulate_hooks(leaf)) == 1


def test_carried_value_of_every_thread() -> None:
    value: Carried[int] = Carried("tests.carried.own", 7)
    assert value.set(1) == 7
    assert value.set(2) == 1
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(value.get()))
    thread.start()
    thread.join(10.0)
    assert (value.get(), seen) == (2, [7])


def test_carried_values_are_kept_apart() -> None:
    one: Carried[str] = Carried("tests.carried.one", "none")
    other: Carried[str] = Carried("tests.carried.other", "none")
    one.set("here")
    assert (one.get(), other.get()) == ("here", "none")
