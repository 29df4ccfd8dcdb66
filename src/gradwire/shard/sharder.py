"""`Sharder`: shards a whole submodule in a way that a spec cannot express."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn


class Sharder(ABC):
    """Creates a sharded module from a plain one. A `ShardingPlan` has it as the entry of a submodule's path."""

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """Return the module that replaces `module`, everywhere in the sharded model.

        In a process group every rank calls it, in the order of the plan.
        """
