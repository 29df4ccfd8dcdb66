"""Events of a backward pass on one worker, while it is observed (`gradwire.observe`).

root         backward [ join  local_engine  gradients -->  wait [ --> gradients [ local_engine ] ]  commit ]
participant                                 --> gradients [ join  local_engine [ gradients --> ] ]  commit
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradwire.observe.events import gradient_flow, tell, thread_id

if TYPE_CHECKING:
    from gradwire.autograd.backward_pass import BackwardPass
    from gradwire.autograd.messages import GradientItem, PropagateGradients


class PassTrace:
    """Tells what happens to one pass on one worker, beginning with its join, which ends now.

    Args:
        began_ns: When the worker began to join the pass.
    """

    __slots__ = ("_began_ns", "_commit_ns", "_committed_ns", "_context_id", "_pass_id", "_thread", "_worker")

    def __init__(self, worker: str, current: BackwardPass, began_ns: int) -> None:
        self._worker = worker
        self._context_id = current.context.context_id
        self._pass_id = current.pass_id
        self._began_ns = began_ns
        self._thread = thread_id() if current.is_root else 0
        self._commit_ns = self._committed_ns = 0
        self.tell("join", "join", began_ns, details={"num_sends": len(current.sends), "num_recvs": len(current.recvs)})

    def tell(self, kind: str, name: str, start_ns: int, **fields: Any) -> None:
        """Tell of a part of the pass that ends now, in this thread."""
        tell(kind, name, self._worker, start_ns, context_id=self._context_id, **fields)

    def tell_sent(
        self, peer: str, items: Sequence[GradientItem], tensors: Sequence[torch.Tensor], start_ns: int
    ) -> None:
        """Tell that gradients, or the news that there are none, are on their way to another worker."""
        self.tell("gradients", "send", start_ns, peer=peer, flow_out=self._flows(items), num_bytes=_num_bytes(tensors))

    def tell_received(
        self, peer: str, message: PropagateGradients, tensors: Sequence[torch.Tensor], start_ns: int
    ) -> None:
        """Tell that gradients were taken, and all that followed from them was done."""
        flows, num_bytes = self._flows(message.items), _num_bytes(tensors)
        self.tell("gradients", "receive", start_ns, peer=peer, flow_in=flows, num_bytes=num_bytes)

    def _flows(self, items: Sequence[GradientItem]) -> tuple[int, ...]:
        return tuple([gradient_flow(self._pass_id, item.message_id) for item in items])

    def note_commit(self) -> None:
        self._commit_ns = time.monotonic_ns()

    def note_committed(self) -> None:
        self._committed_ns = time.monotonic_ns()

    def tell_ended(self, current: BackwardPass, error: BaseException | None = None) -> None:
        """Tell how the pass has ended here. Not to be called under its lock."""
        if self._committed_ns:
            self.tell("commit", "commit", self._commit_ns, end_ns=self._committed_ns, details=None)
        is_root = current.is_root
        details = {
            "mode": "fast" if current.options.is_fast else "smart",
            "role": "root" if is_root else "participant",
            "pass_id": self._pass_id,
        }
        if is_root:
            details["num_participants"] = len(current.followers)
        outcome = "ok" if error is None else type(error).__name__
        self.tell("backward", "backward", self._began_ns, thread=self._thread, outcome=outcome, details=details)


def _num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.layout is torch.strided)
