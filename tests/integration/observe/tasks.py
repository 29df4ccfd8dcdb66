"""What workers of these tests run."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from gradwire import rpc
from gradwire.cluster import trace_server
from gradwire.errors import GradwireError
from gradwire.observe import events
from gradwire.rpc import current_agent

_real_clock = time.monotonic_ns


def scale(value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return (value * factor).relu()


def pass_on(value: torch.Tensor) -> torch.Tensor:
    """A call inside a call."""
    found: torch.Tensor = rpc.rpc_sync("worker1", scale, args=(value, value))
    return found * 2


def set_clock_ahead(nanoseconds: int) -> None:
    """Let the clock that events of this process use show another time."""
    time.monotonic_ns = _real_clock if nanoseconds == 0 else lambda: _real_clock() + nanoseconds


def set_settle_s(seconds: float) -> float:
    """Set how long this process waits for late events at the end of a trace; return how long it was."""
    before, trace_server._SETTLE_S = trace_server._SETTLE_S, seconds
    return before


def is_observed() -> bool:
    return events.sink is not None


def die() -> None:
    os._exit(7)


def make_weight() -> torch.Tensor:
    return torch.ones(4, requires_grad=True)


def ask_for_trace(to: str, operation: str, args: tuple[Any, ...]) -> str:
    """Ask another worker what only the driver may ask; return the error."""
    try:
        current_agent().ask(to, operation, args, 10.0).wait()
    except GradwireError as error:
        return str(error)
    return ""
