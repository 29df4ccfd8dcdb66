"""Plans for sharding a module: which parameters are sharded how, and how outputs are converted.

`BalancedPlanner` shards large parameters so that every place gets its share of the bytes. It shards parameters that sharded
tensors can compute with, in such a way that the module still takes and returns plain tensors:

    Linear, activation, Linear    the first by rows of its weight, the second by columns: what is between them stays divided,
                                  and nothing moves but the sums at the end
    any other Linear              by columns of its weight
    Embedding, EmbeddingBag       by rows, unless a Linear has the same weight

Everything else, and everything small, is not sharded. No messages are sent, so a plan can be built anywhere, also for a
module on the ``meta`` device.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradwire._torch import children_of
from gradwire.shard.layout import whole
from gradwire.shard.metadata import ShardMetadata
from gradwire.shard.sharder import Sharder
from gradwire.shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec, as_placement


@dataclass
class ShardingPlan:
    """Tells `shard_module` how to shard a module.

    Example::

        ShardingPlan(
            {"first.weight": columns, "second.weight": rows, "experts": MySharder()},
            output_plan={"experts": by_rows},
            return_local_tensor=["experts"],
        )

    Args:
        plan: Names of parameters, each with its spec; paths of submodules, each with a `Sharder`.
        output_plan: Paths of modules with a new spec for their sharded output; ``""`` is the module itself.
        return_local_tensor: Paths of modules whose sharded output becomes a plain tensor: in a process group the local
            shard, over RPC workers the whole tensor.
    """

    plan: dict[str, ShardingSpec | Sharder]
    output_plan: dict[str, ShardingSpec] | None = None
    return_local_tensor: list[str] | None = None


class ShardingPlanner(ABC):
    """Base of planners, such as `BalancedPlanner`."""

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """Return a plan for a module."""


_ELEMENTWISE = (
    nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus,
    nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardswish,
)  # fmt: skip
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Unit:
    """Parameters that are cut at the same lengths."""

    parts: tuple[tuple[str, torch.Tensor, int], ...]  # name, parameter, and the dimension along which it is cut

    @property
    def length(self) -> int:
        _, tensor, dim = self.parts[0]
        return tensor.size(dim)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for _, tensor, _ in self.parts)


class BalancedPlanner(ShardingPlanner):
    """Shards large parameters so that each place gets its share of the bytes.

    Example::

        plan = BalancedPlanner([f"rank:{rank}/cpu" for rank in range(4)]).build_plan(model)

    Args:
        placements: Placements of shards: ``"rank:0/cpu"`` and so on, or ``"worker0/cpu"`` and so on.
        min_bytes: Smaller parameters are not sharded; for a pair, the sum counts.
        capacities: Relative shares of the placements; equal by default.
        pairs: Pairs of paths of Linear modules where the output of the first reaches the second through elementwise
            functions only. Pairs inside `nn.Sequential` are found automatically.

    Raises:
        ValueError: There are no placements, one is named twice, or capacities do not fit.
    """

    def __init__(
        self,
        placements: Sequence[Any],
        min_bytes: int = 2**20,
        capacities: Sequence[float] | None = None,
        pairs: Sequence[Pair] = (),
    ) -> None:
        self.placements = [as_placement(item) for item in placements]
        self.min_bytes, self.pairs = min_bytes, list(pairs)
        capacities = list(capacities) if capacities is not None else [1.0] * len(self.placements)
        if not self.placements or len({str(item) for item in self.placements}) < len(self.placements):
            raise ValueError(f"a planner needs one or more distinct placements, not {[str(p) for p in placements]}")
        if len(capacities) != len(self.placements) or any(item < 0 for item in capacities) or not sum(capacities):
            raise ValueError(f"capacities must be one number >= 0 for each of {len(self.placements)} placements")
        self.shares = [item / sum(capacities) for item in capacities]

    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """Return a plan for a module, with the largest parameters first.

        Raises:
            AttributeError: The module has no submodule that a pair names.
            TypeError: A pair names something that is not a Linear.
            ValueError: The two of a pair do not fit together.
        """
        plan: dict[str, Any] = {}
        loads = [0.0] * len(self.placements)
        units = [unit for unit in self._units(module) if unit.num_bytes >= self.min_bytes]
        for unit in sorted(units, key=lambda item: -item.num_bytes):
            lengths = divide_length(unit.length, self.shares, loads)
            for name, tensor, dim in unit.parts:
                plan[name] = self._spec(tensor.size(), dim, lengths)
            for number, length in enumerate(lengths):
                loads[number] += unit.num_bytes * length / unit.length
        return ShardingPlan(plan)

    def _spec(self, size: Sequence[int], dim: int, lengths: Sequence[int]) -> ShardingSpec:
        if len(set(lengths)) == 1:
            return ChunkShardingSpec(dim, list(self.placements))
        starts = itertools.accumulate(lengths, initial=0)
        boxes = [whole(size).with_range(dim, *item) for item in zip(starts, lengths, strict=False)]
        shards = zip(boxes, self.placements, strict=True)
        return EnumerableShardingSpec([ShardMetadata(box.offsets, box.sizes, place) for box, place in shards])

    def _units(self, module: nn.Module) -> Iterator[_Unit]:
        """Yield what can be divided, each parameter once."""
        taken: set[int] = set()
        tied = _find_tied(module)
        for first, second in [*self._named_pairs(module), *_pairs_in(module)]:
            weights: list[Any] = [module.get_submodule(path).weight for path in (first, second)]
            if not any(id(weight) in taken | tied for weight in weights):
                taken.update(id(weight) for weight in weights)
                yield _Unit(((f"{first}.weight", weights[0], 0), (f"{second}.weight", weights[1], 1)))
        for kinds, dim in (((nn.Linear,), 1), (_EMBEDDINGS, 0)):  # of a weight that is tied, the Linear decides
            for path, item in module.named_modules():
                if type(item) in kinds and id(item.weight) not in taken:
                    taken.add(id(item.weight))
                    yield _Unit(((f"{path}.weight" if path else "weight", item.weight, dim),))

    def _named_pairs(self, module: nn.Module) -> list[Pair]:
        for pair in self.pairs:
            found = [module.get_submodule(path) for path in pair]
            if not all(isinstance(item, nn.Linear) for item in found):
                raise TypeError(f"a pair must be two Linear modules, not {[type(item).__name__ for item in found]}")
            if found[0].out_features != found[1].in_features:
                raise ValueError(f"the output size of {pair[0]} does not match the input size of {pair[1]}")
        return self.pairs


def divide_length(length: int, shares: Sequence[float], loads: Sequence[float]) -> list[int]:
    """Divide a length into whole numbers in proportion to `shares`, which add up to 1.

    The remainder goes to those with the smallest of the `loads` so far.
    """
    found = [int(share * length + 1e-9) for share in shares]
    takers = [number for number, share in enumerate(shares) if share > 0]
    takers.sort(key=lambda number: (loads[number] / shares[number], number))
    for position in range(length - sum(found)):
        found[takers[position % len(takers)]] += 1
    return found


def _find_tied(module: nn.Module) -> set[int]:
    """Return the ids of weights that are in the module in several places: a pair would divide them in different ways."""
    modules = module.named_modules(remove_duplicate=False)
    places = Counter(id(parameter) for _, item in modules for parameter in item.parameters(recurse=False))
    return {number for number, count in places.items() if count > 1}


def _pairs_in(module: nn.Module) -> Iterator[Pair]:
    """Yield paths of Linear modules that follow each other in `nn.Sequential`, with elementwise functions between them."""
    inner = {id(child) for item in module.modules() if type(item) is nn.Sequential for child in item.children()}
    for path, item in module.named_modules():
        if type(item) is nn.Sequential and id(item) not in inner:
            yield from _pairs_of_chain(list(_chain(path, item)))


def _chain(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield what a Sequential runs one after the other; Sequentials inside it are part of it."""
    for name, child in children_of(module).items():
        inside = f"{path}.{name}" if path else name
        if type(child) is nn.Sequential:
            yield from _chain(inside, child)
        elif child is not None:
            yield inside, child


def _pairs_of_chain(chain: Sequence[tuple[str, nn.Module]]) -> Iterator[Pair]:
    first: tuple[str, nn.Linear] | None = None
    for path, item in chain:
        if type(item) is nn.Linear:
            if first is not None and first[1].out_features == item.in_features and first[1].weight is not item.weight:
                yield first[0], path
                first = None
            else:
                first = path, item
        elif not isinstance(item, _ELEMENTWISE):
            first = None
