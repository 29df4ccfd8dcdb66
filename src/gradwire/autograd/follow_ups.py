"""What follows a backward pass at once.

    without                                  with a follow-up
    root   CommitPass ------->  participant    root   step, with the commit inside ---->  participant
    root   step ------------->                                                            commits, steps
           <---------- stepped                        <------------------------- stepped

Whoever is going to be told something anyway is told with it that the pass is committed. Autograd does not know what follows:
`gradwire.optim` steps.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from gradwire.autograd.messages import CommitPass


class FollowUp(Protocol):
    """What one pass is followed by."""

    @property
    def ranks(self) -> frozenset[int]:
        """Workers that it is going to tell something: they hear of the commit from it."""

    def run(self, commit: CommitPass, ranks: Set[int]) -> None:
        """The pass is committed: does what follows, and tells those workers of the commit.

        If it raises, they are told of it once more; what has joined a context stays there.
        """


class FollowsBackward(Protocol):
    """What `backward` can be given to go on with: an optimizer."""

    def follow_backward(self, context_id: int) -> FollowUp:
        """What is to follow a pass in that context."""
