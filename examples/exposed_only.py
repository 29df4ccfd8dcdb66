"""Workers that do not trust each other with code: `trust="data"`.

    python examples/exposed_only.py

A model is split between two parties. One holds the lower half and the inputs, the other holds the upper half. Only
activations travel. Neither side can run anything on the other but what that side has exposed, and no pickle is read.

The workers import this file (`imports=`), so what it exposes is exposed on them.
"""

from __future__ import annotations

import os

import torch

import gradwire
from gradwire import rpc
from gradwire.errors import CannotSend, NotExposed

torch.manual_seed(0)  # every process makes the same weights, so the driver can check the result
LOWER = torch.nn.Linear(8, 4)
UPPER = torch.nn.Linear(4, 2)


@rpc.expose(name="upper")
def run_upper(activations: torch.Tensor) -> torch.Tensor:
    """The only function of the second party that others may call."""
    with torch.no_grad():
        return UPPER(activations)


@rpc.expose(name="predict")
def predict(row: int) -> torch.Tensor:
    """Runs on the first party, which calls the second one by the name of what it exposes."""
    with torch.no_grad():
        activations = torch.relu(LOWER(_inputs()[row]))
    return rpc.rpc_sync("bob", "upper", args=(activations,))


def _inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 16).view(2, 8)


def try_what_is_not_allowed(worker: gradwire.cluster.Worker) -> int:
    """Returns how many attempts were refused."""
    num_refused = 0
    for what, function, arguments in (
        ("a function that is not exposed", "posix:getpid", ()),
        ("a function object", os.getpid, ()),
        ("an argument that is not plain data", "upper", (object(),)),
    ):
        try:
            worker.call(function, *arguments)
        except (NotExposed, CannotSend) as error:
            num_refused += 1
            print(f"{what}: {type(error).__name__}: {str(error)[:72]}...")
    return num_refused


def main() -> None:
    """Starts both parties on this machine and lets the driver ask for a prediction."""
    names = ("alice", "bob")
    with gradwire.Cluster.local(2, names=names, trust="data", imports=["exposed_only"]) as cluster:
        alice, bob = cluster.workers
        result = alice.call("predict", 1)
        expected = run_upper(torch.relu(LOWER(_inputs()[1])))
        num_refused = try_what_is_not_allowed(bob)
    print(f"exposed_only: prediction is right: {torch.allclose(result, expected)}, refused: {num_refused} of 3")


if __name__ == "__main__":
    main()
