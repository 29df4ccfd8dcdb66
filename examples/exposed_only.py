"""
Accept calls, but no code
=========================

With ``trust="data"`` a worker runs only the functions that it has exposed, and no pickle is read. Here two parties
split a model: alice holds the inputs and the lower half, bob holds the upper half, and only activations travel
between them.

Run it::

    python examples/exposed_only.py

The program asks alice for a prediction and checks it. Then it tries three calls that bob must refuse, and prints the
errors.
"""

from __future__ import annotations

import os

import torch

import gradwire as gw
from gradwire import rpc
from gradwire.errors import CannotSend, NotExposed

# %%
# What each party exposes
# -----------------------
# The workers import this file (``imports=`` below), so what it exposes is exposed on them. Each function has a public
# name by which others call it. All processes make the same weights here, so that the driver can check the result.

torch.manual_seed(0)
LOWER = torch.nn.Linear(8, 4)
UPPER = torch.nn.Linear(4, 2)


def make_inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 16).view(2, 8)


@rpc.expose(name="upper")
def run_upper(activations: torch.Tensor) -> torch.Tensor:
    """Run bob's half."""
    with torch.no_grad():
        return UPPER(activations)


@rpc.expose(name="predict")
def predict(row: int) -> torch.Tensor:
    """Run alice's half on one of her inputs, and bob's half after it."""
    with torch.no_grad():
        activations = torch.relu(LOWER(make_inputs()[row]))
    return rpc.rpc_sync("bob", "upper", args=(activations,))


# %%
# What is refused
# ---------------
# A function that is not exposed, a function object, and an argument that is not plain data.

FORBIDDEN = (
    ("a function that is not exposed", "posix:getpid", ()),
    ("a function object", os.getpid, ()),
    ("an argument that is not plain data", "upper", (object(),)),
)


def try_forbidden_calls(worker: gw.cluster.Worker) -> int:
    """Return how many were refused."""
    num_refused = 0
    for description, function, arguments in FORBIDDEN:
        try:
            worker.call(function, *arguments)
        except (NotExposed, CannotSend) as error:
            num_refused += 1
            print(f"{description}:\n  {type(error).__name__}: {error}")
    return num_refused


# %%
# Start both parties
# ------------------
# Here both are on this machine. ``two_hosts_tls.py`` shows two machines.


def main() -> None:
    with gw.Cluster.local(2, names=["alice", "bob"], trust="data", imports=["exposed_only"]) as cluster:
        alice, bob = cluster.workers
        result = alice.call("predict", 1)
        print(f"alice and bob predict {result.tolist()}")
        num_refused = try_forbidden_calls(bob)
    expected = run_upper(torch.relu(LOWER(make_inputs()[1])))
    if not torch.allclose(result, expected):
        raise SystemExit(f"exposed_only: the prediction is wrong, expected {expected.tolist()}")
    if num_refused < len(FORBIDDEN):
        raise SystemExit(f"exposed_only: only {num_refused} of {len(FORBIDDEN)} forbidden calls were refused")
    print(
        f"exposed_only: the prediction is correct, and {num_refused} of {len(FORBIDDEN)} forbidden calls were refused"
    )


if __name__ == "__main__":
    main()
