"""Checks a pass while threads here wait for it: its deadline, whether it is stalled, and whether this worker has shut down.

The waiting threads run the checks: the one that called backward, and runs of the local engine that are blocked at a
gate. Only the root looks for stalls, and tells the others; they check only their own deadline and shutdown.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from gradwire.autograd._backward_state import PassSnapshot, is_stalled
from gradwire.autograd.explanation import Prober, waiting_text
from gradwire.errors import BackwardFailed, NotInitialized, RpcTimeout, UnsettledSend
from gradwire.observe.log import get_logger
from gradwire.wire.exceptions import clean

if TYPE_CHECKING:
    from gradwire.autograd.backward_pass import BackwardPass
    from gradwire.rpc.agent import Agent


_SLICE_S = 0.2  # how often to check whether this worker has shut down
_PROBE_AFTER_S = {True: 0.25, False: 2.0}  # by FAST: how long to wait before the first probe
_LAST_PROBE_S = 0.5  # how long the probe after a timeout may take
LONG_WAIT_S = 10.0  # without a change, until that is logged
_NEVER = float("inf")
_log = get_logger(__name__)

Problem = tuple[Exception, str]
"""Why a pass must end, and what failed."""


class StallDetector:
    """State that the waiting threads of one pass on one worker share."""

    def __init__(self, agent: Agent, prober: Prober, current: BackwardPass) -> None:
        self._agent = agent
        self._prober = prober
        self._pass = current
        self._lock = threading.Lock()  # guards the next three: one thread asks or ends the pass, others wait meanwhile
        self._interval_s = _PROBE_AFTER_S[current.options.is_fast]
        self._next_probe = time.monotonic() + self._interval_s if current.is_root else _NEVER
        self._deadline = current.deadline
        self._snapshots: dict[int, PassSnapshot] = {}
        self._unchanged_since = time.monotonic()  # for the thread that asks

    def pause_s(self) -> float:
        return max(0.0, min(_SLICE_S, min(self._next_probe, self._deadline) - time.monotonic()))

    def look(self) -> Problem | None:
        """Return why the pass must end, if it must."""
        now = time.monotonic()
        if self._agent.is_closed:
            return NotInitialized(f"worker {self._agent.info.name} has shut down"), "waiting for the pass to end"
        if now >= self._deadline:
            with self._lock:
                is_mine, self._deadline = now >= self._deadline, _NEVER
            return self._time_out() if is_mine else None
        if now >= self._next_probe:
            with self._lock:
                is_mine, self._next_probe = now >= self._next_probe, _NEVER
            if is_mine:
                problem = self._find_stall()
                self._next_probe = time.monotonic() + self._interval_s
                return problem
        return None

    def _time_out(self) -> Problem:
        text = f"the backward pass timed out after {self._pass.options.timeout_s:g} s"
        if self._pass.is_root:
            text += f"; {waiting_text(self._prober.probe(self._pass, _LAST_PROBE_S))}"
        return RpcTimeout(text, self._agent.info.name, "run"), "waiting for the pass to end"

    def _find_stall(self) -> Problem | None:
        left_s = max(0.0, self._deadline - time.monotonic())
        before, self._snapshots = self._snapshots, self._prober.probe(self._pass, left_s)
        self._report_no_progress(before, time.monotonic())
        return (self._describe_stall(), "waiting for gradients") if is_stalled(before, self._snapshots) else None

    def _report_no_progress(self, before: dict[int, PassSnapshot], now: float) -> None:
        """Log once what a pass waits for in which nothing has changed for long, although it is not deadlocked."""
        if before != self._snapshots:
            self._unchanged_since = now
        elif now - self._unchanged_since >= LONG_WAIT_S:
            self._unchanged_since = _NEVER
            _log.warning(
                "the backward pass has made no progress for %.0f s: %s. "
                "gradwire.autograd.explain(%d) shows more, and so does `gradwire top` for a Cluster",
                LONG_WAIT_S,
                clean(waiting_text(self._snapshots)),
                self._pass.context.context_id,
            )

    def _describe_stall(self) -> BackwardFailed:
        snapshots = self._snapshots.values()
        worker = next((item.worker for item in snapshots if item.waiting), self._agent.info.name)
        if not self._pass.options.is_fast:
            text = f"the backward pass is deadlocked: {waiting_text(self._snapshots)}; please report this"
            return BackwardFailed(text, worker, "waiting for gradients")
        lines = tuple(str(send) for item in snapshots for send in item.waiting)
        text = (
            f"no gradient will arrive for {'; '.join(lines)}: a result or argument that does not contribute to the loss is "
            'not supported in FAST mode; use mode="smart", the default'
        )
        return UnsettledSend(text, worker, "waiting for gradients", lines)
