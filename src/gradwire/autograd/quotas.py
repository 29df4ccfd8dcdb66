"""How much memory other workers make this one keep for autograd.

A message of a hundred bytes can make a context, a record in a context or a backward pass, each of which takes kilobytes and
stays until the context is released. Each worker has a budget for what its messages make (`Limits.autograd_bytes`). The
amounts are estimates, rounded up.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from gradwire.errors import LimitExceeded

if TYPE_CHECKING:
    from gradwire.autograd.context import DistAutogradContext

CONTEXT_BYTES: Final = 4096
MESSAGE_BYTES: Final = 2048
PASS_BYTES: Final = 8192
PASS_BYTES_PER_MESSAGE: Final = 256
"""A pass looks at every message of its context."""
ENDED_PASS_BYTES: Final = 256
"""Stays until the context is released: late messages must not begin the pass again."""


class Quotas:
    """What each worker has used of its budget.

    Args:
        own: This worker's rank, whose own messages are not counted.
        limit_bytes: The budget of every other worker.
    """

    def __init__(self, own: int, limit_bytes: int) -> None:
        self._own = own
        self._limit = limit_bytes
        self._lock = threading.Lock()  # guards the table below and the `charges` of all contexts
        self._used: dict[int, int] = {}

    def charge(self, worker: int, context: DistAutogradContext, num_bytes: int) -> None:
        """Count memory that a worker's message is about to take, until the context is released.

        Raises:
            LimitExceeded: The worker has used up its budget.
        """
        if worker == self._own:
            return
        with self._lock:
            if context.charges is None:  # released: nothing is kept
                return
            used = self._used.get(worker, 0) + num_bytes
            if used > self._limit:
                raise LimitExceeded(
                    f"the autograd contexts, messages and backward passes of worker {worker} would take more than "
                    f"{self._limit} bytes here (Limits.autograd_bytes). Release contexts that are no longer needed, or "
                    f"raise that limit on rank {self._own}"
                )
            self._used[worker] = used
            context.charges[worker] = context.charges.get(worker, 0) + num_bytes

    def charge_pass(self, worker: int, context: DistAutogradContext) -> Callable[[], None]:
        """Count a pass that a worker begins here; returns what to call at its end.

        Raises:
            LimitExceeded: The worker has used up its budget.
        """
        num_bytes = PASS_BYTES + PASS_BYTES_PER_MESSAGE * len(context.exchanges)
        self.charge(worker, context, num_bytes + ENDED_PASS_BYTES)
        return functools.partial(self.refund, worker, context, num_bytes)

    def refund(self, worker: int, context: DistAutogradContext, num_bytes: int) -> None:
        """Give back part of what was charged, because it ended before its context."""
        if worker == self._own:
            return
        with self._lock:
            if context.charges is not None:
                context.charges[worker] -= num_bytes
                self._give_back(worker, num_bytes)

    def settle(self, context: DistAutogradContext) -> None:
        """Give back all that was charged for a context, which was released."""
        with self._lock:
            charges, context.charges = context.charges, None
            for worker, num_bytes in (charges or {}).items():
                self._give_back(worker, num_bytes)

    def used_by(self, worker: int) -> int:
        """Return how many bytes of its budget a worker has used."""
        with self._lock:
            return self._used.get(worker, 0)

    def _give_back(self, worker: int, num_bytes: int) -> None:
        self._used[worker] -= num_bytes
        if not self._used[worker]:
            del self._used[worker]
