"""`Sharder`: shards a whole submodule in a way that a spec cannot express."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn


class Sharder(ABC):
    """Makes a sharded module of a plain one. In a `ShardingPlan` it stands beside the path of the submodule."""

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """Return the module that takes the place of `module`, everywhere the sharded model has it.

        In a process group every rank calls it, in the order of the plan.
        """
