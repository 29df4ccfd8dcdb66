"""The self test of `gradwire doctor`: a worker, a thousand calls, and a gradient that is compared with one process.

Prints one line of JSON.
"""

from __future__ import annotations

import json
import statistics
import time

import torch

import gradwire

_NUM_CALLS = 1000
_NUM_WARM_UP = 50


def do_nothing() -> None:
    """Do nothing; called to measure the latency of a call."""


def hidden(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute the first half of a small model."""
    return torch.tanh(x @ weight)


def measure() -> dict[str, float | bool]:
    """Start a worker and return the measurements."""
    begin = time.perf_counter()
    with gradwire.Cluster.local(1) as cluster:
        worker = cluster.workers[0]
        worker.call(do_nothing)
        start_s = time.perf_counter() - begin
        times = []
        for _ in range(_NUM_WARM_UP + _NUM_CALLS):
            begin = time.perf_counter()
            worker.call(do_nothing)
            times.append(time.perf_counter() - begin)
        remote = _gradients(lambda weight, x: worker.call(hidden, weight, x), is_remote=True)
    local = _gradients(hidden, is_remote=False)
    return {
        "start_s": start_s,
        "call_us": statistics.median(times[_NUM_WARM_UP:]) * 1e6,
        "is_equal": all(torch.equal(one, other) for one, other in zip(remote, local, strict=True)),
        "error": max(float((one - other).abs().max()) for one, other in zip(remote, local, strict=True)),
    }


def _gradients(function: object, *, is_remote: bool) -> list[torch.Tensor]:
    """Return the gradients of a loss with respect to both arguments of a function, computed here or through a worker."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 16, generator=generator, requires_grad=True)
    x = torch.randn(8, 16, generator=generator, requires_grad=True)
    assert callable(function)
    if not is_remote:
        function(weight, x).square().sum().backward()
        assert weight.grad is not None
        assert x.grad is not None
        return [weight.grad, x.grad]
    with gradwire.autograd.context() as context_id:
        gradwire.autograd.backward(context_id, [function(weight, x).square().sum()])
        found = gradwire.autograd.get_gradients(context_id)
        return [found[weight], found[x]]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measure()))
