"""Data-parallel training by averaging parameters, with plain calls.

    python examples/parameter_average.py

Every worker has a part of the data that the others never see. In each round the driver sends the model's parameters to
all workers, each trains on its own part for some steps and returns what it got, and the driver averages. No gradient
flows through a call here; `demo.py` shows that.
"""

from __future__ import annotations

import torch

import gradwire

NUM_WORKERS = 3
NUM_ROUNDS = 10
Parameters = dict[str, torch.Tensor]


def make_model() -> torch.nn.Module:
    """A small regression network."""
    return torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def make_data(seed: int, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Points between two bounds of the first coordinate, and the value to learn for each."""
    x = torch.rand(256, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    x[:, 0] = low + (x[:, 0] + 1) / 2 * (high - low)
    return x, torch.sin(3 * x[:, :1]) * x[:, 1:]


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean squared error."""
    return torch.nn.functional.mse_loss(model(x), y)


def train(rank: int, parameters: Parameters, num_steps: int = 40) -> Parameters:
    """Runs on a worker: some steps on its own part of the data."""
    width = 2 / NUM_WORKERS
    x, y = make_data(seed=rank, low=-1 + rank * width, high=-1 + (rank + 1) * width)
    model = make_model()
    model.load_state_dict(parameters)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def average(results: list[Parameters]) -> Parameters:
    """The mean of what the workers returned."""
    return {name: torch.stack([result[name] for result in results]).mean(dim=0) for name in results[0]}


def main() -> None:
    """Trains, and tests on points from everywhere."""
    torch.manual_seed(0)
    model = make_model()
    x, y = make_data(seed=99, low=-1, high=1)
    before = loss_of(model, x, y).item()
    with gradwire.Cluster.local(NUM_WORKERS) as cluster:
        for round_no in range(NUM_ROUNDS):
            parameters = {name: value.detach() for name, value in model.state_dict().items()}
            futures = [worker.submit(train, worker.rank, parameters) for worker in cluster.workers]
            model.load_state_dict(average([future.wait() for future in futures]))
            if round_no % 5 == 4:
                print(f"round {round_no + 1:2}: loss {loss_of(model, x, y).item():.4f}")
    after = loss_of(model, x, y).item()
    print(f"parameter_average: loss fell from {before:.3f} to {after:.3f}")


if __name__ == "__main__":
    main()
