"""
Call functions on workers
=========================

Start two worker processes and call functions on them in three ways: wait for the result (``call``), get a future
(``submit``), or spread many calls over all workers (``map``). Then see how an exception, a deadline and a cancelled
call look on the caller's side.

Run it::

    python examples/remote_calls.py

The functions below are defined in this script, so they are sent to the workers by value. Functions that the workers can
import, such as ``torch.add``, are sent by name.
"""

from __future__ import annotations

import time

import torch

import gradwire as gw
from gradwire.errors import CallCancelled, RpcTimeout

# %%
# Two functions to call
# ---------------------
# Nothing about them is special: no decorator, no registration. The second one raises an exception of this program.


class TooLargeError(ValueError):
    """Raised for a number that is too large."""


def mean_square(x: torch.Tensor) -> float:
    return x.square().mean().item()


def check_small(number: int) -> int:
    if number > 3:
        raise TooLargeError(f"{number} is more than 3")
    return number


# %%
# Three ways to call
# ------------------
# ``submit`` captures its arguments when it is called: what happens to ``x`` afterwards does not matter.


def show_results(cluster: gw.Cluster) -> None:
    first, second = cluster.workers
    print("call:     ", first.call(torch.add, torch.ones(2), 1))

    x = torch.full((1000,), 2.0)
    future = second.submit(mean_square, x)
    x.zero_()
    print("submit:   ", future.wait())

    print("map:      ", cluster.map(mean_square, [torch.full((4,), float(n)) for n in range(4)]))


# %%
# When a call fails
# -----------------
# An exception arrives with its own type. Its ``__cause__`` holds the worker's name and traceback. A deadline reports
# the phase that the call was in.


def show_errors(worker: gw.cluster.Worker) -> None:
    try:
        worker.call(check_small, 7)
    except TooLargeError as error:
        print("exception:", repr(error))
        print("    cause:", str(error.__cause__).splitlines()[0])

    try:
        worker.with_timeout(0.5).call(time.sleep, 5)
    except RpcTimeout as error:
        print("deadline:  passed in phase", repr(error.phase))

    future = worker.submit(time.sleep, 5)
    future.cancel()
    try:
        future.wait()
    except CallCancelled as error:
        print("cancelled:", error)


# %%
# Start the workers
# -----------------
# Leaving the ``with`` block ends them.


def main() -> None:
    print("starting two workers")
    with gw.Cluster.local(2) as cluster:
        show_results(cluster)
        show_errors(cluster.workers[0])
        num_served = sum(status.calls_served or 0 for status in cluster.status())
    print(f"remote_calls: the workers served {num_served} calls and have exited")


if __name__ == "__main__":
    main()
