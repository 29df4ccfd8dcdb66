"""The distributed optimizer's step alone: two owners with ten million parameters each, SGD with momentum.

Forward and backward are done once, untimed; the context keeps its gradients, so that every timed step uses them again. The
first step of each system is compared with one process.
"""

from __future__ import annotations

import functools
import time
from statistics import median
from typing import Any

import torch

from autograd_cases import AutogradCase, Side
from models import first_values, model, optimizer_for

NAME = "ten million"
MOMENTUM = 0.9
SERVERS = ("server", "server2")


@functools.cache
def _prepare(peer: Any) -> tuple[Any, int]:
    """The optimizer and a context with gradients, for as long as the system lives; one step is made and compared."""
    context_id = peer.autograd.context().__enter__()
    x = torch.randn(8, 1000, generator=torch.Generator().manual_seed(1))
    futures = [peer.rpc.rpc_async(server, _loss, args=(x,)) for server in SERVERS]
    total = torch.stack([future.wait() for future in futures]).sum()
    peer.autograd.backward(context_id, [total])
    optimizer = optimizer_for(peer, NAME, SERVERS, momentum=MOMENTUM)
    optimizer.step(context_id)
    _check(peer, x)
    return optimizer, context_id


def _loss(x: torch.Tensor) -> torch.Tensor:
    return model(NAME)(x).square().mean()


def _check(peer: Any, x: torch.Tensor) -> None:
    found = [peer.rpc.rpc_sync(server, first_values, args=(NAME,)) for server in SERVERS]
    here = model(NAME)
    torch.autograd.backward(_loss(x))
    torch.optim.SGD(here.parameters(), lr=1e-3, momentum=MOMENTUM).step()
    for values in found:
        torch.testing.assert_close(values, first_values(NAME))


def time_optimizer(peer: Any, _names: list[str], num_steps: int, _round_no: int) -> list[float]:
    """Median seconds of a step."""
    optimizer, context_id = _prepare(peer)
    times = []
    for _ in range(num_steps + 2):
        start = time.perf_counter()
        optimizer.step(context_id)
        times.append(time.perf_counter() - start)
    return [median(times[2:])]


OPTIMIZER_CASES = [
    AutogradCase("optimizer: step, 2 x 10 M", 30, Side("GradwirePair", NAME), Side("TorchRpcPair", NAME), bar=1),
]
