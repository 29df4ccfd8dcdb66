"""The interface to schedulers that start processes on other machines: Ray, Slurm, or the environment.

A `Scheduler` starts processes that run `gradwire.cluster.remote_worker.RemoteWorker`: one `RemoteProcess` for each.
Its channel carries a few short messages while a worker starts (`gradwire.cluster.enrolment` has them): a certificate
request, the signed certificate, an address. They hold no secret. After that, gradwire's own connections carry everything.

`gradwire.cluster.remote_launcher` calls all of this, from several threads: `exchange` for many processes at once, and
`end_reason` ten times a second for each, so that it must not wait for anything. `launch` runs in the program's thread at
first, later in others. Ctrl-C is deferred in code of gradwire, so a wait in it goes through `gradwire._interrupts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class RemoteProcess(Protocol):
    """One process that a scheduler started for a worker."""

    place: str  # for messages, e.g. "Ray node 10.0.0.4, bundle 3"

    def exchange(self, message: bytes, deadline: float) -> bytes:
        """Send a message to the process and return its reply.

        Raises:
            WorkerStartFailed: The process exited; the message includes the reason and, if known, its output.
            TimeoutError: `deadline` (of `time.monotonic`) has passed.
        """

    def end_reason(self) -> str | None:
        """Return a description of how the process ended, or None while it runs or if that is not known."""

    def kill(self) -> None:
        """Kill the process. Idempotent."""


class Scheduler(Protocol):
    """Starts processes on the machines of a cluster."""

    def launch(self, count: int, deadline: float, replaces: RemoteProcess | None = None) -> Sequence[RemoteProcess]:
        """Start processes; `replaces` is the one whose place the new one takes, if that still exists.

        Raises:
            WorkerStartFailed: They cannot be placed by the deadline; the message says what is missing.
        """

    def bind_host(self) -> str:
        """Return the address of this machine that the others reach the driver at."""

    def describe(self) -> str:
        """Return a description of what was started: options of actors, the job script, addresses."""

    def close(self) -> None:
        """Kill every process and release all reservations. Idempotent."""
