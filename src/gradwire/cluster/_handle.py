"""One worker process of this machine: its state, and the descriptors through which the driver sees it."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass, field

from gradwire.cluster._control import make_pair
from gradwire.cluster._output import Stream, WorkerOutput
from gradwire.cluster._status import rss_of
from gradwire.cluster.launcher import OnLost, WorkerState
from gradwire.types import WorkerInfo


@dataclass(slots=True)
class WorkerChannels:
    """The driver's ends: two pipes to read and the lifeline."""

    lifeline: socket.socket
    pipes: dict[Stream, int] = field(default_factory=dict)

    def close(self) -> None:
        """Closes all of them. May be called again."""
        self.lifeline.close()
        while self.pipes:
            os.close(self.pipes.popitem()[1])


def make_channels() -> tuple[WorkerChannels, tuple[int, int, int]]:
    """Makes the channels for one worker.

    Returns:
        The driver's ends, and the worker's (stdout, stderr, lifeline), which the caller closes once they are sent.
    """
    with contextlib.ExitStack() as undo:
        ours, theirs = make_pair()
        ours.setblocking(False)  # the supervisor serves many workers and must not wait for one
        channels = WorkerChannels(ours)
        undo.callback(channels.close)
        undo.callback(theirs.close)
        writers: list[int] = []
        for stream in ("stdout", "stderr"):
            channels.pipes[stream], writer = os.pipe2(os.O_CLOEXEC)
            undo.callback(os.close, writer)
            os.set_blocking(channels.pipes[stream], False)
            writers.append(writer)
        undo.pop_all()
    return channels, (writers[0], writers[1], theirs.detach())


class LocalHandle:
    """A worker process, as a `WorkerHandle`. One method for each event; the supervisor's condition guards it."""

    def __init__(self, info: WorkerInfo, ticket: int, channels: WorkerChannels, on_lost: OnLost) -> None:
        self._info = info
        self._pid: int | None = None
        self._state = WorkerState.STARTING
        self._exit_reason: str | None = None
        self._started_at = time.monotonic()
        self._ended_at: float | None = None
        self.ticket = ticket
        self.channels = channels
        self.on_lost = on_lost
        self.output = WorkerOutput(info.name, info.id)

    def __repr__(self) -> str:
        return f"<LocalHandle {self._info.name} pid={self._pid} {self._state.value}>"

    @property
    def info(self) -> WorkerInfo:
        """Name and rank."""
        return self._info

    @property
    def pid(self) -> int | None:
        """Process id, or None while there is none yet."""
        return self._pid

    @property
    def state(self) -> WorkerState:
        """Where it is in its life."""
        return self._state

    @property
    def exit_reason(self) -> str | None:
        """How the process ended; None while it runs."""
        return self._exit_reason

    @property
    def uptime_s(self) -> float:
        """Seconds since it was started, until it ended."""
        return (self._ended_at or time.monotonic()) - self._started_at

    def rss_bytes(self) -> int | None:
        """Memory the process has resident now, or None when it is gone."""
        return None if self._pid is None or self._state.is_over else rss_of(self._pid)

    def on_forked(self, pid: int) -> None:
        """The template has made the process."""
        self._pid = pid

    def on_listening(self) -> None:
        """The worker can be called."""
        if self._state is WorkerState.STARTING:
            self._state = WorkerState.RUNNING

    def on_end_expected(self) -> None:
        """The driver wants it to end; its end is no loss from now on."""
        if not self._state.is_over:
            self._state = WorkerState.LEAVING

    def on_exited(self, reason: str) -> None:
        """The process is gone."""
        if not self._state.is_over:
            self._state = WorkerState.ENDED if self._state is WorkerState.LEAVING else WorkerState.LOST
            self._exit_reason = reason
            self._ended_at = time.monotonic()
