"""The seam between a cluster and what starts its processes.

A `Launcher` starts workers, knows when they end, and ends them. `gradwire.cluster.local_launcher` has the one for this
machine, `gradwire.cluster.remote_launcher` the one for all others, over a small `Scheduler`. Everything a cluster does with
a running worker goes through calls.
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
    after: int = 0  # its incarnation is to be later than that, even if the clock of its machine is behind


class WorkerHandle:
    """The life of one worker that was started: events in, state out. The launcher guards it with a lock of its own."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.pid: int | None = None
        self.address: WorkerAddress | None = None  # known once it listens
        self.host = ""  # name of its machine, for people
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
        """Note that the driver wants the worker to end: it does not count as lost any more."""
        if not self.state.is_over:
            self.state = WorkerState.LEAVING

    def on_exited(self, reason: str) -> None:
        if not self.state.is_over:
            self.state = WorkerState.ENDED if self.state is WorkerState.LEAVING else WorkerState.LOST
            self.exit_reason = reason
            self._ended_at = time.monotonic()


OnLost = Callable[[WorkerHandle], None]


class Launcher(Protocol):
    """Starts and ends worker processes."""

    def start(self, specs: Sequence[WorkerSpec], on_lost: OnLost, timeout_s: float) -> Sequence[WorkerHandle]:
        """Start one worker for each spec, wait until all of them listen, and return them in the same order.

        May be called again, in any thread: with new names to add workers, and with the name of a worker that has ended to
        start it again, where it was if that place still exists. If one fails, those of the same call are ended, too.

        `on_lost` is called, in a thread of the launcher, for each that was ready and ends without being asked to. Its
        handle says so by then. It may be called before this returns.

        Raises:
            WorkerStartFailed: A worker did not get ready in time; says why, with what it printed.
        """

    def wait_exit(self, handle: WorkerHandle, timeout_s: float) -> bool:
        """Wait until that worker's process is gone; return False if it is still there after `timeout_s`."""

    def terminate(self, handles: Sequence[WorkerHandle], grace_s: float) -> bool:
        """Ask workers to leave, and end by force those that are still there after `grace_s`.

        Returns:
            Whether all are gone. One that cannot be ended, because its machine does not answer for instance, ends itself
            when it finds that the driver has given it up.
        """

    def describe(self) -> str:
        """Return what was started, and how, in lines for people; without secrets."""

    def close(self) -> None:
        """End every worker at once and free everything. May be called again."""
