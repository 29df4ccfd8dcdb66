"""Calls that run side by side and use one leaf tensor. In torch 2.13 that alone can stop a process: see `rref/values.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.cluster.api import Cluster
from gradwire.rpc import RRef

NUM_TIMES = 2000


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * 2


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "index": lambda x: x[0],
    "T": lambda x: x.T,
    "function": Twice.apply,  # type: ignore[dict-item]
}


class Model:
    def __init__(self) -> None:
        self.layer = torch.nn.Linear(4, 4)


def make_leaf() -> torch.Tensor:
    return torch.ones(4, 4, requires_grad=True)


def in_threads(*functions: Callable[[], Any]) -> int:
    """Calls all functions many times, side by side; returns how often that went well."""
    numbers = [0] * len(functions)

    def repeat(number: int) -> None:
        for _ in range(NUM_TIMES):
            functions[number]()
            numbers[number] += 1

    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(numbers)


def use_beside_products(rref: RRef[Any], name: str) -> int:
    value = rref.local_value()
    leaf = value.layer.weight if isinstance(value, Model) else value
    return in_threads(lambda: leaf * 2, lambda: USES[name](leaf))


def send_beside_products(other: str) -> int:
    leaf = make_leaf()
    with gw.autograd.context():
        return in_threads(lambda: leaf * 2, lambda: rpc.rpc_async(other, torch.sum, (leaf,)))


@pytest.mark.parametrize("make", [make_leaf, Model])
def test_leaf_of_a_reference(cluster: Cluster, make: Callable[[], Any]) -> None:
    rref = rpc.remote("worker0", make)
    for name in USES:
        assert rpc.rpc_sync("worker0", use_beside_products, (rref, name)) == 2 * NUM_TIMES


def test_leaf_that_is_sent(cluster: Cluster) -> None:
    assert rpc.rpc_sync("worker0", send_beside_products, ("worker1",)) == 2 * NUM_TIMES
