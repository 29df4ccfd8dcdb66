"""``.grad`` of leaves that holds something else for a moment: one user of a leaf at a time.

Steps of optimizers lend it the gradients of their contexts, and hooks that run at the end of a pass see the gradients of
that pass there. What was in it before is there again afterwards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import torch

_changed = threading.Condition()  # guards `_users`
_users: dict[int, int] = {}  # which thread uses `.grad`, by id of the leaf


class GradClaim:
    """A lock on ``.grad`` of some leaves, all at once, so no two claims wait for each other. Reentrant in a thread.

    Args:
        leaves: The leaves; kept until the lock is gone.
    """

    __slots__ = ("_leaves", "_taken")

    def __init__(self, leaves: Iterable[torch.Tensor]) -> None:
        self._leaves = list(leaves)
        self._taken: set[int] = set()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; as `threading.Lock.acquire`."""
        own, wanted = threading.get_ident(), set(map(id, self._leaves))
        until = time.monotonic() + timeout if timeout >= 0 else None
        with _changed:
            while any(_users[item] != own for item in wanted & _users.keys()):
                left_s = None if until is None else until - time.monotonic()
                if not blocking or (left_s is not None and left_s <= 0):
                    return False
                _changed.wait(left_s)
            self._taken = wanted - _users.keys()
            _users.update(dict.fromkeys(self._taken, own))
        return True

    def release(self) -> None:
        """Give the lock back, but for leaves that an outer claim of this thread has."""
        with _changed:
            for item in self._taken:
                del _users[item]
            self._taken = set()
            _changed.notify_all()

    @property
    def is_nested(self) -> bool:
        """Whether this thread has claimed one of the leaves already, and is asking again from inside."""
        with _changed:
            return any(_users.get(id(leaf)) == threading.get_ident() for leaf in self._leaves)
