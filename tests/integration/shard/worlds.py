"""The same checks in both worlds: on the ranks of a process group, and over RPC workers.

A check is a function ``check(world, ...)`` at the top of a test file. It makes sharded tensors with ``world.shard``,
computes, calls ``world.backward`` and compares with plain tensors. In a process group it runs on every rank; over RPC
workers it runs once, in the test's own process, inside a context.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import gradwire as gw
from closeness import assert_close
from gradwire.cluster.api import Cluster
from gradwire.rref import RRef
from gradwire.shard import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    Shard,
    ShardedTensor,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
)
from shard.groups import Ranks

Check = Callable[..., Any]


class World(ABC):
    """Where a check runs.

    Attributes:
        num_places: How many ranks or workers hold shards.
    """

    num_places: int

    @abstractmethod
    def placement(self, number: int) -> str: ...

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """From everybody's own loss, or from one that is the same for everybody."""

    @abstractmethod
    def own(self, batch: torch.Tensor) -> torch.Tensor:
        """This process's rows of a batch: uneven in a process group, all of them over RPC workers."""

    @abstractmethod
    def join(self, rows: torch.Tensor) -> torch.Tensor:
        """Everybody's rows as one batch again."""

    @abstractmethod
    def part_gradients(self, tensor: ShardedTensor) -> list[torch.Tensor | None]:
        """Of all shards, in the order of the metadata, dense; None where there is none."""

    @abstractmethod
    def gradient(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Of a plain tensor of this process."""

    def chunks(self, dim: int = 0) -> ChunkShardingSpec:
        return ChunkShardingSpec(dim, [self.placement(number) for number in range(self.num_places)])

    def blocks(self, *size: int) -> EnumerableShardingSpec:
        """Uneven blocks along two dimensions: place 0 has two of them, the last place has none (if there are over 2)."""
        rows, columns = max(1, size[0] // 3), max(1, size[1] // 4)
        last = 1 if self.num_places > 1 else 0
        return EnumerableShardingSpec(
            [
                ShardMetadata([0, 0], [rows, columns], self.placement(0)),
                ShardMetadata([0, columns], [rows, size[1] - columns], self.placement(last)),
                ShardMetadata([rows, 0], [size[0] - rows, size[1]], self.placement(0)),
            ]
        )

    def uneven(self, dim: int, *size: int) -> EnumerableShardingSpec:
        """Cut along one dimension into parts of 1, 2, ... and the rest, in reverse order of the places."""
        shards, start = [], 0
        for number in range(self.num_places):
            length = min(number + 1, size[dim] - start) if number < self.num_places - 1 else size[dim] - start
            offsets, sizes = [0] * len(size), list(size)
            offsets[dim], sizes[dim] = start, length
            shards.append(ShardMetadata(offsets, sizes, self.placement(self.num_places - 1 - number)))
            start += length
        return EnumerableShardingSpec(shards)

    def specs(self, *size: int) -> list[ShardingSpec]:
        """Even, uneven, along each dimension, in blocks."""
        specs: list[ShardingSpec] = [self.chunks(dim) for dim in range(len(size))]
        specs += [self.uneven(dim, *size) for dim in range(len(size))]
        return [*specs, self.blocks(*size)] if len(size) == 2 else specs

    def shard(self, tensor: torch.Tensor, spec: ShardingSpec, requires_grad: bool = False) -> ShardedTensor:
        made = spec.shard(tensor.detach().contiguous())
        return made.requires_grad_(requires_grad)  # type: ignore[return-value]

    def place(self, tensor: torch.Tensor, spec: ShardingSpec, requires_grad: bool = False) -> ShardedTensor:
        """What `shard` makes. Ranks do not talk to each other: for the operands of many calls that a check is about."""
        return self.shard(tensor, spec, requires_grad)

    @contextlib.contextmanager
    def fresh_gradients(self) -> Iterator[None]:
        """Over RPC workers, use a separate context for a case: look-ups of gradients in a shared one get slower."""
        yield

    def full_gradient(self, tensor: ShardedTensor) -> torch.Tensor:
        """The gradients of all shards as one plain tensor; zero where there is none."""
        full = torch.zeros(tensor.size(), dtype=tensor.dtype)
        for metadata, gradient in zip(tensor.metadata().shards_metadata, self.part_gradients(tensor), strict=True):
            if gradient is not None:
                full[_slices(metadata)] = gradient
        return full

    def assert_full_gradient(self, tensor: ShardedTensor, expected: torch.Tensor | None) -> None:
        """Assert that `full_gradient` is this one, which may be sparse, with the tolerances of its dtype."""
        assert expected is not None
        assert_close(self.full_gradient(tensor), _dense(expected))

    def assert_gradient(self, tensor: torch.Tensor, expected: torch.Tensor) -> None:
        """That a tensor got this gradient; sharded ones are looked at where that costs the least."""
        if not isinstance(tensor, ShardedTensor):
            assert_close(self.gradient(tensor), expected, rtol=1e-10, atol=1e-12)
        else:
            assert_close(self.full_gradient(tensor), expected, rtol=1e-10, atol=1e-12)


class GroupWorld(World):
    """A rank of a process group."""

    def __init__(self) -> None:
        self.num_places, self.rank = dist.get_world_size(), dist.get_rank()

    def placement(self, number: int) -> str:
        return f"rank:{number}/cpu"

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def own(self, batch: torch.Tensor) -> torch.Tensor:
        return batch[self._cuts(len(batch))[self.rank]]

    def _cuts(self, length: int) -> list[slice]:
        """The first rank has one row more than its share, so that ranks differ."""
        share = length // self.num_places
        ends = [share * (rank + 1) + 1 for rank in range(self.num_places - 1)] + [length]
        starts = [0, *ends[:-1]]
        return [slice(start, end) for start, end in zip(starts, ends, strict=True)]

    def join(self, rows: torch.Tensor) -> torch.Tensor:
        found: list[Any] = [None] * self.num_places
        dist.all_gather_object(found, rows.detach())
        return torch.cat(found)

    def part_gradients(self, tensor: ShardedTensor) -> list[torch.Tensor | None]:
        own = {
            tuple(shard.metadata.shard_offsets + shard.metadata.shard_sizes): _dense(shard.tensor.grad)
            for shard in tensor.local_shards()
        }
        everybody: list[Any] = [None] * self.num_places
        dist.all_gather_object(everybody, own)
        return [
            everybody[item.placement.rank()][tuple(item.shard_offsets + item.shard_sizes)]  # type: ignore[union-attr]
            for item in tensor.metadata().shards_metadata
        ]

    def gradient(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return tensor.grad

    def place(self, tensor: torch.Tensor, spec: ShardingSpec, requires_grad: bool = False) -> ShardedTensor:
        tensor = tensor.detach().contiguous()
        metadata = spec.build_metadata(tensor.size(), TensorProperties.create_from_tensor(tensor))
        own = [
            Shard(tensor[_slices(item)].clone(memory_format=torch.contiguous_format), item)
            for item in metadata.shards_metadata
            if item.placement.rank() == self.rank  # type: ignore[union-attr]
        ]
        made = ShardedTensor._init_from_local_shards_and_global_metadata(own, metadata, sharding_spec=spec)  # type: ignore[attr-defined]
        return made.requires_grad_(requires_grad)  # type: ignore[no-any-return]

    def assert_full_gradient(self, tensor: ShardedTensor, expected: torch.Tensor | None) -> None:
        whole = _dense(expected)
        assert whole is not None
        for shard in tensor.local_shards():  # every rank looks at its own
            gradient = _dense(shard.tensor.grad)
            found = torch.zeros(shard.tensor.size(), dtype=tensor.dtype) if gradient is None else gradient
            assert_close(found, whole[_slices(shard.metadata)])

    def assert_gradient(self, tensor: torch.Tensor, expected: torch.Tensor) -> None:
        if not isinstance(tensor, ShardedTensor):
            return super().assert_gradient(tensor, expected)
        for shard in tensor.local_shards():  # every rank looks at its own
            assert_close(_dense(shard.tensor.grad), expected[_slices(shard.metadata)], rtol=1e-10, atol=1e-12)
        return None


class WorkerWorld(World):
    """This process, which calls functions on RPC workers."""

    def __init__(self, num_places: int, context: Any) -> None:
        self.num_places, self.context = num_places, context

    def placement(self, number: int) -> str:
        return f"worker{number}/cpu"

    def backward(self, loss: torch.Tensor) -> None:
        self.context.backward(loss)

    @contextlib.contextmanager
    def fresh_gradients(self) -> Iterator[None]:
        outer = self.context
        try:
            with gw.autograd.context() as self.context:
                yield
        finally:
            self.context = outer

    def own(self, batch: torch.Tensor) -> torch.Tensor:
        return batch

    def join(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def part_gradients(self, tensor: ShardedTensor) -> list[torch.Tensor | None]:
        return [
            gw.rpc.rpc_sync(part.owner(), _gradient_of, args=(int(self.context), part))
            if isinstance(part, RRef)
            else self.gradient(part)
            for part in tensor._parts
        ]

    def gradient(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return _dense(self.context.gradients().get(tensor))


def _gradient_of(context_id: int, part: RRef[torch.Tensor]) -> torch.Tensor | None:
    with torch.no_grad():
        return _dense(gw.autograd.get_gradients(context_id).get(part.to_here()))


def _slices(metadata: ShardMetadata) -> tuple[slice, ...]:
    """Return the slices of the whole tensor that a shard covers."""
    box = zip(metadata.shard_offsets, metadata.shard_sizes, strict=True)
    return tuple(slice(start, start + length) for start, length in box)


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    if gradient._is_zerotensor():  # type: ignore[attr-defined]  # cannot be pickled
        return torch.zeros(gradient.size(), dtype=gradient.dtype)
    return gradient.to_dense() if gradient.is_sparse else gradient


def _check_rank(rank: int, check: Check, args: tuple[Any, ...]) -> Any:
    torch.manual_seed(0)
    return check(GroupWorld(), *args)


class Worlds:
    """Both worlds, on the workers of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.ranks = Ranks(cluster)

    def check(self, backend: str, num_places: int, check: Check, *args: Any) -> list[Any]:
        """Runs a check in one world; returns what it returned, on every rank or once."""
        if backend == "group":
            return self.ranks.run(_check_rank, check, args, num_ranks=num_places)
        torch.manual_seed(0)
        with gw.autograd.context() as context:
            return [check(WorkerWorld(num_places, context), *args)]
