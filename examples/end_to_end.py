"""
Train parameters that live on another worker
============================================

The whole path once, in the smallest program: parameters on a worker, a forward pass, a backward pass and an optimizer
step across processes.

Run it::

    python examples/end_to_end.py

Two matrices are created on a worker and stay there. The driver fetches them, computes a loss, runs the backward pass
through the fetches, and steps the matrices where they are. The last line compares them with the same training in one
process.
"""

from __future__ import annotations

import torch

import gradwire as gw
from gradwire import autograd, optim, rpc

LEARNING_RATE = 0.05
NUM_STEPS = 5


def make_parameter(seed: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)))


# %%
# On a worker
# -----------
# ``rpc.remote`` runs ``make_parameter`` there and returns a reference. Inside the context ``to_here()`` is recorded,
# so that gradients flow back to the worker. They are kept in the context, not in ``.grad``.


def train_on_worker(worker: str) -> list[torch.Tensor]:
    first, second = (rpc.remote(worker, make_parameter, args=(seed,)) for seed in (1, 2))
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, [first, second], lr=LEARNING_RATE)
    for step in range(NUM_STEPS):
        with autograd.context() as ctx:
            product = first.to_here() @ second.to_here()
            loss = (product - torch.eye(3)).square().sum()
            autograd.backward(ctx, [loss])
            optimizer.step(ctx)
        print(f"step {step}: loss {loss.item():.4f}")
    return [parameter.to_here().detach() for parameter in (first, second)]


# %%
# The same in one process
# -----------------------


def train_here() -> list[torch.Tensor]:
    parameters = [make_parameter(seed) for seed in (1, 2)]
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        (parameters[0] @ parameters[1] - torch.eye(3)).square().sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


# %%
# Compare
# -------


def main() -> None:
    with gw.Cluster.local(1) as cluster:
        remote = train_on_worker(cluster.workers[0].name)
    local = train_here()
    if not all(torch.equal(one, other) for one, other in zip(remote, local, strict=True)):
        raise SystemExit("end_to_end: the parameters differ from those of one process")
    print("end_to_end: the parameters equal those of one process, bit for bit")


if __name__ == "__main__":
    main()
