"""Which new values may travel with the answer to the call that made them: those that nobody else can change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from gradwire.rref.owner import is_unshared

_kept = torch.zeros(4)


def is_result_unshared(function: Callable[[], Any]) -> bool:
    """Asked as the owner asks: one variable has the value."""
    value = function()
    return is_unshared(value)


@pytest.mark.parametrize("function", [lambda: 3, lambda: 2.5, lambda: True, lambda: torch.ones(16)])
def test_small_values_of_their_own_are_unshared(function: Callable[[], Any]) -> None:
    assert is_result_unshared(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda: _kept,
        lambda: _kept.view(2, 2),
        _kept.detach,
        lambda: torch.ones(2).t(),
        lambda: torch.ones(8)[2:],
        lambda: torch.ones(4).share_memory_(),
        lambda: torch.from_numpy(numpy.ones(4)),
        lambda: torch.frombuffer(bytearray(16), dtype=torch.int32),
        lambda: torch.ones(4, requires_grad=True),
        lambda: torch.ones(1000),
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.ones(2, device="meta"),
        lambda: torch.nn.Parameter(torch.ones(2), requires_grad=False),
        lambda: [1, 2],
        lambda: None,
    ],
)
def test_what_others_may_change_or_is_large_is_not(function: Callable[[], Any]) -> None:
    assert not is_result_unshared(function)


def test_memory_that_numpy_has_is_shared() -> None:
    views = []

    def make() -> torch.Tensor:
        made = torch.ones(4)
        views.append(made.numpy())
        return made

    assert not is_result_unshared(make)
    assert views[0].sum() == 4.0
