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

from gradwire.shard import moving
from gradwire.shard.engines import Answerer, Engine, Part, Request
from gradwire.shard.layouts import Layout, everywhere, for_everybody, whole


class GroupEngine(Engine):
    """The engine of a process group.

    Args:
        group: The process group; None for the default one.
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
    def here(self) -> int:
        """The rank in the group."""
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
        if old == new and not is_sum:
            return list(parts)
        return list(_Move.apply(self.group, old, new, like, is_sum, *parts))  # type: ignore[no-untyped-call]

    def replicate(
        self, parts: Sequence[Part], layout: Layout, size: Sequence[int], like: torch.Tensor, is_sum: bool = False
    ) -> torch.Tensor:
        """Every rank sends its parts to all others."""
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
        return self.move([rows], batch, layout, rows)

    def ask(
        self,
        function: Answerer,
        layout: Layout,
        parts: Sequence[Part],
        requests: Sequence[Request],
        shapes: Sequence[Sequence[int]],
        like: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Questions go to the ranks that have the parts, and the answers come back."""
        mine = self.numbers(layout)
        arrived = self._spread_requests(layout, requests)
        answers = [function(part, asked) for part, asked in zip(parts, arrived, strict=True)]  # type: ignore[arg-type]
        outgoing = [[answers[position][asker].reshape(-1) for position in range(len(mine))] for asker in self.askers]
        sizes = [[_volume(shapes[number]) for number in layout.of(rank)] for rank in self.askers]
        flat = _join(outgoing, like)
        received = self._exchange(flat, [_total(items) for items in outgoing], [sum(items) for items in sizes])
        found: dict[int, torch.Tensor] = {}
        for rank, values in zip(self.askers, torch.split(received, [sum(items) for items in sizes]), strict=True):
            for number, value in zip(layout.of(rank), torch.split(values, sizes[rank]), strict=True):
                found[number] = value.view(*shapes[number])
        return [found[number] for number in range(len(layout.boxes))]

    def _spread_requests(self, layout: Layout, requests: Sequence[Request]) -> list[list[Request]]:
        """What everybody asks of each of this rank's parts."""
        lengths = torch.tensor([[item.size(0) for item in request] for request in requests], dtype=torch.int64)
        all_lengths = [torch.empty_like(lengths) for _ in self.askers]
        dist.all_gather(all_lengths, lengths, self.group)
        counts = [item.tolist() for item in all_lengths]  # by asker, box and position
        columns = [self._spread_column(layout, requests, counts, position) for position in range(len(requests[0]))]
        return [
            [tuple(column[place][asker] for column in columns) for asker in self.askers]
            for place in range(len(self.numbers(layout)))
        ]

    def _spread_column(
        self, layout: Layout, requests: Sequence[Request], counts: list[list[list[int]]], position: int
    ) -> list[list[torch.Tensor]]:
        """One tensor of each request: by this rank's parts and by who asks."""
        mine, like = self.numbers(layout), requests[0][position]
        rest = like.shape[1:]
        outgoing = [[requests[number][position].reshape(-1) for number in layout.of(rank)] for rank in self.askers]
        sizes = [[counts[asker][number][position] * _volume(rest) for number in mine] for asker in self.askers]
        flat = self._exchange(
            _join(outgoing, like), [_total(items) for items in outgoing], [sum(items) for items in sizes]
        )
        by_asker = [
            torch.split(values, sizes[asker])
            for asker, values in zip(self.askers, torch.split(flat, [sum(items) for items in sizes]), strict=True)
        ]
        return [
            [by_asker[asker][place].view(counts[asker][number][position], *rest) for asker in self.askers]
            for place, number in enumerate(mine)
        ]

    def _exchange(self, flat: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        found: torch.Tensor = _Exchange.apply(self.group, flat, sent, received)  # type: ignore[no-untyped-call]
        return found

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """What every rank says."""
        own = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in self.askers]
        dist.all_gather(found, own, self.group)
        return [item.tolist() for item in found]

    def settle(self, parts: Sequence[Part] = ()) -> None:
        """Functions have ended when they return."""

    def gather_objects(self, value: Any) -> list[Any]:
        """What every rank says."""
        found: list[Any] = [None for _ in self.askers]
        dist.all_gather_object(found, value, self.group)
        return found


def _volume(size: Sequence[int]) -> int:
    volume = 1
    for item in size:
        volume *= item
    return volume


def _total(items: Sequence[torch.Tensor]) -> int:
    return sum(item.numel() for item in items)


def _join(outgoing: Sequence[Sequence[torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
    items = [item for group in outgoing for item in group]
    return torch.cat(items) if items else like.new_empty(0)


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
        return None, None, None, None, None, *moving.move(gradients, new, old, group, gradients[0], is_sum)


class _Replicate(torch.autograd.Function):
    """The whole tensor on every rank. The gradient is the same everywhere, so every rank takes what is its own."""

    @staticmethod
    def forward(
        ctx: Any, group: Any, old: Layout, new: Layout, like: torch.Tensor, is_sum: bool, *parts: torch.Tensor
    ) -> torch.Tensor:
        mine = old.of(dist.get_rank(group))
        ctx.slices = [old.boxes[number].slices_in(new.boxes[0]) for number in mine]
        (found,) = moving.move(parts, old, new, group, like, is_sum)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, None, None, None, *(gradients[0][slices] for slices in ctx.slices)


class _Total(torch.autograd.Function):
    """The tensor itself; its gradient is the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, group: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return None, total


class _Exchange(torch.autograd.Function):
    """One flat tensor made of a piece for every rank, for one made of a piece from every rank."""

    @staticmethod
    def forward(ctx: Any, group: Any, flat: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.exchange = group, sent, received
        return _exchange_pieces(group, flat, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        group, sent, received = ctx.exchange
        return None, _exchange_pieces(group, gradients[0].contiguous(), received, sent), None, None


def _exchange_pieces(group: Any, flat: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    rank = dist.get_rank(group)
    pieces = torch.split(flat.detach(), sent)
    arrived = moving.exchange(
        {peer: piece for peer, piece in enumerate(pieces) if peer != rank},
        {peer: size for peer, size in enumerate(received) if peer != rank},
        group,
        flat,
    )
    arrived[rank] = pieces[rank]
    return torch.cat([arrived[peer] for peer in range(len(received))])
