"""The seam between a cluster and whatever starts its processes.

A `Launcher` starts workers, knows when they end, and ends them. `gradwire.cluster.local` has the one for this
machine; one for torchrun or Ray needs these four methods and nothing else, because everything a cluster does with a
running worker goes through calls.
"""

from __future__ import annotations

import enum
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


class WorkerHandle(Protocol):
    """A worker that was started."""

    @property
    def info(self) -> WorkerInfo:
        """Name and rank."""

    @property
    def pid(self) -> int | None:
        """Process id, or None while there is none yet."""

    @property
    def state(self) -> WorkerState:
        """Where it is in its life."""

    @property
    def exit_reason(self) -> str | None:
        """How the process ended, e.g. ``killed by SIGKILL``; None while it runs."""

    @property
    def uptime_s(self) -> float:
        """Seconds since it was started, until it ended."""

    def rss_bytes(self) -> int | None:
        """Memory the process has resident now, or None where that cannot be known."""


OnLost = Callable[[WorkerHandle], None]


class Launcher(Protocol):
    """Starts and ends worker processes."""

    def start(self, specs: Sequence[WorkerSpec], on_lost: OnLost, timeout_s: float) -> Sequence[WorkerHandle]:
        """Starts one worker for each spec and waits until all of them listen.

        Args:
            specs: The workers.
            on_lost: Called, in a thread of the launcher, for each that was ready and ends without being asked to.
            timeout_s: Time for all of them together.

        Raises:
            WorkerStartFailed: One ended first, or `timeout_s` passed; the message carries what it printed.
        """

    def wait_exit(self, handle: WorkerHandle, timeout_s: float) -> bool:
        """Waits until that worker's process is gone; False if it is still there after `timeout_s`."""

    def terminate(self, handles: Sequence[WorkerHandle], grace_s: float) -> None:
        """Asks workers to leave, and ends by force those that are still there after `grace_s`."""

    def close(self) -> None:
        """Ends every worker at once and frees everything. May be called again."""
