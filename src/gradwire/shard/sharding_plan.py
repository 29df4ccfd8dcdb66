"""What is to be done to a module: which parameters are divided how, and what becomes of outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import nn

from gradwire.shard.sharder import Sharder
from gradwire.shard.sharding_spec import ShardingSpec


@dataclass
class ShardingPlan:
    """How `shard_module` is to shard a module.

        ShardingPlan(
            {"first.weight": columns, "second.weight": rows, "experts": MySharder()},
            output_plan={"experts": by_rows},
            return_local_tensor=["experts"],
        )

    Args:
        plan: Names of parameters, each with the spec that divides it; paths of submodules, each with a `Sharder`.
        output_plan: Paths of modules whose sharded output is to be divided by another spec; ``""`` is the module itself.
        return_local_tensor: Paths of modules whose sharded output is to become a plain tensor: in a process group what the
            rank has of it, over RPC workers all of it.
    """

    plan: dict[str, ShardingSpec | Sharder]
    output_plan: dict[str, ShardingSpec] | None = None
    return_local_tensor: list[str] | None = None


class ShardingPlanner(ABC):
    """Makes plans. `planner.BalancedPlanner` is one."""

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """How to shard a module."""
