"""Calls to workers on this machine: call, submit, map, errors, deadlines, cancelling.

    python examples/remote_calls.py

The functions below are defined in this script, so they travel to the workers by value. Functions of modules that the
workers can import (`torch.add`, say) travel by name.
"""

from __future__ import annotations

import time

import torch

import gradwire
from gradwire.errors import CallCancelled, RpcTimeout


class TooLarge(ValueError):
    """An error of this program."""


def mean_square(x: torch.Tensor) -> float:
    """Runs on a worker."""
    return x.square().mean().item()


def refuse_large(number: int) -> int:
    """Raises for some arguments."""
    if number > 3:
        raise TooLarge(f"{number} is more than 3")
    return number


def show_results(cluster: gradwire.Cluster) -> None:
    """Three ways to call."""
    first, second = cluster.workers
    print("call:  ", first.call(torch.add, torch.ones(2), 1))

    x = torch.full((1000,), 2.0)
    future = second.submit(mean_square, x)
    x.zero_()  # too late to change anything: the arguments were captured
    print("submit:", future.wait())

    print("map:   ", cluster.map(mean_square, [torch.full((4,), float(n)) for n in range(4)]))


def show_errors(worker: gradwire.cluster.Worker) -> None:
    """What a function raises comes back as its own type; a deadline says where the call was."""
    try:
        worker.call(refuse_large, 7)
    except TooLarge as error:
        print("error: ", error)
        print("  from:", str(error.__cause__).splitlines()[0])  # the remote traceback is the cause

    try:
        worker.with_timeout(0.2).call(time.sleep, 5)
    except RpcTimeout as error:
        print("timeout in phase:", error.phase)

    future = worker.submit(time.sleep, 5)
    print("cancelled:", future.cancel())
    try:
        future.wait()
    except CallCancelled as error:
        print("  says:", error)


def main() -> None:
    """Starts two workers and calls them."""
    with gradwire.Cluster.local(2) as cluster:
        show_results(cluster)
        show_errors(cluster.workers[0])
        served = sum(status.calls_served or 0 for status in cluster.status())
    print(f"remote_calls: {served} calls answered, no worker left behind")


if __name__ == "__main__":
    main()
