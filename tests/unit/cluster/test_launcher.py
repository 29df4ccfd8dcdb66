"""The life of a worker, as the launcher's events move it."""

from __future__ import annotations

import pytest

from gradwire.cluster.launcher import WorkerHandle, WorkerState
from gradwire.types import WorkerInfo


def handle_in(state: WorkerState) -> WorkerHandle:
    handle = WorkerHandle(WorkerInfo("w", 0))
    handle.state = state
    return handle


@pytest.mark.parametrize(
    ("state", "listening", "end_expected", "exited"),
    [
        (WorkerState.STARTING, WorkerState.RUNNING, WorkerState.LEAVING, WorkerState.LOST),
        (WorkerState.RUNNING, WorkerState.RUNNING, WorkerState.LEAVING, WorkerState.LOST),
        (WorkerState.LEAVING, WorkerState.LEAVING, WorkerState.LEAVING, WorkerState.ENDED),
        (WorkerState.ENDED, WorkerState.ENDED, WorkerState.ENDED, WorkerState.ENDED),
        (WorkerState.LOST, WorkerState.LOST, WorkerState.LOST, WorkerState.LOST),
    ],
)
def test_every_event_in_every_state(
    state: WorkerState, listening: WorkerState, end_expected: WorkerState, exited: WorkerState
) -> None:
    (ready := handle_in(state)).on_listening()
    (leaving := handle_in(state)).on_end_expected()
    (gone := handle_in(state)).on_exited("exited with code 0")
    assert (ready.state, leaving.state, gone.state) == (listening, end_expected, exited)
    assert gone.exit_reason == (None if state.is_over else "exited with code 0")


def test_the_first_end_counts() -> None:
    handle = WorkerHandle(WorkerInfo("w", 0))
    handle.on_process_made(4711)
    assert repr(handle) == "<WorkerHandle w pid=4711 starting>"
    handle.on_exited("killed by SIGKILL")
    uptime_s = handle.uptime_s
    handle.on_exited("killed because the fork server exited")
    assert (handle.exit_reason, handle.uptime_s) == ("killed by SIGKILL", uptime_s)
