"""Which steps an owner has done, so that a request that comes twice is done once."""

from __future__ import annotations

import collections

from gradwire.errors import OptimizerError

MEMORY = 64
"""Steps that are remembered. Whoever repeats one has waited for it, so it is among the last few."""


class StepMemory:
    """The outcomes of the last steps, by id. Ids rise.

    Args:
        size: How many are remembered.
    """

    def __init__(self, size: int = MEMORY) -> None:
        self._size = size
        self._done: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._forgotten = -1  # the highest id that was dropped

    def find(self, step_id: int) -> int | None:
        """What came of a step; None if it is new.

        Raises:
            OptimizerError: It is so old that nobody knows.
        """
        found = self._done.get(step_id)
        if found is None and step_id <= self._forgotten:
            raise OptimizerError(f"step {step_id} was asked for so long ago that it cannot be told whether it was done")
        return found

    def add(self, step_id: int, outcome: int) -> None:
        """A step was done."""
        self._done[step_id] = outcome
        while len(self._done) > self._size:
            self._forgotten = max(self._forgotten, self._done.popitem(last=False)[0])
