"""More workers than cores: a driver with 2, 4 and 8 servers, with and without another program that keeps one core busy.

A laptop or a small container with a handful of workers is the most common first use, and many workers on a core are normal
for parameter servers and actors. Every step but the plain calls is a context with forward and backward; the gradient of the
first step of each round is compared with one process.
"""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

from autograd_cases import AutogradCase, Side

NUM_SERVERS = (2, 4, 8)
SCALE = torch.full((4, 4), 1.5)
BUSY = ", a core busy"
_SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(100_000): pass"


# Run on servers.


def scale(x: Tensor) -> Tensor:
    """A small function."""
    return x * SCALE


def pass_on(module: str, servers: tuple[str, ...], x: Tensor) -> Tensor:
    """A small function that calls itself on the next server."""
    x = scale(x)
    if servers:
        rpc = importlib.import_module(module)
        return rpc.rpc_sync(servers[0], pass_on, args=(module, servers[1:], x))
    return x


def compute(x: Tensor) -> Tensor:
    """Some milliseconds of work."""
    for _ in range(12):
        x = torch.tanh(x @ x.t() * 0.01)
    return x


# What a step does. Each function returns the loss; `peer` is None for one process.


def _call(peer: Any, number: int, function: Callable[..., Tensor], x: Tensor) -> Tensor:
    if peer is None:
        return function(x)
    return peer.rpc.rpc_sync(peer.server_names[number % len(peer.server_names)], function, args=(x,))


def plain(peer: Any, num_servers: int, x: Tensor) -> Tensor:
    """20 calls, one after another, without a context."""
    return sum(_call(peer, number, scale, x) for number in range(20)).sum()


def chain(peer: Any, num_servers: int, x: Tensor) -> Tensor:
    """12 calls, each with the result of the one before."""
    for number in range(12):
        x = _call(peer, number, scale, x)
    return x.sum()


def _fan_out(peer: Any, num_servers: int, x: Tensor, function: Callable[..., Tensor], num_each: int) -> Tensor:
    if peer is None:
        return sum(function(x) for _ in range(num_servers * num_each)).sum()
    servers = [server for _ in range(num_each) for server in peer.server_names]
    futures = [peer.rpc.rpc_async(server, function, args=(x,)) for server in servers]
    return sum(future.wait() for future in futures).sum()


def fan_out(peer: Any, num_servers: int, x: Tensor) -> Tensor:
    """One call to each at the same time."""
    return _fan_out(peer, num_servers, x, scale, 1)


def fan_out_8(peer: Any, num_servers: int, x: Tensor) -> Tensor:
    """Eight calls to each at the same time."""
    return _fan_out(peer, num_servers, x, scale, 8)


def nested(peer: Any, num_servers: int, x: Tensor) -> Tensor:
    """A call through all servers."""
    if peer is None:
        for _ in range(num_servers):
            x = scale(x)
        return x.sum()
    first, *others = peer.server_names
    return peer.rpc.rpc_sync(first, pass_on, args=(peer.module, tuple(others), x)).sum()


def compute_bound(peer: Any, num_servers: int, x: Tensor) -> Tensor:
    """One long call to each at the same time."""
    return _fan_out(peer, num_servers, x, compute, 1)


WORKS: dict[str, tuple[Callable[[Any, int, Tensor], Tensor], int, int, float]] = {
    # what a step does, size of the input, timed steps in a round, bar
    "plain calls, 20": (plain, 4, 10, 3.0),
    "chain of 12": (chain, 4, 10, 1.5),
    "fan-out": (fan_out, 4, 30, 1.5),
    "fan-out, 8 each": (fan_out_8, 4, 10, 1.5),
    "nested": (nested, 4, 20, 1.5),
    "compute-bound": (compute_bound, 256, 3, 1.3),
}


def run_step(peer: Any, name: str, data: Tensor, *, is_checked: bool = False) -> None:
    """One step.

    Raises:
        AssertionError: The gradient of the input is not that of one process.
    """
    loss_of = WORKS[name][0]
    num_servers = len(peer.server_names)
    if loss_of is plain:
        result = plain(peer, num_servers, data)
        if is_checked:
            torch.testing.assert_close(result, plain(None, num_servers, data))
        return
    x = data.detach().requires_grad_()
    with peer.autograd.context() as context_id:
        peer.autograd.backward(context_id, [loss_of(peer, num_servers, x)])
        if is_checked:
            own = data.detach().requires_grad_()
            (expected,) = torch.autograd.grad(loss_of(None, num_servers, own), own)
            torch.testing.assert_close(peer.autograd.get_gradients(context_id)[x], expected)


@contextlib.contextmanager
def _busy_core(is_wanted: bool) -> Iterator[None]:
    """Another program that computes all the time. It ends with this process at the latest."""
    spinner = subprocess.Popen([sys.executable, "-S", "-c", _SPIN]) if is_wanted else None
    try:
        yield
    finally:
        if spinner is not None:
            spinner.kill()
            spinner.wait()


def time_many_workers(peer: Any, names: list[str], num_steps: int, round_no: int) -> list[float]:
    """Median seconds of a step of each work.

    Raises:
        AssertionError: A gradient is wrong.
    """
    found = []
    for full_name in names:
        name = full_name.removesuffix(BUSY)
        size = WORKS[name][1]
        data = torch.randn(size, size, generator=torch.Generator().manual_seed(round_no))
        run_step(peer, name, data, is_checked=True)
        times = []
        with _busy_core(full_name != name):
            for number in range(2 + num_steps):
                start = time.perf_counter()
                run_step(peer, name, data)
                if number >= 2:
                    times.append(time.perf_counter() - start)
        found.append(median(times))
    return found


def _case(name: str, num_servers: int, busy: str) -> AutogradCase:
    _, _, num_steps, bar = WORKS[name]
    sides = (Side(f"{system}{num_servers}", name + busy) for system in ("Gradwire", "TorchRpc"))
    return AutogradCase(f"{num_servers} workers{busy}: {name}", num_steps, *sides, 1.0 if busy else bar)


MANY_WORKERS_CASES = [
    _case(name, num_servers, busy) for num_servers in NUM_SERVERS for busy in ("", BUSY) for name in WORKS
]
