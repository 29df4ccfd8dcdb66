"""Everything once: parameters on another worker, a forward pass, a backward pass and an optimizer's step, across workers.

    python examples/end_to_end.py

Two parameters are made on a worker and stay there. The driver uses them, computes a loss, runs backward through the calls,
and steps the parameters where they are. The same in one process gives the same numbers.
"""

from __future__ import annotations

import torch

import gradwire
from gradwire import autograd, optim, rpc

LEARNING_RATE = 0.05
NUM_STEPS = 5


def make_parameter(seed: int) -> torch.nn.Parameter:
    """Runs on the worker: what it returns stays there."""
    return torch.nn.Parameter(torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)))


def train_across_workers(worker: str) -> list[torch.Tensor]:
    """Steps parameters that live on another worker; returns copies of them."""
    first, second = (rpc.remote(worker, make_parameter, args=(seed,)) for seed in (1, 2))
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, [first, second], lr=LEARNING_RATE)
    for number in range(NUM_STEPS):
        with autograd.context() as ctx:
            product = first.to_here() @ second.to_here()  # recorded: gradients go back to the worker
            loss = (product - torch.eye(3)).square().sum()
            autograd.backward(ctx, [loss])
            optimizer.step(ctx)
        print(f"step {number}: loss {loss.item():.4f}")
    return [parameter.to_here().detach() for parameter in (first, second)]


def train_here() -> list[torch.Tensor]:
    """The same in one process."""
    parameters = [make_parameter(seed) for seed in (1, 2)]
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        (parameters[0] @ parameters[1] - torch.eye(3)).square().sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def main() -> None:
    """Starts a worker, trains what it has, and compares."""
    with gradwire.Cluster.local(1) as cluster:
        found = train_across_workers(cluster.workers[0].name)
    is_same = all(torch.equal(there, here) for there, here in zip(found, train_here(), strict=True))
    print(f"end_to_end: same parameters as in one process, bit for bit: {is_same}")


if __name__ == "__main__":
    main()
