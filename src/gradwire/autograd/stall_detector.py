"""Looks after a pass while somebody here waits for it: its deadline, whether it still moves, and the end of this worker.

Whoever waits looks: the thread that called backward, and runs of the local engine that stand still at a gate. The root
looks for all; other participants hear from it, and mind only their own deadline and their own worker's end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from gradwire.autograd._backward_state import PassSnapshot, is_stalled
from gradwire.autograd.explanation import Prober, waiting_text
from gradwire.autograd.functions import is_inside_run
from gradwire.autograd.messages import pass_id_of
from gradwire.errors import BackwardFailed, NotInitialized, RpcTimeout, UnsettledSend

if TYPE_CHECKING:
    from gradwire.autograd.backward_pass import BackwardPass
    from gradwire.rpc.agent import Agent


_SLICE_S = 0.2  # Ctrl-C is heard between two waits
_PROBE_AFTER_S = {True: 0.25, False: 2.0}  # by FAST: how long to wait before asking who waits for whom
_LAST_PROBE_S = 0.5  # when the time is over, nobody waits much longer for the answer to who was waited for
_HELP_S = 0.001  # how long a thread reads before it sleeps; it would not hear what others do for the pass meanwhile
_NEVER = float("inf")


class Fail(Protocol):
    """How the engine is told that a pass must end."""

    def __call__(self, current: BackwardPass, error: BaseException, operation: str) -> None: ...


class Watch:
    """What waiting threads of one pass on one worker share.

    Args:
        agent: The worker.
        prober: Asks the others.
        fail: Ends the pass.
        current: The pass.
    """

    def __init__(self, agent: Agent, prober: Prober, fail: Fail, current: BackwardPass) -> None:
        self._agent = agent
        self._prober = prober
        self._fail = fail
        self._pass = current
        self._lock = threading.Lock()  # guards the next three: one thread asks or ends the pass, others wait meanwhile
        self._next_probe = time.monotonic() + self._probe_interval_s if current.is_root else _NEVER
        self._deadline = current.deadline
        self._snapshots: dict[int, PassSnapshot] = {}

    @property
    def _probe_interval_s(self) -> float:
        return _PROBE_AFTER_S[self._pass.options.is_fast]

    def help(self, is_done: Callable[[], bool]) -> bool:
        """Reads what the next gradient is likely to come over, for a moment: that spares waking two threads.

        Returns:
            Whether anything came.
        """
        peer = self._pass.last_peer
        if peer is None or is_inside_run() or not _is_like_service_thread():
            return False
        own = self._pass.pass_id  # others' passes run their users' code, and have deadlines of their own
        name = self._prober.name_of(peer)
        # Until another worker is written to: the next gradient is likely to come from there then.
        is_enough = lambda: is_done() or self._pass.last_peer != peer  # noqa: E731
        return self._agent.server.take_notices(name, _HELP_S, is_enough, lambda note: pass_id_of(note) == own)

    def pause_s(self) -> float:
        """How long to wait before the next look."""
        return max(0.0, min(_SLICE_S, min(self._next_probe, self._deadline) - time.monotonic()))

    def look(self) -> None:
        """Ends the pass if it must end."""
        now = time.monotonic()
        if self._agent.is_closed:
            name = self._agent.info.name
            self._fail(self._pass, NotInitialized(f"worker {name} has shut down"), "waiting for the pass to end")
        elif now >= self._deadline:
            with self._lock:
                is_mine, self._deadline = now >= self._deadline, _NEVER
            if is_mine:
                self._time_out()
        elif now >= self._next_probe:
            with self._lock:
                is_mine, self._next_probe = now >= self._next_probe, _NEVER
            if is_mine:
                self._look_for_stall()
                self._next_probe = time.monotonic() + self._probe_interval_s

    def _time_out(self) -> None:
        text = f"the backward pass was not over after {self._pass.options.timeout_s:g} s"
        if self._pass.is_root:
            text += f"; {waiting_text(self._prober.probe(self._pass, _LAST_PROBE_S))}"
        error = RpcTimeout(text, self._agent.info.name, "run")
        self._fail(self._pass, error, "waiting for the pass to end")

    def _look_for_stall(self) -> None:
        left_s = max(0.0, self._deadline - time.monotonic())
        before, self._snapshots = self._snapshots, self._prober.probe(self._pass, left_s)
        if is_stalled(before, self._snapshots):
            self._fail(self._pass, self._describe_stall(), "waiting for gradients")

    def _describe_stall(self) -> BackwardFailed:
        snapshots = self._snapshots.values()
        worker = next((item.worker for item in snapshots if item.waiting), self._agent.info.name)
        if not self._pass.options.is_fast:
            text = f"nothing moves any more: {waiting_text(self._snapshots)}; please report this"
            return BackwardFailed(text, worker, "waiting for gradients")
        lines = tuple(str(send) for item in snapshots for send in item.waiting)
        text = (
            f"no gradient comes back for {'; '.join(lines)}: its result or argument has no part in the loss, which FAST "
            f'mode cannot cope with; use mode="smart", the default'
        )
        return UnsettledSend(text, worker, "waiting for gradients", lines)


def _is_like_service_thread() -> bool:
    """Whether torch is set up in this thread as in those that run passes otherwise."""
    return torch.is_grad_enabled() and not (
        torch.is_inference_mode_enabled() or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    )
