"""The seam between gradwire and what starts processes on other machines: Ray, Slurm, or the environment.

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

    place: str  # for people, e.g. "Ray node 10.0.0.4, bundle 3"

    def exchange(self, message: bytes, deadline: float) -> bytes:
        """Give the process a message and return its answer.

        Raises:
            WorkerStartFailed: The process ended; the text says how, with what it printed where that is known.
            TimeoutError: `deadline` (of `time.monotonic`) has passed.
        """

    def end_reason(self) -> str | None:
        """Return how the process ended, in words, or None as long as it runs or that is not known."""

    def kill(self) -> None:
        """End the process at once. May be called again."""


class Scheduler(Protocol):
    """Starts processes on the machines of a cluster."""

    def launch(self, count: int, deadline: float, replaces: RemoteProcess | None = None) -> Sequence[RemoteProcess]:
        """Start so many processes; `replaces` names the one whose place the new one takes, where that still exists.

        Raises:
            WorkerStartFailed: They cannot be placed by the deadline; says what is missing.
        """

    def bind_host(self) -> str:
        """Return the address of this machine that the others reach the driver at."""

    def describe(self) -> str:
        """Return exactly what was started: options of actors, the job script, addresses."""

    def close(self) -> None:
        """End every process and give back what was reserved. May be called again."""
