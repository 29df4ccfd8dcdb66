"""Asking many workers at once how many calls they have served."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence

from gradwire.cluster._worker import CALLS_SERVED
from gradwire.errors import GradwireError
from gradwire.rpc._calls import PendingCall
from gradwire.rpc.agent import Agent


def ask_calls_served(agent: Agent, names: Sequence[str], timeout_s: float) -> dict[str, int]:
    """The numbers of those that answered within `timeout_s`.

    The question travels on the control lane: it counts as no call, and a worker whose threads are all busy answers.
    """
    deadline = time.monotonic() + timeout_s
    answers: queue.SimpleQueue[tuple[str, PendingCall | None]] = queue.SimpleQueue()
    for name in names:
        _ask(agent, name, max(0.01, deadline - time.monotonic()), answers)
    served = {}
    for _ in names:
        try:
            name, answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if answer is not None and answer.error is None:
            served[name] = answer.value
    return served


def _ask(agent: Agent, name: str, timeout_s: float, answers: queue.SimpleQueue[tuple[str, PendingCall | None]]) -> None:
    def on_done(call: PendingCall) -> None:
        answers.put((name, call))

    try:
        agent.control(name, CALLS_SERVED, (), timeout_s, on_done, int)
    except GradwireError:
        answers.put((name, None))  # it died, or is too busy to be connected to
