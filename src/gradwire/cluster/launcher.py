"""The interface between a cluster and the launcher of its processes.

A `Launcher` starts workers, detects when they exit, and stops them. `gradwire.cluster.local_launcher` implements it for this
machine, `gradwire.cluster.remote_launcher` for all others, on top of a small `Scheduler`. Everything else that a cluster
does with a running worker goes through calls.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gradwire._progress_bar import DelayedBar, count_columns
from gradwire.config import WorkerConfig
from gradwire.types import WorkerAddress, WorkerInfo


class WorkerState(enum.Enum):
    """Lifecycle of a worker. It only moves down this list."""

    STARTING = "starting"
    RUNNING = "running"
    LEAVING = "leaving"
    ENDED = "ended"  # after it was asked to leave
    LOST = "lost"  # without having been asked

    @property
    def is_over(self) -> bool:
        return self in (WorkerState.ENDED, WorkerState.LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    info: WorkerInfo
    config: WorkerConfig  # holds the cluster's token
    addresses: tuple[WorkerAddress, ...]  # of the driver, and of the other members as far as they are known
    num_threads: int  # of one torch operation
    environment: dict[str, str]  # on top of the driver's own
    imports: tuple[str, ...] = ()  # modules to import before anything is served
    role: str = "worker"  # what the program uses it for
    after: int = 0  # its incarnation must be later than this, even if the clock of its machine is behind


class WorkerHandle:
    """The life of one worker that was started: events in, state out. The launcher guards it with a lock of its own."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.pid: int | None = None
        self.address: WorkerAddress | None = None  # known once it listens
        self.host = ""  # name of its machine, for messages
        self.place: str | None = None  # what the scheduler calls the place that it runs in
        self.state = WorkerState.STARTING
        self.exit_reason: str | None = None  # e.g. "killed by SIGKILL"
        self._started_at = time.monotonic()
        self._ended_at: float | None = None

    def __repr__(self) -> str:
        return f"<WorkerHandle {self.info.name} pid={self.pid} {self.state.value}>"

    @property
    def uptime_s(self) -> float:
        """Seconds since it was started, until it ended."""
        return (self._ended_at or time.monotonic()) - self._started_at

    def on_process_made(self, pid: int) -> None:
        self.pid = pid

    def on_listening(self, address: WorkerAddress | None = None) -> None:
        self.address = address or self.address
        if self.state is WorkerState.STARTING:
            self.state = WorkerState.RUNNING

    def on_end_expected(self) -> None:
        """Record that the driver wants the worker to exit, so that it no longer counts as lost."""
        if not self.state.is_over:
            self.state = WorkerState.LEAVING

    def on_exited(self, reason: str) -> None:
        if not self.state.is_over:
            self.state = WorkerState.ENDED if self.state is WorkerState.LEAVING else WorkerState.LOST
            self.exit_reason = reason
            self._ended_at = time.monotonic()


def start_bar(num_workers: int) -> DelayedBar:
    """Return the progress bar of a start. A restart runs in a thread of the driver, and shows none."""
    is_shown = threading.current_thread() is threading.main_thread()
    return DelayedBar(
        f"starting {num_workers} worker{'s' if num_workers > 1 else ''}", count_columns, is_shown=is_shown
    )


OnLost = Callable[[WorkerHandle], None]


class Launcher(Protocol):
    """Starts and stops worker processes."""

    def start(self, specs: Sequence[WorkerSpec], on_lost: OnLost, timeout_s: float) -> Sequence[WorkerHandle]:
        """Start one worker per spec, wait until all of them listen, and return them in the same order.

        Can be called again, in any thread: with new names to add workers, or with the name of a worker that has exited to
        restart it, in its old place if that still exists. If one fails, the others of the same call are stopped.

        `on_lost` is called, in a thread of the launcher, for each worker that was ready and exits unexpectedly, after its
        handle was updated. It may be called before this returns.

        Raises:
            WorkerStartFailed: A worker did not become ready in time; the message includes the reason and its output.
        """

    def wait_exit(self, handle: WorkerHandle, timeout_s: float) -> bool:
        """Wait until the worker's process has exited; return False if it is still running after `timeout_s`."""

    def terminate(self, handles: Sequence[WorkerHandle], grace_s: float) -> bool:
        """Ask workers to shut down, and kill those that are still running after `grace_s`.

        Returns:
            Whether all have exited. One that cannot be killed, for instance because its machine does not respond, exits
            by itself when it finds that the driver has abandoned it.
        """

    def describe(self) -> str:
        """Return a readable description of what was started, and how; without secrets."""

    def close(self) -> None:
        """Kill every worker at once and release all resources. Idempotent."""
