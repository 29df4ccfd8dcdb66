"""
Average parameters over workers
===============================

Data-parallel training with plain calls. Every worker has a slice of the data that the others never see. In each round
the driver sends the parameters to all workers, each trains on its slice for 40 steps and returns its parameters, and
the driver averages them.

Run it::

    python examples/parameter_average.py

The printed loss is on points from all slices. No gradient flows through a call here; ``demo.py`` and
``split_model.py`` show that.
"""

from __future__ import annotations

import torch

import gradwire as gw

NUM_WORKERS = 3
NUM_ROUNDS = 10
Parameters = dict[str, torch.Tensor]

# %%
# The model and the data
# ----------------------
# The model learns a function of two coordinates. Each worker's slice is an interval of the first one.


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def make_data(seed: int, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(256, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    x[:, 0] = low + (x[:, 0] + 1) / 2 * (high - low)
    return x, torch.sin(3 * x[:, :1]) * x[:, 1:]


def compute_loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x), y)


# %%
# On a worker
# -----------
# Local training in plain PyTorch, from the parameters of this round.


def train(rank: int, parameters: Parameters, num_steps: int = 40) -> Parameters:
    width = 2 / NUM_WORKERS
    x, y = make_data(seed=rank, low=-1 + rank * width, high=-1 + (rank + 1) * width)
    model = make_model()
    model.load_state_dict(parameters)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(num_steps):
        optimizer.zero_grad()
        compute_loss(model, x, y).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


# %%
# On the driver
# -------------
# ``submit`` returns a future, so all workers train at the same time.


def average(results: list[Parameters]) -> Parameters:
    return {name: torch.stack([result[name] for result in results]).mean(dim=0) for name in results[0]}


def train_together(cluster: gw.Cluster) -> list[float]:
    """Return the loss on points from all slices, before training and after each round."""
    torch.manual_seed(0)
    model = make_model()
    x, y = make_data(seed=99, low=-1, high=1)
    losses = [compute_loss(model, x, y).item()]
    for round_number in range(1, NUM_ROUNDS + 1):
        parameters = {name: value.detach() for name, value in model.state_dict().items()}
        futures = [worker.submit(train, worker.rank, parameters) for worker in cluster.workers]
        model.load_state_dict(average([future.wait() for future in futures]))
        losses.append(compute_loss(model, x, y).item())
        print(f"round {round_number:2} of {NUM_ROUNDS}: loss {losses[-1]:.4f}")
    return losses


def main() -> None:
    with gw.Cluster.local(NUM_WORKERS) as cluster:
        losses = train_together(cluster)
    if not losses[-1] < losses[0] / 10:  # true for NaN, too
        raise SystemExit(f"parameter_average: the loss is still {losses[-1]:.3f}, {losses[0]:.3f} before training")
    print(f"parameter_average: the loss fell from {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
