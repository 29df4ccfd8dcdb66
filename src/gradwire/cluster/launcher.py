"""The seam between a cluster and what starts its processes.

A `Launcher` starts workers, knows when they end, and ends them. `gradwire.cluster.local_launcher` has the one for this
machine. One for torchrun or Ray needs these methods and nothing else, because everything a cluster does with a running
worker goes through calls.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gradwire.config import WorkerConfig
from gradwire.types import WorkerAddress, WorkerInfo


class WorkerState(enum.Enum):
    """Where a worker is in its life. It only moves down this list."""

    STARTING = "starting"
    RUNNING = "running"
    LEAVING = "leaving"
    ENDED = "ended"  # after it was asked to leave
    LOST = "lost"  # without having been asked

    @property
    def is_over(self) -> bool:
        """Whether the process is gone."""
        return self in (WorkerState.ENDED, WorkerState.LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker to start.

    Attributes:
        info: Its name and rank.
        config: How it runs; holds the cluster's token.
        addresses: Every member of the cluster, this worker and the driver included.
        num_threads: Threads of one torch operation.
        environment: Environment variables on top of the driver's own.
        imports: Modules to import before anything is served.
    """

    info: WorkerInfo
    config: WorkerConfig
    addresses: tuple[WorkerAddress, ...]
    num_threads: int
    environment: dict[str, str]
    imports: tuple[str, ...] = ()


class WorkerHandle:
    """The life of one worker that was started: events in, state out. The launcher guards it with a lock of its own.

    Attributes:
        info: Name and rank.
        pid: Process id, or None while there is none yet.
        state: Where it is in its life.
        exit_reason: How the process ended, e.g. ``killed by SIGKILL``; None while it runs.
    """

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.pid: int | None = None
        self.state = WorkerState.STARTING
        self.exit_reason: str | None = None
        self._started_at = time.monotonic()
        self._ended_at: float | None = None

    def __repr__(self) -> str:
        return f"<WorkerHandle {self.info.name} pid={self.pid} {self.state.value}>"

    @property
    def uptime_s(self) -> float:
        """Seconds since it was started, until it ended."""
        return (self._ended_at or time.monotonic()) - self._started_at

    def on_process_made(self, pid: int) -> None:
        """Note that the worker has a process."""
        self.pid = pid

    def on_listening(self) -> None:
        """Note that the worker can be called."""
        if self.state is WorkerState.STARTING:
            self.state = WorkerState.RUNNING

    def on_end_expected(self) -> None:
        """Note that the driver wants the worker to end: it does not count as lost any more."""
        if not self.state.is_over:
            self.state = WorkerState.LEAVING

    def on_exited(self, reason: str) -> None:
        """Note that the process is gone."""
        if not self.state.is_over:
            self.state = WorkerState.ENDED if self.state is WorkerState.LEAVING else WorkerState.LOST
            self.exit_reason = reason
            self._ended_at = time.monotonic()


OnLost = Callable[[WorkerHandle], None]


class Launcher(Protocol):
    """Starts and ends worker processes."""

    def start(self, specs: Sequence[WorkerSpec], on_lost: OnLost, timeout_s: float) -> Sequence[WorkerHandle]:
        """Start one worker for each spec and wait until all of them listen.

        Args:
            specs: The workers.
            on_lost: Called, in a thread of the launcher, for each that was ready and ends without being asked to.
            timeout_s: Time for all of them together.

        Raises:
            WorkerStartFailed: One ended first, or `timeout_s` passed; the message carries what it printed. The
                launcher is then of no more use: close it.
        """

    def wait_exit(self, handle: WorkerHandle, timeout_s: float) -> bool:
        """Wait until that worker's process is gone; return False if it is still there after `timeout_s`."""

    def rss_bytes(self, handle: WorkerHandle) -> int | None:
        """Return the memory that the process has resident now, or None where that cannot be known."""

    def terminate(self, handles: Sequence[WorkerHandle], grace_s: float) -> None:
        """Ask workers to leave, and end by force those that are still there after `grace_s`."""

    def close(self) -> None:
        """End every worker at once and free everything. May be called again."""
