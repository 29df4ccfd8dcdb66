"""Fan-out: ask many workers at once, and collect all answers, or the first error, within one deadline.

answers = gather(names, lambda name: agent.submit(name, read_state), timeout_s=30.0)
outcomes = ask_all(names, lambda name: agent.ask(name, "calls_served", (), 1.0, int), timeout_s=1.0)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

import msgspec

from gradwire.errors import RpcTimeout, WaitTimeout
from gradwire.rpc.futures import CallFuture, InterruptibleFuture

W = TypeVar("W", bound=Hashable)
V = TypeVar("V")


class Outcome(msgspec.Struct, Generic[V], frozen=True):
    """How one worker answered.

    Attributes:
        value: Its answer; None if it failed.
        error: Why there is no answer; None if there is one.
    """

    value: V | None = None
    error: Exception | None = None


def ask_all(
    workers: Iterable[W], ask: Callable[[W], InterruptibleFuture[V]], timeout_s: float = 0.0
) -> dict[W, Outcome[V]]:
    """Ask every worker, then wait for all of them.

    Args:
        workers: Names, ranks or anything else that `ask` knows.
        ask: Starts the question to one worker and returns the future of its answer.
        timeout_s: For all answers together; 0 for as long as the questions themselves may take. A call that has not ended
            by then is given up.

    Returns:
        The outcome by worker, in the order given. An error of one worker does not end the questions to the others.
    """
    deadline = time.monotonic() + timeout_s if timeout_s > 0 else None
    futures: dict[W, InterruptibleFuture[V] | Exception] = {}
    for worker in workers:
        try:
            futures[worker] = ask(worker)
        except Exception as error:  # it is lost, say, or the question cannot be sent
            futures[worker] = error
    return {worker: _outcome(worker, future, deadline, timeout_s) for worker, future in futures.items()}


def _outcome(worker: Any, future: Any, deadline: float | None, timeout_s: float) -> Outcome[Any]:
    if isinstance(future, Exception):
        return Outcome(error=future)
    try:
        return Outcome(future.wait(None if deadline is None else max(0.0, deadline - time.monotonic())))
    except WaitTimeout:
        if isinstance(future, CallFuture):
            future.cancel()
        return Outcome(error=RpcTimeout(f"worker {worker} did not answer within {timeout_s:g} s", str(worker), "run"))
    except Exception as error:
        return Outcome(error=error)


def gather(workers: Iterable[W], ask: Callable[[W], InterruptibleFuture[V]], timeout_s: float = 0.0) -> dict[W, V]:
    """Do as `ask_all`, for questions that are of use only if every worker answers.

    Raises:
        RpcTimeout: A worker did not answer in time.
        Exception: The first error, in the order of the workers; all of them have ended by then.
    """
    outcomes = ask_all(workers, ask, timeout_s)
    for outcome in outcomes.values():
        if outcome.error is not None:
            raise outcome.error
    return {worker: outcome.value for worker, outcome in outcomes.items()}  # type: ignore[misc]
