"""Distributed autograd: what is measured against torch, one process, itself and gradients by hand, and the bars to pass.

Every step is a context of its own with forward and backward. The input requires grad, so gradients come back to the driver,
where the first step of each round is compared with one process.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from models import FACTOR, OneProcess, affine, apply_model, optimizer_for

Loss = Callable[[Any, Tensor], Tensor]


# What a step does. `peer` is any of the systems in peers.py.


def product_loss(peer: Any, x: Tensor) -> Tensor:
    """One remote matrix product; both factors require grad."""
    return peer.rpc.rpc_sync("server", torch.mm, args=(x, FACTOR)).sum()


def chain_loss(peer: Any, x: Tensor, num_calls: int) -> Tensor:
    """Each call gets the result of the one before."""
    for _ in range(num_calls):
        x = peer.rpc.rpc_sync("server", affine, args=(x,))
    return x.sum()


def model_loss(peer: Any, x: Tensor, name: str, server: str = "server") -> Tensor:
    """One call through a model that lives on a server."""
    return peer.rpc.rpc_sync(server, apply_model, args=(name, x)).square().mean()


def branches_loss(peer: Any, x: Tensor) -> Tensor:
    """Two servers get the same input at the same time."""
    futures = [peer.rpc.rpc_async(server, apply_model, args=("branch", x)) for server in ("server", "server2")]
    first, second = (future.wait().square().mean() for future in futures)
    return first + second


@dataclass(frozen=True)
class Work:
    """One step: a context for each loss, with forward, backward and, if there is one, the optimizer.

    Attributes:
        losses: What each context computes.
        shape: Of the input.
        options: For `backward`.
        trains: The model that is trained, if any.
        is_joined: Whether backward steps the optimizer itself.
    """

    losses: tuple[Loss, ...]
    shape: tuple[int, int]
    options: dict[str, str] = field(default_factory=dict)
    trains: str | None = None
    is_joined: bool = False


CHAIN_10, CHAIN_50 = (functools.partial(chain_loss, num_calls=num_calls) for num_calls in (10, 50))
LAYER = functools.partial(model_loss, name="layer")
BRANCHES = tuple(functools.partial(model_loss, name="branch", server=server) for server in ("server", "server2"))
FAST = {"mode": "fast"}
WORKS = {
    "tiny": Work((product_loss,), (4, 4)),
    "tiny, FAST": Work((product_loss,), (4, 4), FAST),
    "chain of 10": Work((CHAIN_10,), (4, 4)),
    "chain of 10, FAST": Work((CHAIN_10,), (4, 4), FAST),
    "chain of 50": Work((CHAIN_50,), (4, 4)),
    "mlp": Work((functools.partial(model_loss, name="mlp"),), (256, 1024)),
    "branches together": Work((branches_loss,), (512, 512)),
    "branches in turn": Work(BRANCHES, (512, 512)),
    "train": Work((LAYER,), (64, 256), trains="layer"),
    "train, joined": Work((LAYER,), (64, 256), trains="layer", is_joined=True),
}


def run_step(peer: Any, work: Work, data: Tensor, expected: list[Tensor] | None = None) -> Tensor:
    """One step; returns its last loss.

    Raises:
        AssertionError: The gradient of the input is not the expected one.
    """
    for number, loss_of in enumerate(work.losses):
        x = data.detach().requires_grad_()
        with peer.autograd.context() as context_id:
            loss = loss_of(peer, x)
            optimizer = optimizer_for(peer, work.trains) if work.trains else None
            joined = {"optimizer": optimizer} if work.is_joined else {}
            peer.autograd.backward(context_id, [loss], **work.options, **joined)
            if optimizer is not None and not joined:
                optimizer.step(context_id)
            if expected is not None:
                torch.testing.assert_close(peer.autograd.get_gradients(context_id)[x], expected[number])
    return loss.detach()


def run_checked(peer: Any, work: Work, data: Tensor) -> Tensor:
    """A step whose gradients are compared with one process, unless the model is no longer the one that is here."""
    if work.trains or isinstance(peer, OneProcess):
        return run_step(peer, work, data)
    x = data.detach().requires_grad_()
    expected = [torch.autograd.grad(loss_of(OneProcess(), x), x)[0] for loss_of in work.losses]
    return run_step(peer, work, data, expected)


def time_steps(peer: Any, names: list[str], num_steps: int, round_no: int) -> list[float]:
    """Median seconds of a step of each work; several works on one system take turns step by step.

    Raises:
        AssertionError: A gradient is wrong, or training does not lower the loss.
    """
    works = [WORKS[name] for name in names]
    random = torch.Generator().manual_seed(round_no)
    data = [torch.randn(work.shape, generator=random) for work in works]
    first = [run_checked(peer, work, x) for work, x in zip(works, data, strict=True)]
    num_warm = max(1, num_steps // 5)
    times: list[list[float]] = [[] for _ in works]
    last = list(first)
    order = list(range(len(works)))
    for _ in range(num_warm + num_steps):
        for number in order:
            start = time.perf_counter()
            last[number] = run_step(peer, works[number], data[number])
            times[number].append(time.perf_counter() - start)
        order.reverse()
    for work, name, before, after in zip(works, names, first, last, strict=True):
        if work.trains and not after < before:
            raise AssertionError(f"{name}: the loss did not fall ({before:.4f}, {after:.4f})")
    return [median(series[num_warm:]) for series in times]


@dataclass(frozen=True)
class Side:
    """One of those that are compared: a work on a system."""

    peer: str
    work: str


@dataclass(frozen=True)
class AutogradCase:
    """One row of the table.

    Attributes:
        name: What ``--only`` matches.
        num_steps: Timed steps in a round; a fifth of them more come before it untimed.
        gradwire: What is measured.
        torch: The measure, or None.
        bar: torch's time divided by gradwire's must be at least this.
        beside: Another measure.
        beside_name: What to call that.
        beside_bar: gradwire's time divided by that measure's must be at most this.
    """

    name: str
    num_steps: int
    gradwire: Side
    torch: Side | None = None
    bar: float | None = None
    beside: Side | None = None
    beside_name: str = ""
    beside_bar: float | None = None

    @property
    def sides(self) -> list[Side]:
        return [side for side in (self.torch, self.gradwire, self.beside) if side]

    def works_by_peer(self) -> dict[str, list[str]]:
        """What each system does in a round."""
        found: dict[str, list[str]] = {}
        for side in self.sides:
            found.setdefault(side.peer, []).append(side.work)
        return found


def _against_torch(name: str, num_steps: int, work: str, bar: float, **more: Any) -> AutogradCase:
    return AutogradCase(name, num_steps, Side("Gradwire", work), Side("TorchRpc", work), bar, **more)


def _against_itself(
    name: str, num_steps: int, peer: str, works: tuple[str, str], of: str, bar: float | None
) -> AutogradCase:
    this, that = (Side(peer, work) for work in works)
    return AutogradCase(name, num_steps, this, beside=that, beside_name=of, beside_bar=bar)


ONE_PROCESS: dict[str, Any] = {"beside": Side("OneProcess", "mlp"), "beside_name": "one process", "beside_bar": 1.15}


def _by_hand(work: str) -> dict[str, Any]:
    return {"beside": Side("GradwireByHand", work), "beside_name": "by hand"}


AUTOGRAD_CASES = [
    _against_torch("autograd: tiny context", 100, "tiny", 2.4, **_by_hand("tiny")),
    _against_torch("autograd: chain of 10", 20, "chain of 10", 2.8, **_by_hand("chain of 10")),
    _against_torch("autograd: chain of 50", 5, "chain of 50", 2.8, **_by_hand("chain of 50")),
    _against_itself("autograd: SMART, tiny", 100, "Gradwire", ("tiny", "tiny, FAST"), "FAST", 1.05),
    _against_itself("autograd: SMART, chain of 10", 20, "Gradwire", ("chain of 10", "chain of 10, FAST"), "FAST", 1.05),
    _against_torch("autograd: MLP 8 x 1024", 3, "mlp", 1, **ONE_PROCESS),
    _against_itself(
        "autograd: two branches", 5, "GradwirePair", ("branches together", "branches in turn"), "in turn", 0.7
    ),
    _against_torch("autograd: training step", 60, "train", 1.5, **_by_hand("train")),
    _against_itself("autograd: backward(optimizer=)", 60, "Gradwire", ("train, joined", "train"), "with step()", None),
]
