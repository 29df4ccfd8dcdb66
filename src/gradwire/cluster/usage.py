"""The usage that each worker reports for `Cluster.status`: memory, bytes, and the calls and passes in progress.

driver -- cluster.usage() --> worker        on the control lane: a worker whose threads are all busy answers
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import torch

from gradwire.autograd.context import EXTENSION
from gradwire.autograd.engine import DistEngine
from gradwire.cluster.status import CallStatus, PassStatus
from gradwire.rpc.agent import Agent
from gradwire.rpc.connection import Request
from gradwire.telemetry.measurements import rss_of
from gradwire.types import Text, WorkerInfo, short
from gradwire.wire.messages import prepare

USAGE = "cluster.usage"

MOST_CALLS = 16
MOST_PASSES = 16
_MOST_WAITING = 4

_WINDOW_S = 5.0
_SHORTEST_S = 0.2

_Number = Annotated[int, msgspec.Meta(ge=0)]


class Usage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Numbers that a worker reports about itself."""

    calls_served: _Number
    rss_bytes: _Number | None
    device: Text
    device_bytes: _Number | None
    bytes_sent: _Number
    bytes_received: _Number
    num_running: _Number
    num_queued: _Number
    calls: Annotated[tuple[CallStatus, ...], msgspec.Meta(max_length=MOST_CALLS)]  # in progress, the oldest first
    passes: Annotated[tuple[PassStatus, ...], msgspec.Meta(max_length=MOST_PASSES)]


prepare(Usage)


def measure_usage(agent: Agent) -> Usage:
    """Return the numbers of a worker in this process."""
    now, statistics = time.monotonic(), agent.statistics()
    requests = sorted(agent.server.requests(), key=lambda request: request.arrived)
    device, device_bytes = measure_device()
    return Usage(
        statistics.num_calls_served,
        rss_of(os.getpid()),
        device,
        device_bytes,
        statistics.bytes_sent,
        statistics.bytes_received,
        statistics.num_running + statistics.num_waiting,
        statistics.num_queued,
        tuple(_call_status(request, now) for request in requests[:MOST_CALLS]),
        _passes(agent, now),
    )


def _call_status(request: Request, now: float) -> CallStatus:
    nested = request.waits_for
    return CallStatus(
        function=short(request.function or "a function sent by value"),
        caller=short(request.source.info.name),
        phase="wait" if nested is not None and request.phase == "run" else request.phase,  # type: ignore[arg-type]
        seconds=max(0.0, now - (request.started or request.arrived)),
        waits_for="" if nested is None else short(f"{nested.function} on {nested.worker}"),
    )


def _passes(agent: Agent, now: float) -> tuple[PassStatus, ...]:
    engine: DistEngine | None = agent.extensions.get(EXTENSION)
    if engine is None:
        return ()
    found = []
    for context in engine.container:
        for current in list(context.passes.values()):
            view = engine.prober.view_pass(current)
            found.append(
                PassStatus(
                    context_id=context.context_id,
                    root=view.root,
                    phase=view.phase,
                    seconds=max(0.0, now - current.started),
                    num_running=max(0, view.num_running),
                    waits_for=tuple(
                        short(f"{item.peer}: gradient of {item.function}") for item in view.waiting[:_MOST_WAITING]
                    ),
                )
            )
    return tuple(sorted(found, key=lambda item: -item.seconds)[:MOST_PASSES])


def measure_device() -> tuple[str, int | None]:
    """Return the device that this process computes on, and the memory of its tensors on all accelerators.

    The device is ``cpu`` if there is no accelerator, or this process has not used it: asking would initialize it. The
    memory is None then, and if the backend does not report it.
    """
    found = torch.accelerator.current_accelerator()
    backend = None if found is None else torch.get_device_module(found.type)
    if found is None or backend is None or not backend.is_initialized():
        return "cpu", None
    try:
        device = f"{found.type}:{torch.accelerator.current_device_index()}"
    except RuntimeError:
        device = found.type
    allocated = getattr(backend, "memory_allocated", None)
    if allocated is None:
        return device, None
    try:
        return device, sum(int(allocated(index)) for index in range(backend.device_count()))
    except RuntimeError:  # some have the function, and an allocator that does not count
        return device, None


def serve_usage(agent: Agent, driver: str) -> None:
    """Let this worker answer `ask_usage` of its driver."""

    def on_usage(_: WorkerInfo) -> Any:
        return msgspec.to_builtins(measure_usage(agent))

    agent.server.register_control(USAGE, on_usage, only_for=driver, purpose="ask what this worker does")


def ask_usage(agent: Agent, names: Sequence[str], timeout_s: float) -> dict[str, Usage]:
    """Return what each worker does now, for those that answer within `timeout_s`. The question does not count as a call."""
    return agent.ask_all(names, USAGE, (), timeout_s, Usage)


class CallRates:
    """Calls per second of each worker, from the totals at successive looks. No clock inside.

    A rate is that of the last five seconds if there was a look then, else since the look before, else since the start.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _looks
        self._looks: dict[str, tuple[int | None, deque[tuple[float, int]]]] = {}  # by name: pid, and when and how many

    def rate(self, name: str, pid: int | None, uptime_s: float, num_calls: int, now: float) -> float:
        """Return the rate of a worker with that many calls now, and remember the number for the next look."""
        with self._lock:
            known, looks = self._looks.get(name, (None, deque[tuple[float, int]]()))
            if known != pid or not looks:  # another process: it counts from 0
                looks = deque([(now - uptime_s, 0)])
                self._looks[name] = pid, looks
            while len(looks) > 1 and looks[1][0] <= now - _SHORTEST_S and looks[0][0] < now - _WINDOW_S:
                looks.popleft()
            when, before = looks[0]
            if now - looks[-1][0] >= _SHORTEST_S:
                looks.append((now, num_calls))
        return max(0.0, (num_calls - before) / max(now - when, 1e-9))

    def forget_all_but(self, names: Sequence[str]) -> None:
        with self._lock:
            for name in self._looks.keys() - set(names):
                del self._looks[name]
