"""Parts on the ranks of a process group: every rank runs the same program.

Backward needs everybody, too: the gradient of what was moved comes from the ranks that it was moved to. Autograd runs the
nodes of a graph in the order in which they were made, last first, and all ranks have made the same; so every rank meets the
others in the same order there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradwire.shard import group_asking, moving
from gradwire.shard.engines import Engine, Part, Question
from gradwire.shard.layouts import Layout, everywhere, for_everybody, whole
from gradwire.shard.talking import talking


class GroupEngine(Engine):
    """The engine of a process group.

    A rank outside of the group can have the engine, too: it knows the tensor, has no part of it, and exchanges nothing.

    Args:
        group: The process group; None for the default one. Outside of it, what `torch.distributed.new_group` returns there.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupEngine) and other._group is self._group

    def __hash__(self) -> int:
        return hash(id(self._group))

    @property
    def _group(self) -> Any:
        return dist.group.WORLD if self.group is None else self.group

    @property
    def is_member(self) -> bool:
        """Whether this rank is in the group."""
        return self.here >= 0

    def _check_member(self) -> None:
        if not self.is_member:
            raise RuntimeError(
                "this rank is not in the process group of the sharded tensor, so it has no part of it and cannot take part "
                "in operations of its members; call them on the members only"
            )

    @property
    def here(self) -> int:
        """The rank in the group; -1 outside of it."""
        return dist.get_rank(self.group)

    @property
    def askers(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(range(dist.get_world_size(self.group)))

    def complete(self, layout: Layout) -> Layout:
        """With an empty box for each rank that has none."""
        return for_everybody(layout, self.askers)

    def numbers(self, layout: Layout) -> list[int]:
        """Those of this rank."""
        return layout.of(self.here)

    def run(
        self, function: Callable[..., Any], layout: Layout, *columns: Sequence[Any], **constants: Any
    ) -> list[Part]:
        """The function of each of this rank's parts."""
        return [function(*arguments, **constants) for arguments in zip(*columns, strict=True)]

    def move(
        self, parts: Sequence[Part], old: Layout, new: Layout, like: torch.Tensor, is_sum: bool = False
    ) -> list[Part]:
        """Every rank sends the others what they are to have of its parts."""
        if (old == new and not is_sum) or not self.is_member:
            return list(parts)
        return list(_Move.apply(self.group, old, new, like, is_sum, *parts))  # type: ignore[no-untyped-call]

    def replicate(
        self, parts: Sequence[Part], layout: Layout, size: Sequence[int], like: torch.Tensor, is_sum: bool = False
    ) -> torch.Tensor:
        """Every rank sends its parts to all others."""
        self._check_member()
        target = everywhere(size, self.askers)
        found: torch.Tensor = _Replicate.apply(self.group, layout, target, like, is_sum, *parts)  # type: ignore[no-untyped-call]
        return found

    def divide(self, tensor: torch.Tensor, layout: Layout) -> list[Part]:
        """Every rank takes its parts."""
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor = _Total.apply(self.group, tensor)  # type: ignore[no-untyped-call]
        outer = whole(tensor.size())
        return [tensor[layout.boxes[number].slices_in(outer)] for number in self.numbers(layout)]

    def spread(self, rows: torch.Tensor, batch: Layout, layout: Layout) -> list[Part]:
        """Every rank sends the others what they are to have of its rows."""
        self._check_member()
        return self.move([rows], batch, layout, rows)

    def ask(self, question: Question, layout: Layout, parts: Sequence[Part]) -> list[torch.Tensor]:
        """Questions go to the ranks that have the parts, and the answers come back."""
        self._check_member()
        return group_asking.ask(self.group, question, layout, parts)  # type: ignore[arg-type]  # all of them are here

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """What every rank says."""
        self._check_member()
        num_askers = len(self.askers)
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"  # "cuda" is the current one
        own = torch.tensor([*numbers] * num_askers, dtype=torch.int64, device=device)
        sizes = [len(numbers)] * num_askers
        found: list[list[int]] = moving.exchange(own, sizes, sizes, self.group).view(num_askers, -1).tolist()
        return found

    def settle(self, parts: Sequence[Part] = ()) -> None:
        """Functions have ended when they return."""

    def gather_objects(self, value: Any) -> list[Any]:
        """What every rank says."""
        self._check_member()
        found: list[Any] = [None for _ in self.askers]
        with talking(self.group, "gathering what every rank has to say"):
            dist.all_gather_object(found, value, self.group)
        return found


class NoGroupEngine(GroupEngine):
    """The engine of shards that belong to no process group: they can be looked at, and nothing else."""

    @property
    def _group(self) -> Any:
        return None

    @property
    def here(self) -> int:
        """Not a rank of anything; shards that are here have this number in the layout."""
        return -1

    @property
    def askers(self) -> tuple[int, ...]:
        """None: there are no others to exchange anything with."""
        return ()

    def run(
        self, function: Callable[..., Any], layout: Layout, *columns: Sequence[Any], **constants: Any
    ) -> list[Part]:
        """
        Raises:
            RuntimeError: There is no process group.
        """
        self._check_member()
        return []

    def move(
        self, parts: Sequence[Part], old: Layout, new: Layout, like: torch.Tensor, is_sum: bool = False
    ) -> list[Part]:
        """
        Raises:
            RuntimeError: There is no process group.
        """
        self._check_member()
        return []

    def _check_member(self) -> None:
        raise RuntimeError(
            "this ShardedTensor was made without a process group, so it has metadata() and local_shards() only; call "
            "init_process_group, and make it with ShardedTensor._init_from_local_shards_and_global_metadata"
        )


# What a backward does is differentiable, too: gradients of gradients take the same ways.


class _Move(torch.autograd.Function):
    """Parts of one layout from those of another."""

    @staticmethod
    def forward(
        ctx: Any, group: Any, old: Layout, new: Layout, like: torch.Tensor, is_sum: bool, *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.move = group, old, new
        return tuple(moving.move(parts, old, new, group, like, is_sum))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        group, old, new = ctx.move
        is_sum = new.has_overlaps  # of what went to several ranks, the gradients add up
        found = _Move.apply(group, new, old, gradients[0], is_sum, *gradients)  # type: ignore[no-untyped-call]
        return None, None, None, None, None, *found


class _Replicate(torch.autograd.Function):
    """The whole tensor on every rank. The gradient is the same everywhere, so every rank takes what is its own."""

    @staticmethod
    def forward(
        ctx: Any, group: Any, old: Layout, new: Layout, like: torch.Tensor, is_sum: bool, *parts: torch.Tensor
    ) -> torch.Tensor:
        mine = old.of(dist.get_rank(group))
        ctx.take = group, [old.boxes[number].slices_in(new.boxes[0]) for number in mine]
        (found,) = moving.move(parts, old, new, group, like, is_sum)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        group, taken = ctx.take
        (gradient,) = gradients
        if gradient.requires_grad and torch.is_grad_enabled():
            gradient = _Total.apply(group, gradient)  # type: ignore[no-untyped-call]
        own = (gradient[slices].clone() for slices in taken)  # a view would keep the memory of the whole
        return None, None, None, None, None, *own


class _Total(torch.autograd.Function):
    """The tensor itself; its gradient is the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, group: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, _Sum.apply(ctx.group, gradients[0])  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    """The sum over all ranks. Its gradient is the same everywhere, and is that of each of them."""

    @staticmethod
    def forward(ctx: Any, group: Any, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        with talking(group, "adding up a gradient of all ranks"):
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, gradients[0]
